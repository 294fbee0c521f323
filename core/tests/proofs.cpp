// What a simulation proves after every step: every copy that can be found has its bytes, events say what happened, the driver's books
// are right, nothing leaves a tier that is in use there or has something below it.
#include <algorithm>

#include "session.hpp"
#include "simulation.hpp"

namespace kvstrata::testing {

void Simulation::hear(const Event& event) {
    static const char* kinds[] = {"stored in", "removed from", "damaged in"};
    static const char* tiers[] = {"gpu", "cpu", "disk"};
    tell("page %04x %s %s (from %s)", name(event.key), kinds[static_cast<int>(event.kind)], tiers[static_cast<int>(event.tier)],
         tiers[static_cast<int>(event.source)]);
    PageFacts& page = book_.at(event.key);
    const int tier = static_cast<int>(event.tier);
    const bool home = event.tier == driver_->ledger().home();
    if (event.kind == EventKind::stored) {
        require(!page.in[tier], "a page was stored where it is already");
        require(event.tier != Tier::disk || page.written, "a page is findable on disk before it is there");
        const bool engines = event.source == Tier::gpu && setup_.guest();
        require(engines || event.source == event.tier || page.in[static_cast<int>(event.source)],
                "a page came from where it is not");
        page.in[tier] = true;
        if (event.tier == Tier::cpu) page.awaited_since = kNever;
        if (event.tier == Tier::disk) page.unreadable_until = -kNever;  // written anew
        return;
    }
    require(page.in[tier], "a page was removed from where it is not");
    page.in[tier] = false;
    if (event.kind == EventKind::damaged) {
        require(event.tier == Tier::disk && std::find(condemned_.begin(), condemned_.end(), event.key) != condemned_.end(),
                "a sound copy was dropped as damaged");
    } else if (event.tier != Tier::disk) {
        require(!book_.any_in(event.tier, event.key), "a page left a memory tier before the pages below it");
        for (const auto& session : sessions_)
            require(!home || !session->uses(event.key), "a page left the tier where it is in use");
    } else {
        std::erase_if(links_, [&](const auto& link) { return link.first == event.key; });
        const bool below = std::any_of(links_.begin(), links_.end(), [&](const auto& link) { return link.second == event.key; });
        const bool given_up = std::erase(given_up_, event.key) > 0;
        require(!below || given_up, "a page left the disk before the pages below it");
        require(!io_ || !io_->reading(event.key), "a page left the disk while it was read");
    }
    if (event.tier == Tier::disk) page.trouble_at = now();  // whoever waits to read it will not
}

void Simulation::check() {
    std::string fault;
    if (!driver_->check_integrity(fault)) throw Broken(fault);
    check_pages();
    check_entries();
    require(slots_ == count_slots(), "slots are lost or doubled");
    if (setup_.driver.disk)
        require(records_harmed_ || medium_->allocated_bytes() <= setup_.disk_bytes, "the directory is larger than its cap");
    for (const auto& session : sessions_) session->look();
    collect_blocks();
    if (!setup_.guest()) poison_free_rows();
}

// Of segments that are there.
std::size_t Simulation::count_slots() const {
    const Ledger& ledger = driver_->ledger();
    std::size_t slots = ledger.free_slots() + io_->clearing([&](SlotRef slot) { return !ledger.retired(slot.segment); });
    for (EntryId id = 0; id < ledger.index().id_bound(); ++id)
        slots += ledger.index().at(id).alive && !ledger.retired(ledger.index().at(id).slot.segment);
    return slots;
}

void Simulation::check_pages() {
    const Forest& forest = driver_->ledger().forest();
    std::size_t resident[2] = {0, 0};
    for (PageId id = 0; id < forest.id_bound(); ++id) {
        const PageRecord& record = forest.at(id);
        if (!record.alive || record.is_root()) continue;
        const PageFacts& page = book_.at(record.key);
        for (int tier = 0; tier < 2; ++tier) {
            require((record.state[tier] == Residency::resident) == page.in[tier], "events do not tell where pages are");
            resident[tier] += record.state[tier] == Residency::resident;
        }
        if (record.state[1] == Residency::resident)
            require(std::memcmp(slab_->row(record.row[1]), page.bytes.data(), page.bytes.size()) == 0,
                    "a page in the slab has wrong bytes");
        if (record.state[0] == Residency::resident && device_->quiet(record.row[0]))
            require(device_->holds(record.row[0], page.bytes), "a page on the device has wrong bytes");
    }
    for (int tier = 0; tier < 2; ++tier)
        require(resident[tier] == book_.count(static_cast<Tier>(tier)), "events do not tell where pages are");
}

void Simulation::check_entries() {
    const KeyIndex& index = driver_->ledger().index();
    std::size_t stored = 0;
    links_.clear();
    for (EntryId id = 0; id < index.id_bound(); ++id) {
        const Entry& entry = index.at(id);
        if (!entry.alive) continue;
        if (entry.parent != kNoEntry) links_.emplace_back(entry.key, index.at(entry.parent).key);
        require(entry.writing || book_.at(entry.key).in[2], "events do not tell what is on disk");
        stored += !entry.writing;
    }
    require(stored == book_.count(Tier::disk), "events do not tell what is on disk");
}

PageId Simulation::page_of(const Key& key) const {
    const Forest& forest = driver_->ledger().forest();
    for (PageId page = 0; page < forest.id_bound(); ++page)
        if (forest.at(page).alive && !forest.at(page).is_root() && forest.at(page).key == key) return page;
    return kNoPage;
}

// By the rules, not by the driver's own account: all but what is pinned, moving, expected or spared, and what lies above those.
std::uint32_t Simulation::rows_to_be_had(const std::vector<PageName>& spared) const {
    const Forest& forest = driver_->ledger().forest();
    std::vector<std::uint8_t> stays(forest.id_bound(), 0);
    const auto keep = [&](PageId page) {
        for (; page != kNoPage; page = forest.at(page).parent) stays[page] = 1;
    };
    for (PageId page = 0; page < forest.id_bound(); ++page) {
        const PageRecord& record = forest.at(page);
        if (record.alive && (record.pins > 0 || record.busy[0] > 0 || record.state[0] == Residency::incoming)) keep(page);
    }
    for (const PageName& page : spared)
        if (const PageId record = page_of(page.key); record != kNoPage) keep(record);
    std::uint32_t rows = driver_->ledger().free_rows(Tier::gpu);
    for (PageId page = 0; page < forest.id_bound(); ++page)
        rows += forest.at(page).alive && forest.at(page).state[0] == Residency::resident && !stays[page];
    return rows;
}

// Rows that belong to nobody, and that nothing submitted still reads or writes, hold nothing from here on.
void Simulation::poison_free_rows() {
    std::vector<std::uint8_t> free(setup_.device_rows, 1);
    const Forest& forest = driver_->ledger().forest();
    for (PageId page = 0; page < forest.id_bound(); ++page)
        if (forest.at(page).alive && forest.at(page).row[0] != kNoRow) free[static_cast<std::size_t>(forest.at(page).row[0])] = 0;
    for (const auto& session : sessions_)
        for (const Row row : session->rows())
            if (row != kNoRow) free[static_cast<std::size_t>(row)] = 0;
    for (std::uint32_t row = 0; row < setup_.device_rows; ++row)
        if (free[row] && !device_free_[row] && device_->untouched(static_cast<Row>(row))) device_->poison(static_cast<Row>(row));
    device_free_ = std::move(free);
}

// --- the engine's blocks

bool Simulation::take_blocks(std::size_t count, std::vector<Row>& into) {
    if (blocks_.size() < count) return false;
    into.assign(blocks_.end() - static_cast<std::ptrdiff_t>(count), blocks_.end());
    blocks_.resize(blocks_.size() - count);
    return true;
}

void Simulation::give_blocks(const std::vector<Row>& blocks, std::vector<std::uint64_t> tickets,
                             std::vector<SimDevice::RowBytes> expected) {
    returned_.push_back({blocks, std::move(tickets), std::move(expected)});
}

void Simulation::collect_blocks() {
    std::erase_if(returned_, [&](const Returned& returned) {
        for (const std::uint64_t ticket : returned.tickets)
            if (device_->copying(ticket)) return false;
        for (const Row block : returned.blocks)
            if (!device_->untouched(block)) return false;
        for (const std::uint64_t ticket : returned.tickets) {
            if (driver_->copying(ticket)) return false;
            const auto well = ended_well_.find(ticket);
            for (const auto& [row, chain] : returned.expected)
                require(well == ended_well_.end() || !well->second || device_->holds(row, row_of(chain, setup_.row_bytes)),
                        "a load brought wrong bytes to the engine's blocks");
        }
        for (const Row block : returned.blocks) device_->poison(block);
        blocks_.insert(blocks_.end(), returned.blocks.begin(), returned.blocks.end());
        return true;
    });
}

// --- at rest

void Simulation::prove_rest() const {
    require(driver_->idle(), "something is still to be done at rest");
    require(driver_->leases() == 0, "a lease is left at rest");
    require(!device_->busy() && !io_->busy(), "something is in flight at rest");
    const Ledger& ledger = driver_->ledger();
    for (PageId id = 0; id < ledger.forest().id_bound(); ++id) {
        const PageRecord& page = ledger.forest().at(id);
        if (!page.alive) continue;
        tell("record %u %04x above %d children %u pins %u busy %u %u state %d %d entry %d", id, name(page.key),
             static_cast<int>(page.parent), page.children, page.pins, page.busy[0], page.busy[1], static_cast<int>(page.state[0]),
             static_cast<int>(page.state[1]), static_cast<int>(page.entry));
        require(page.pins == 0 && page.busy[0] == 0 && page.busy[1] == 0 && !page.load_queued, "a page is held at rest");
        require(page.state[0] != Residency::incoming && page.state[1] != Residency::incoming, "a page is expected at rest");
        require(page.children > 0 || page.entry != kNoEntry || page.state[0] != Residency::none || page.state[1] != Residency::none,
                "a record without a copy is left at rest");
    }
    for (EntryId id = 0; id < ledger.index().id_bound(); ++id) {
        const Entry& entry = ledger.index().at(id);
        require(!entry.alive || (!entry.writing && entry.busy == 0), "a copy on disk is held at rest");
    }
}

// Every row of every tier can be had when nothing is in use.
void Simulation::prove_evictable() {
    Ledger& ledger = driver_->ledger();
    for (const Tier tier : {Tier::gpu, Tier::cpu}) {
        std::vector<Row> rows;
        for (std::uint32_t i = 0; i < ledger.capacity(tier); ++i) {
            rows.push_back(ledger.take_row(tier));
            require(rows.back() != kNoRow, "a page cannot be evicted at rest");
        }
        std::sort(rows.begin(), rows.end());
        require(std::adjacent_find(rows.begin(), rows.end()) == rows.end(), "a row was given out twice");
        for (const Row row : rows) ledger.give_row(tier, row);
    }
    while (ledger.resident(Tier::disk) > 0) {
        SlotRef slot;
        require(ledger.take_slot(slot), "a page cannot be evicted from disk at rest");
    }
    require(ledger.forest().pages() == 0, "records are left when nothing is stored any more");
    require(ledger.index().size() == 0, "entries are left when nothing is stored any more");
    for (const Event& event : ledger.drain_events()) hear(event);
}

}  // namespace kvstrata::testing
