// The driver's half that moves pages: loads, ups, downs, spills are queued and started here; how they end is in completions.cpp and
// deadlines.cpp. See driver.hpp.
//
// What a move borrows: a load its incoming slab row and a hold on the entry; an up a hold on the slab copy; a down a hold on the device
// copy; a spill a hold on the slab copy. A move past its deadline is abandoned: its page is given up, and what it borrowed stays
// quarantined until its completion comes after all.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "driver.hpp"
#include "guard.hpp"

namespace kvstrata {

Driver::Driver(const DriverConfig& config, std::unique_ptr<Policy> policy)
    : config_(config), ledger_(config.ledger, std::move(policy)) {}

bool Driver::valid(const Waiting& item) const {
    const PageRecord& record = ledger_.forest().at(item.page);
    return record.alive && record.generation == item.generation;
}

// Half the slab may wait for the disk; the rest stays free for what requests need.
bool Driver::may_dirty(std::size_t more) const {
    if (!guarded(Guard::half_the_slab)) return true;
    return !config_.disk || dirty_ + saving_ + more < std::max(1u, ledger_.capacity(Tier::cpu) / 2);
}

// --- queues

void Driver::want(PageId page) {
    const PageRecord& record = ledger_.forest().at(page);
    const std::size_t home = static_cast<std::size_t>(ledger_.home());
    if (!waiters_.contains(page) || record.state[home] == Residency::resident) return;
    if (uploading_.contains(page) && guarded(Guard::join_moves)) return;
    if (own_mode() && record.state[1] == Residency::resident)
        queue_up(page);
    else if (record.state[1] == Residency::none && !record.load_queued)
        queue_load(page);
}

void Driver::queue_load(PageId page) {
    ledger_.set_load_queued(page, true);
    if (!own_mode()) ledger_.expect(Tier::cpu, page, kNoRow);  // no row yet, but it protects its parents in the slab
    loads_.push_back(waiting(page));
}

void Driver::queue_up(PageId page) {
    ledger_.hold(Tier::cpu, page);
    uploading_.insert(page);
    ups_.push_back(waiting(page));
}

void Driver::queue_down(PageId page) {
    if ((!cpu_tier() && guarded(Guard::no_cpu_tier)) || ledger_.forest().at(page).state[1] != Residency::none) return;
    if (downs_.size() >= 2 * std::size_t{ledger_.capacity(Tier::gpu)}) {  // nothing goes down at all: the oldest are long evicted
        downs_.pop_front();
        counters_.saves_dropped++;
    }
    downs_.push_back(waiting(page));
}

// A load did not come. If somebody has published the page meanwhile, it was not saved for the load's sake: it is now.
void Driver::save_instead(PageId page) {
    if (own_mode() && ledger_.forest().at(page).state[0] == Residency::resident) queue_down(page);
}

// In the slab, and the disk does not have it (any more): what was dropped when the disk was full or ill, or lost with a segment, gets
// another chance whenever it is used.
void Driver::save_again(PageId page) {
    const PageRecord& record = ledger_.forest().at(page);
    if (!config_.disk || record.state[1] != Residency::resident || record.entry != kNoEntry || record.spilling) return;
    if (writes_again_at_ <= now_ && may_dirty(0)) queue_spill(page);
}

// Whether the page need not, or cannot, be written: the disk has a copy under its key.
bool Driver::on_disk(PageId page) {
    const PageRecord& record = ledger_.forest().at(page);
    const EntryId known = record.entry != kNoEntry ? record.entry : ledger_.find_entry(record.key);
    if (known == kNoEntry) return false;
    const Entry& entry = ledger_.index().at(known);
    if (entry.page == kNoPage && !entry.contested) ledger_.attach(page, known);  // written by an earlier run
    if (record.entry == known) {
        ledger_.used_again(known);
        note_use_of(known);
    } else {
        counters_.key_conflicts++;
    }
    return true;
}

// So that whoever opens the directory later knows what was used, though it may never have been read from there since it was written.
void Driver::note_use_of(EntryId id) {
    constexpr std::size_t kMost = 1 << 20;  // where nobody takes them
    Entry& entry = ledger_.entry(id);
    if (entry.foreign || entry.writing || now_ < entry.used + config_.note_uses_after || uses_.size() >= kMost) return;
    entry.used = static_cast<std::uint32_t>(now_);
    uses_.push_back({entry.slot, entry.used});
}

// The record remembers it too: most of the time no look at the entry is needed.
void Driver::note_use(PageId page) {
    const EntryId id = ledger_.forest().at(page).entry;
    note_use_of(id);
    const Entry& entry = ledger_.index().at(id);
    ledger_.set_noted(page, entry.foreign ? static_cast<std::uint32_t>(now_) : entry.used);
}

void Driver::queue_spill(PageId page) {
    if (!config_.disk || (on_disk(page) && guarded(Guard::written_once))) return;
    if (writes_again_at_ > now_) {
        counters_.spills_dropped++;
        return;
    }
    ledger_.hold(Tier::cpu, page);
    ledger_.set_spilling(page, true);
    dirty_++;
    spills_.push_back(waiting(page));
}

// --- pumps: start what can be started

void Driver::pump_loads() {
    no_row_to_load_ = false;
    while (!loads_.empty()) {
        const PageId page = loads_.front().page;
        const PageRecord& record = ledger_.forest().at(page);
        if (!valid(loads_.front()) || !record.load_queued) {
            loads_.pop_front();
            continue;
        }
        const bool wanted = waiters_.contains(page) || readers_.contains(page);
        if (!wanted || record.entry == kNoEntry || !ledger_.readable(record.entry)) {
            drop_load(page);
            continue;
        }
        if (record.state[1] == Residency::resident ||
            (own_mode() && record.state[1] == Residency::incoming)) {  // it came another way
            loads_.pop_front();
            ledger_.set_load_queued(page, false);
            want(page);
            continue;
        }
        if (reads_in_flight_ >= config_.reads_at_once) return;
        const Row row = ledger_.take_row(Tier::cpu);
        if (row == kNoRow) {  // until one is free; but what holds them all may do so for ever
            no_row_to_load_ = now_ < loads_.front().since + config_.read_deadline;
            if (no_row_to_load_) return;
            counters_.timeouts++;
            drop_load(page);
            continue;
        }
        loads_.pop_front();
        ledger_.set_load_queued(page, false);
        ledger_.expect(Tier::cpu, page, row);
        ledger_.hold_entry(record.entry);
        reads_in_flight_++;
        submit(
            {.kind = OpKind::read, .page = page, .entry = record.entry, .slot = ledger_.index().at(record.entry).slot, .row = row},
            config_.read_deadline);
    }
}

// The first load of the queue will not be tried.
void Driver::drop_load(PageId page) {
    loads_.pop_front();
    ledger_.set_load_queued(page, false);
    if (!own_mode()) ledger_.withdraw(Tier::cpu, page);
    fail_page(page);
}

void Driver::pump_ups() {
    while (!ups_.empty()) {
        CopyMove move{.pages = {}, .slab = {}, .device = {}};
        for (; !ups_.empty() && move.pages.size() < config_.copy_rows; ups_.pop_front()) {
            const PageRecord& record = ledger_.forest().at(ups_.front().page);
            move.pages.push_back(ups_.front().page);
            move.slab.push_back(record.row[1]);
            move.device.push_back(record.row[0]);
        }
        start_copy(std::move(move), released_);
    }
}

void Driver::pump_downs() {
    while (!downs_.empty() && saving_ < config_.saves_at_once) {
        CopyMove move{.up = false, .pages = {}, .slab = {}, .device = {}};
        Fence fence = 0;
        bool room = true;
        for (; !downs_.empty() && move.pages.size() < config_.copy_rows; downs_.pop_front()) {
            const Waiting& next = downs_.front();
            if (!valid(next)) {
                counters_.saves_dropped++;
                continue;
            }
            const PageRecord& record = ledger_.forest().at(next.page);
            if (record.state[1] != Residency::none) continue;
            if (record.state[0] != Residency::resident) {
                counters_.saves_dropped += record.entry == kNoEntry;
                continue;
            }
            if (!may_dirty(move.pages.size())) {
                room = false;
                break;
            }
            // Held before the row is taken: eviction in the slab must not retire the page's record, nor the device evict it.
            ledger_.hold(Tier::gpu, next.page);
            const Row row = ledger_.take_row(Tier::cpu);
            if (row == kNoRow) {
                ledger_.unhold(Tier::gpu, next.page);
                room = false;
                break;
            }
            ledger_.expect(Tier::cpu, next.page, row);
            move.pages.push_back(next.page);
            move.slab.push_back(row);
            move.device.push_back(ledger_.forest().at(next.page).row[0]);
            fence = std::max(fence, record.ready);  // it may have been published again since it was queued
        }
        if (!move.pages.empty()) start_copy(std::move(move), guarded(Guard::ready_fence) ? fence : 0);
        if (!room) return;
    }
}

void Driver::pump_spills() {
    while (!spills_.empty() && (writes_in_flight_ < config_.writes_at_once || writes_again_at_ > now_)) {
        const PageId page = spills_.front().page;
        SlotRef where;
        if (writes_again_at_ > now_) {
            counters_.spills_dropped++;
        } else if (!on_disk(page) || !guarded(Guard::written_once)) {
            if (growing_) return;
            if (!ledger_.has_free_slot() && grow_again_at_ <= now_) {
                growing_ = true;
                submit({.kind = OpKind::grow, .slot = {}}, config_.write_deadline);
                return;
            }
            if (ledger_.take_slot(where)) {
                spills_.pop_front();
                if (!guarded(Guard::reserve_before_write)) ledger_.add_slot(where);
                const EntryId entry = ledger_.add_entry(page, where);
                ledger_.hold_entry(entry);
                writes_in_flight_++;
                submit(
                    {.kind = OpKind::write, .page = page, .entry = entry, .slot = where, .row = ledger_.forest().at(page).row[1]},
                    config_.write_deadline);
                continue;
            }
            if (disk_moving()) return;  // a slot may become free
            counters_.spills_dropped++;
        }
        spills_.pop_front();
        dirty_--;
        ledger_.set_spilling(page, false);
        ledger_.unhold(Tier::cpu, page);
    }
}

bool Driver::disk_moving() const {
    return std::any_of(disk_moves_.begin(), disk_moves_.end(), [](const auto& item) { return !item.second.abandoned; });
}

// --- starting

std::uint64_t Driver::start_copy(CopyMove&& move, Fence fence) {
    const std::uint64_t ticket = next_id_++;
    move.deadline = now_ + (move.guest ? config_.engine_deadline : config_.copy_deadline);
    if (!move.up) saving_ += static_cast<std::uint32_t>(move.pages.size());
    out_.copies.push_back({.ticket = ticket, .up = move.up, .slab = move.slab, .device = move.device, .fence = fence});
    copies_.emplace(ticket, std::move(move));
    return ticket;
}

PageImage Driver::image(PageId page) const {
    const Forest& forest = ledger_.forest();
    const PageRecord& record = forest.at(page);
    return {.space = forest.space(page),
            .parent = forest.at(record.parent).key,
            .key = record.key,
            .content = forest.content(page),
            .uses = 0,
            .last_use = static_cast<std::uint32_t>(now_)};
}

void Driver::submit(DiskMove&& move, double deadline) {
    Op op{.id = next_id_++, .kind = move.kind, .slot = move.slot, .row = move.row, .page = {}};
    if (move.page != kNoPage) op.page = image(move.page);
    move.deadline = now_ + deadline;
    disk_moves_.emplace(op.id, move);
    out_.ops.push_back(op);
}

// --- proofs

bool Driver::check_integrity(std::string& fault) const {
    if (!ledger_.check_integrity(fault)) return false;
    std::size_t rows[2] = {ledger_.free_rows(Tier::gpu), ledger_.free_rows(Tier::cpu)};
    const Forest& forest = ledger_.forest();
    std::vector<std::uint32_t> pins(forest.id_bound(), 0);
    for (PageId page = 0; page < forest.id_bound(); ++page)
        for (std::size_t tier = 0; tier < 2; ++tier)
            rows[tier] +=
                forest.at(page).alive && forest.at(page).state[tier] != Residency::none && forest.at(page).row[tier] != kNoRow;
    for (const auto& [id, lease] : leases_) {
        rows[0] += static_cast<std::size_t>(std::count(lease.own.begin(), lease.own.end(), std::uint8_t{1}));
        pins[lease.pinned]++;
        for (std::size_t i = 0; i < lease.path.size(); ++i) {
            if (!forest.at(lease.path[i]).alive) return fault = "a lease's page has no record", false;
            if (!lease.own.empty() && !lease.own[i] && forest.at(lease.path[i]).row[0] != lease.rows[i])
                return fault = "a lease and its page disagree about the row", false;
        }
    }
    for (PageId page = 0; page < forest.id_bound(); ++page)
        if (forest.at(page).alive && forest.at(page).pins != pins[page]) return fault = "pins do not match the leases", false;
    std::unordered_map<PageId, std::uint32_t> readers;
    for (const auto& [id, pages] : fetches_)
        for (PageId page : pages) readers[page]++;
    if (readers != readers_) return fault = "readers do not match the fetches", false;
    for (const auto& [page, count] : readers_)
        if (!forest.at(page).alive || forest.at(page).busy[1] < count) return fault = "a page that is fetched is not held", false;
    for (const auto& [id, move] : disk_moves_) rows[1] += move.abandoned && move.kind == OpKind::read;
    for (const auto& [ticket, move] : copies_)
        if (move.abandoned && !(move.up && move.guest)) rows[move.up ? 0 : 1] += move.pages.size();
    if (rows[0] != ledger_.capacity(Tier::gpu) || rows[1] != ledger_.capacity(Tier::cpu))
        return fault = "rows are lost or doubled: gpu " + std::to_string(rows[0]) + " of " +
                       std::to_string(ledger_.capacity(Tier::gpu)) + ", cpu " + std::to_string(rows[1]) + " of " +
                       std::to_string(ledger_.capacity(Tier::cpu)),
               false;
    return true;
}

}  // namespace kvstrata
