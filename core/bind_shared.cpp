#include "bind.hpp"

std::vector<MediaSpan> media_of(const Longs& offsets, const Longs& lengths, const nb::bytes& digests) {
    if (lengths.size() != offsets.size() || digests.size() != offsets.size() * 32)
        throw nb::value_error("media: offsets, lengths and digests must describe the same number of items, each digest 32 bytes");
    std::vector<MediaSpan> media(offsets.size());
    for (std::size_t i = 0; i < media.size(); ++i) {
        media[i].offset = offsets.data()[i];
        media[i].length = lengths.data()[i];
        std::memcpy(media[i].digest.bytes.data(), digests.c_str() + i * 32, 32);
    }
    return media;
}

LeaseRequest request_of(const nb::bytes& space, const Ints& tokens, const std::vector<MediaSpan>& media, std::uint64_t reserve,
                        std::uint32_t leave, std::uint32_t multiple, bool read, bool write, bool load) {
    return {.space = key_of(space, "the namespace"),
            .tokens = view(tokens),
            .media = media,
            .reserve = reserve,
            .leave = leave,
            .multiple = multiple,
            .read = read,
            .write = write,
            .load = load};
}

LeaseReport report_of(const Driver& driver, const LeaseAnswer& answer) {
    const Lease* held = driver.find(answer.id);
    return {answer, held ? held->matched : 0};
}

nb::tuple tuple_of(const LeaseReport& report) {
    const LeaseAnswer& answer = report.answer;
    return nb::make_tuple(answer.id, answer.never, answer.needed, answer.available, report.matched);
}

StateReport state_of(const Driver& driver, LeaseId id) {
    const Lease* held = driver.find(id);
    if (!held) return {};
    StateReport report{held->settled, held->hit, held->rows_lost, {}};
    for (std::uint32_t i = 0; i < held->hit; ++i) report.sources[static_cast<std::size_t>(held->source[i])]++;
    return report;
}

nb::tuple tuple_of(const StateReport& report) {
    const auto& sources = report.sources;
    return nb::make_tuple(report.settled, report.hit, report.rows_lost, nb::make_tuple(sources[0], sources[1], sources[2]));
}

nb::list events_of(const std::vector<Event>& events) {
    nb::list out;
    for (const Event& event : events) {
        const char* kind = event.kind == EventKind::stored ? "stored" : event.kind == EventKind::removed ? "removed" : "damaged";
        out.append(nb::make_tuple(event.sequence, event.time, kind, tier_name(event.tier), tier_name(event.source), event.depth,
                                  bytes_of(event.key)));
    }
    return out;
}

std::vector<Counter> stats_of(const Driver& driver) {
    std::vector<Counter> out;
    const DriverCounters& c = driver.counters();
    for (Tier tier : {Tier::gpu, Tier::cpu, Tier::disk}) {
        const auto i = static_cast<std::size_t>(tier);
        const TierCounters& t = driver.ledger().counters(tier);
        const char* name = tier_name(tier);
        out.push_back({name, "pages", driver.ledger().resident(tier)});
        out.push_back({name, "looked_up", c.looked_up[i]});
        out.push_back({name, "loaded", c.loaded[i]});
        out.push_back({name, "used", c.used[i]});
        out.push_back({name, "stored", t.stored});
        out.push_back({name, "evicted", t.evicted});
        out.push_back({name, "dropped", t.dropped});
        out.push_back({name, "failures", t.failures});
        if (tier == Tier::disk) {
            out.push_back({name, "shared", driver.ledger().shared()});
        } else {
            out.push_back({name, "capacity", driver.ledger().capacity(tier)});
            out.push_back({name, "free", driver.ledger().free_rows(tier)});
        }
    }
    const Counter totals[] = {
        {nullptr, "leases", c.leases},
        {nullptr, "full", c.full},
        {nullptr, "missed_pages", c.missed_pages},
        {nullptr, "key_conflicts", c.key_conflicts},
        {nullptr, "corrupt", c.corrupt},
        {nullptr, "unreadable", c.unreadable},
        {nullptr, "stale", c.stale},
        {nullptr, "timeouts", c.timeouts},
        {nullptr, "copy_failures", c.copy_failures},
        {nullptr, "saves_dropped", c.saves_dropped},
        {nullptr, "spills_dropped", c.spills_dropped},
        {nullptr, "duplicates", c.duplicates},
        {nullptr, "late_completions", c.late_completions},
        {nullptr, "disk_reads", c.reads},
        {nullptr, "disk_writes", c.writes},
        {nullptr, "ups", c.ups},
        {nullptr, "downs", c.downs},
        {nullptr, "events_lost", driver.ledger().events_lost()},
        {nullptr, "open_leases", driver.leases()},
        {nullptr, "known_pages", driver.ledger().forest().pages()},
    };
    out.insert(out.end(), std::begin(totals), std::end(totals));
    return out;
}

nb::dict dict_of(const std::vector<Counter>& counters) {
    nb::dict out;
    for (const auto& [tier, name, value] : counters) {
        if (tier && !out.contains(tier)) out[tier] = nb::dict();
        nb::dict part = tier ? nb::cast<nb::dict>(out[tier]) : out;
        part[name] = value;
    }
    return out;
}
