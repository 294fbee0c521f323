// The driver's half that answers requests: lookup, reservation, publishing, release; hits.cpp and guests.cpp have the rest. See driver.hpp.
//
// Who owns a row of the device pool: the ledger's free list, or one page of the forest (shared by every lease whose path has it), or
// one lease (`own`), until it publishes the page or gives the row back.
#include <algorithm>
#include <utility>

#include "driver.hpp"
#include "guard.hpp"
#include "keys.hpp"

namespace kvstrata {

Content Driver::content(std::span<const std::int32_t> tokens, std::int64_t begin, const std::vector<MediaSpan>& media) {
    if (media.empty()) return {tokens, {}};
    const auto end = begin + static_cast<std::int64_t>(tokens.size());
    media_scratch_.clear();
    for (const MediaSpan& item : media)
        if (item.offset < end && item.offset + item.length > begin)
            media_scratch_.push_back({static_cast<std::int32_t>(item.offset - begin), item.digest});
    return {tokens, media_scratch_};
}

Content Driver::content(const Lease& lease, std::uint32_t page) {
    const std::size_t size = config_.ledger.page_size;
    const std::size_t begin = page * size;
    return content({lease.tokens.data() + (begin - lease.dropped), size}, static_cast<std::int64_t>(begin), lease.media);
}

Key Driver::key_below(const Lease& lease, PageId above, const Content& content) const {
    const Forest& forest = ledger_.forest();
    Key key = page_key(forest.at(lease.root).key, forest.at(above).key, content);
    std::fill(key.bytes.begin() + static_cast<std::ptrdiff_t>(config_.key_bytes), key.bytes.end(), std::uint8_t{0});
    return key;
}

// The forest first; at the first page it cannot serve, and from then on, keys. A page found by key joins the forest with the tokens of
// the request; whether the slot holds those is proven when it is read.
//
// All that lease() must know of a record is taken down on the way: most are cold, and there may be thousands.
Driver::Found Driver::find_path(Lease& lease, std::span<const std::int32_t> tokens, std::uint32_t limit, bool load) {
    const Forest& forest = ledger_.forest();
    const std::size_t size = config_.ledger.page_size;
    const auto home = static_cast<std::size_t>(ledger_.home());
    const double note_again = now_ - config_.note_uses_after;
    const bool own = own_mode();
    Found found;
    std::uint32_t cpu = 0, disk = 0;  // pages up to the deepest copy there
    lease.path.reserve(limit);
    lease.source.reserve(limit);
    if (own) lease.rows.reserve(limit);
    PageId above = lease.root;
    for (std::uint32_t i = 0; i < limit; ++i) {
        const Content wanted = content(tokens.subspan(i * size, size), static_cast<std::int64_t>(i * size), lease.media);
        PageId page = ledger_.child(above, wanted);
        if (page == kNoPage || forest.at(page).state[home] != Residency::resident) {
            if (!load) break;
            if (page == kNoPage || !ledger_.findable(page)) {
                if (ledger_.index().size() == 0) break;
                const Key key = page != kNoPage ? forest.at(page).key : key_below(lease, above, wanted);
                const EntryId entry = ledger_.find_entry(key);
                if (entry == kNoEntry || !ledger_.readable(entry)) break;
                if (ledger_.index().at(entry).page != kNoPage) {  // findable, were it this page's: another content has the same key
                    counters_.key_conflicts++;
                    break;
                }
                if (page == kNoPage) page = ledger_.add_page(above, wanted, key);
                ledger_.attach(page, entry);
            }
            found.all_home = false;
        }
        const PageRecord& record = forest.at(page);
        // Where its bytes are, though they may be on their way for another lease: who decides whether to wait asks how far.
        lease.source.push_back(record.state[0] == Residency::resident   ? Tier::gpu
                               : record.state[1] == Residency::resident ? Tier::cpu
                                                                        : Tier::disk);
        lease.path.push_back(page);
        if (own) lease.rows.push_back(record.row[0]);
        if (record.state[1] == Residency::resident) cpu = i + 1;
        if (record.entry != kNoEntry) {
            disk = i + 1;
            if (record.noted == 0 || record.noted <= note_again) found.look_again.push_back(i);
        } else if (record.state[1] == Residency::resident) {
            found.look_again.push_back(i);
        }
        above = page;
    }
    lease.deepest = {0, cpu, disk};
    return found;
}

// The path ends after so many pages.
void Driver::cut_path(Lease& lease, std::uint32_t pages) {
    lease.path.resize(pages);
    for (Tier tier : {Tier::cpu, Tier::disk}) {
        std::uint32_t& deepest = lease.deepest[static_cast<std::size_t>(tier)];
        deepest = std::min(deepest, pages);
        while (deepest > 0 && !ledger_.has_copy(tier, lease.path[deepest - 1])) --deepest;
    }
}

// Of the pages it published itself the lease looks where they are by now; of those it found only at what was the deepest copy then, or
// a hit would cost its length.
void Driver::used(const Lease& lease) {
    for (Tier tier : {Tier::gpu, Tier::cpu, Tier::disk}) {
        auto last = static_cast<std::uint32_t>(lease.path.size());
        const std::uint32_t found = tier == ledger_.home() ? 0 : lease.hit;
        while (last > found && !ledger_.has_copy(tier, lease.path[last - 1])) --last;
        if (last == found && tier != ledger_.home()) last = lease.deepest[static_cast<std::size_t>(tier)];
        if (last > 0 && ledger_.has_copy(tier, lease.path[last - 1])) ledger_.used(tier, lease.path[last - 1]);
    }
}

void Driver::tally(const Lease& lease, std::array<std::uint64_t, kTiers>& counter) {
    for (int tier = 0; tier < kTiers; ++tier)
        counter[static_cast<std::size_t>(tier)] +=
            static_cast<std::uint64_t>(std::count(lease.source.begin(), lease.source.begin() + lease.hit, static_cast<Tier>(tier)));
}

LeaseAnswer Driver::lease(double now, const LeaseRequest& request) {
    ledger_.set_time(now_ = now);
    const std::uint64_t size = config_.ledger.page_size;
    const std::uint64_t length = request.tokens.size();
    const std::uint64_t total = (length + request.reserve + size - 1) / size;
    LeaseAnswer answer;
    counters_.leases++;
    if (own_mode() && total > ledger_.capacity(Tier::gpu)) {
        answer.never = true;
        answer.needed = static_cast<std::uint32_t>(std::min<std::uint64_t>(total, ~std::uint32_t{0}));
        answer.available = ledger_.capacity(Tier::gpu);
        counters_.full++;
        return answer;
    }

    Lease lease;
    lease.root = ledger_.root(guarded(Guard::name_space) ? request.space : Key{});
    lease.media.assign(request.media.begin(), request.media.end());
    lease.multiple = request.multiple == 0 ? static_cast<std::uint32_t>(size) : request.multiple;
    lease.write = request.write;
    std::uint64_t missed = 0;
    Found found;
    if (request.read && length > request.leave) {
        std::uint64_t most = (length - request.leave) / lease.multiple * lease.multiple;
        // A guest's pages wait in the slab for the engine: a prefix longer than the slab could never be there as a whole.
        if (!own_mode()) most = std::min<std::uint64_t>(most, ledger_.capacity(Tier::cpu) * size / lease.multiple * lease.multiple);
        found = find_path(lease, request.tokens, static_cast<std::uint32_t>(most / size), request.load);
        const auto kept = static_cast<std::uint32_t>(lease.path.size() * size / lease.multiple * lease.multiple / size);
        if (kept < lease.path.size()) {
            cut_path(lease, kept);
            lease.source.resize(kept);
            if (own_mode()) lease.rows.resize(kept);
        }
        missed = most / size - kept;
    }
    lease.matched = lease.hit = static_cast<std::uint32_t>(lease.path.size());
    // What is on the device stays there: the tokens of those pages are never asked for again.
    if (own_mode() && found.all_home) lease.dropped = lease.matched * size;
    lease.tokens.assign(request.tokens.begin() + static_cast<std::ptrdiff_t>(lease.dropped), request.tokens.end());

    const LeaseId id = next_id_++;
    move_pin(lease);  // before rows are taken: eviction retires records that nothing holds
    if (own_mode() && !take_rows(lease, static_cast<std::uint32_t>(total), found.all_home, answer)) {
        ledger_.unpin(lease.pinned);
        counters_.full++;
        return answer;
    }
    // Only now: who finds no room asks again, and would be counted each time.
    counters_.missed_pages += missed;
    tally(lease, counters_.looked_up);
    auto& kept = leases_.emplace(id, std::move(lease)).first->second;
    if (found.all_home)
        check_settled(kept);
    else
        expect_all(kept, id);
    for (std::uint32_t i : found.look_again) {
        if (i >= kept.path.size()) break;  // it was shortened
        const PageId page = kept.path[i];
        save_again(page);
        if (ledger_.forest().at(page).entry != kNoEntry) note_use(page);
    }
    used(kept);
    return {id, false, 0, 0};
}

// Rows for every page of the request that has none on the device: all or nothing.
bool Driver::take_rows(Lease& lease, std::uint32_t total, bool all_home, LeaseAnswer& answer) {
    const Forest& forest = ledger_.forest();
    const auto matched = static_cast<std::uint32_t>(lease.path.size());
    const auto on_device = [&](std::uint32_t i) { return forest.at(lease.path[i]).state[0] != Residency::none; };
    std::uint32_t need = total - matched;
    std::vector<PageId> found;  // on the device, with the next page of the path not there
    if (all_home && matched > 0) found.push_back(lease.path.back());
    for (std::uint32_t i = 0; i < matched && !all_home; ++i) {
        need += !on_device(i);
        if (on_device(i) && (i + 1 == matched || !on_device(i + 1))) found.push_back(lease.path[i]);
    }
    answer.needed = need;
    answer.available = ledger_.free_rows(Tier::gpu);
    if (need > answer.available) {
        std::vector<PageId> fixed = in_use();
        fixed.insert(fixed.end(), found.begin(), found.end());
        answer.available += ledger_.evictable(fixed, need - answer.available);
        if (need > answer.available && guarded(Guard::room_first)) return false;
    }
    // Taking rows may evict. What this lease found on the device is protected by pins meanwhile, one for each run of pages: nothing on
    // the device is below the last of a run. Each page that gets a row protects its parents by itself.
    for (PageId page : found) ledger_.pin(page);
    bool enough = true;
    std::vector<PageId> expected;
    lease.rows.resize(total, kNoRow);
    lease.own.resize(total, 0);
    for (std::uint32_t i = all_home ? matched : 0; i < total && enough; ++i) {
        if (i < matched && on_device(i)) continue;
        const Row row = ledger_.take_row(Tier::gpu);
        if (row == kNoRow) {
            enough = false;
            lease.rows.resize(i);
            break;
        }
        lease.rows[i] = row;
        lease.own[i] = i >= matched;
        if (i < matched) {
            ledger_.expect(Tier::gpu, lease.path[i], row);
            expected.push_back(lease.path[i]);
        }
    }
    for (PageId page : found) ledger_.unpin(page);
    if (enough) return true;
    for (PageId page : expected) ledger_.give_row(Tier::gpu, ledger_.withdraw(Tier::gpu, page));
    for (std::size_t i = matched; i < lease.rows.size(); ++i) ledger_.give_row(Tier::gpu, lease.rows[i]);
    return false;
}

void Driver::expect_all(Lease& lease, LeaseId id) {
    const std::size_t home = static_cast<std::size_t>(ledger_.home());
    for (PageId page : lease.path)
        if (ledger_.forest().at(page).state[home] != Residency::resident) {
            waiters_[page].push_back(id);
            lease.missing++;
        }
    // In a second pass: wanting a page may fail it at once, which shortens the lease.
    const std::vector<PageId> path = lease.path;
    for (PageId page : path) want(page);
    check_settled(lease);
}

std::vector<PageId> Driver::in_use() const {
    std::vector<PageId> pages(uploading_.begin(), uploading_.end());
    for (const auto& [id, lease] : leases_)
        if (lease.pinned != kNoPage) pages.push_back(lease.pinned);
    for (const auto& [ticket, copy] : copies_)
        if (!copy.up && !copy.guest) pages.insert(pages.end(), copy.pages.begin(), copy.pages.end());
    return pages;
}

const Lease* Driver::find(LeaseId id) const {
    const auto found = leases_.find(id);
    return found == leases_.end() ? nullptr : &found->second;
}

void Driver::append(LeaseId id, std::span<const std::int32_t> tokens) {
    const auto found = leases_.find(id);
    if (found != leases_.end()) found->second.tokens.insert(found->second.tokens.end(), tokens.begin(), tokens.end());
}

bool Driver::grow(double now, LeaseId id, std::uint64_t tokens) {
    ledger_.set_time(now_ = now);
    const auto found = leases_.find(id);
    if (found == leases_.end() || !own_mode()) return false;
    Lease& lease = found->second;
    const std::uint64_t size = config_.ledger.page_size;
    const std::uint64_t have = lease.rows.size();
    const std::uint64_t rows = (tokens + size - 1) / size;
    if (rows > ledger_.free_rows(Tier::gpu) &&
        rows > ledger_.free_rows(Tier::gpu) + ledger_.evictable(in_use(), static_cast<std::uint32_t>(rows))) {
        counters_.full++;  // before anything is evicted in vain
        return false;
    }
    while (lease.rows.size() < have + rows) {
        const Row row = ledger_.take_row(Tier::gpu);
        if (row == kNoRow) {
            for (; lease.rows.size() > have; lease.rows.pop_back(), lease.own.pop_back())
                ledger_.give_row(Tier::gpu, lease.rows.back());
            counters_.full++;
            return false;
        }
        lease.rows.push_back(row);
        lease.own.push_back(1);
    }
    return true;
}

// --- what a lease gives

std::uint32_t Driver::publish(double now, LeaseId id, std::uint64_t tokens, Fence ready) {
    ledger_.set_time(now_ = now);
    const auto found = leases_.find(id);
    if (found == leases_.end() || !own_mode() || !found->second.settled) return 0;
    Lease& lease = found->second;
    if (!std::exchange(lease.used, true)) tally(lease, counters_.used);
    if (!lease.write) return static_cast<std::uint32_t>(lease.path.size());

    const Forest& forest = ledger_.forest();
    const std::uint64_t full = std::min<std::uint64_t>(tokens, lease.dropped + lease.tokens.size()) / config_.ledger.page_size;
    const std::uint64_t last = std::min<std::uint64_t>(full, lease.rows.size());
    for (auto i = static_cast<std::uint32_t>(lease.path.size()); i < last && lease.own[i]; ++i) {
        const PageId above = i == 0 ? lease.root : lease.path[i - 1];
        const Content written = content(lease, i);
        PageId page = ledger_.child(above, written);
        if (page == kNoPage) page = ledger_.add_page(above, written, key_below(lease, above, written));
        // On its way for another lease: it may fail to come, and a pin below it would then protect nothing above it. Asked again by the
        // next publish.
        if (forest.at(page).state[0] == Residency::incoming) break;
        const bool first = forest.at(page).state[0] == Residency::none || !guarded(Guard::first_writer);
        if (first) ledger_.expect(Tier::gpu, page, lease.rows[i]);
        lease.path.push_back(page);
        move_pin(lease);  // before it arrives: no page of the path is a candidate for a moment
        if (first) {
            ledger_.arrive(Tier::gpu, page, Tier::gpu);
            lease.own[i] = 0;
            ledger_.set_ready(page, ready);
            queue_down(page);
        } else {
            counters_.duplicates++;  // the first writer won; this row stays the lease's own
            save_again(page);
        }
    }
    return static_cast<std::uint32_t>(lease.path.size());
}

void Driver::release(double now, LeaseId id, Fence fence) {
    ledger_.set_time(now_ = now);
    const auto found = leases_.find(id);
    if (found == leases_.end()) return;
    Lease lease = std::move(found->second);
    leases_.erase(found);
    released_ = std::max(released_, fence);
    if (!lease.settled && guarded(Guard::release_on_cancel))
        for (std::uint32_t i = static_cast<std::uint32_t>(lease.path.size()); i-- > 0;)
            if (const Row row = give_up_page(lease, id, i); row != kNoRow) ledger_.give_row(Tier::gpu, row);
    for (std::size_t i = 0; i < lease.rows.size(); ++i)
        if (lease.own[i]) ledger_.give_row(Tier::gpu, lease.rows[i]);
    used(lease);
    const PageId pinned = lease.pinned;
    ledger_.unpin(pinned);
    if (!lease.settled)
        for (std::size_t i = lease.path.size(); i-- > 0;) ledger_.retire(lease.path[i]);
}

}  // namespace kvstrata
