// The driver's half that hears how moves ended: reads, writes, new segments, device copies. See driver.hpp and moves.cpp.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "driver.hpp"
#include "guard.hpp"

namespace kvstrata {

Submissions Driver::step(double now, std::span<Completion> done) {
    ledger_.set_time(now_ = now);
    for (Completion& completion : done) finish(completion);
    expire();
    pump_loads();
    pump_ups();
    pump_spills();
    pump_downs();
    return std::exchange(out_, {});
}

void Driver::finish(Completion& done) {
    const auto found = disk_moves_.find(done.id);
    if (found == disk_moves_.end()) {
        counters_.late_completions++;
        return;
    }
    const DiskMove move = found->second;
    disk_moves_.erase(found);
    if (done.status == OpStatus::ok) timeouts_in_a_row_ = 0;
    if (move.abandoned && guarded(Guard::completion_generation)) return finish_late(move, done);
    switch (move.kind) {
        case OpKind::read:
            return finish_read(move, done);
        case OpKind::write:
            return finish_write(move, done);
        case OpKind::clear:
            return ledger_.add_slot(move.slot);
        case OpKind::grow:
            return finish_grow(done);
    }
}

// What was abandoned has come back after all: the quarantine ends, and with it the reason to leave the disk alone.
void Driver::finish_late(const DiskMove& move, const Completion& done) {
    counters_.late_completions++;
    switch (move.kind) {
        case OpKind::read:
            reads_in_flight_--;
            if (stuck_reads_-- == config_.reads_at_once) ledger_.pause_disk_reads(now_);
            if (done.status == OpStatus::ok) health_.well(DiskHealth::Side::reads);
            end_use(move);
            ledger_.back_off(move.entry, done.status == OpStatus::unreadable ? now_ + config_.retry_after : now_);
            ledger_.forget_lost(move.entry);
            ledger_.give_row(Tier::cpu, move.row);
            return ledger_.unhold(Tier::cpu, move.page);
        case OpKind::write:
            if (stuck_writes_-- == config_.writes_at_once) pause_writes(DiskHealth::Trouble::stalled, 0);
            dirty_++;  // as finish_write expects it
            return finish_write(move, done);
        case OpKind::clear:
            return ledger_.add_slot(move.slot);
        case OpKind::grow:
            return finish_grow(done);
    }
}

// The move does not use the entry any more. One that went over to another process's copy meanwhile leaves a slot that is free now.
void Driver::end_use(const DiskMove& move) {
    ledger_.unhold_entry(move.entry);
    if (moved_away(move) && !ledger_.foreign(move.slot.segment)) clear(move.slot);
}

bool Driver::moved_away(const DiskMove& move) const { return ledger_.index().at(move.entry).slot != move.slot; }

void Driver::finish_read(const DiskMove& move, const Completion& done) {
    end_use(move);
    reads_in_flight_--;
    if (done.status != OpStatus::ok) {
        ledger_.give_row(Tier::cpu, ledger_.withdraw(Tier::cpu, move.page));
        return give_up_load(move, done);
    }
    counters_.reads++;
    health_.well(DiskHealth::Side::reads);
    ledger_.arrive(Tier::cpu, move.page, Tier::disk);
    ledger_.forget_lost(move.entry);
    if (own_mode())
        want(move.page);
    else
        arrived_home(move.page);
}

void Driver::give_up_load(const DiskMove& move, const Completion& done) {
    ledger_.count_failure(Tier::cpu);
    save_instead(move.page);
    ledger_.hold(Tier::cpu, move.page);
    const Entry& entry = ledger_.index().at(move.entry);
    const bool theirs = entry.foreign;
    const bool no_file = done.error == ENOENT || done.error == EBADF || done.error == ESTALE;
    if (done.status == OpStatus::conflict) {
        counters_.key_conflicts++;
    } else if (done.status == OpStatus::stale ||
               (theirs && (done.status == OpStatus::corrupt || no_file))) {  // its owner writes, and removes, as it likes
        counters_.stale++;
    } else if (done.status == OpStatus::corrupt) {
        counters_.corrupt++;
    } else {
        counters_.unreadable++;
        if (!no_file && !ledger_.lost(entry)) health_.ill(DiskHealth::Side::reads, DiskHealth::Trouble::failing, done.error, now_);
    }
    if (moved_away(move)) {
        ledger_.forget_lost(move.entry);  // nothing was learnt of the copy it is now
    } else if (theirs) {
        ledger_.forget(move.entry, EventKind::removed);  // its owner sees to it
    } else if (done.status == OpStatus::conflict) {      // sound, but another page's: it stays where it is
        ledger_.detach(move.page);
        ledger_.forget_lost(move.entry);
    } else if (done.status == OpStatus::corrupt || done.status == OpStatus::stale) {
        clear(ledger_.forget(move.entry, EventKind::damaged));
    } else {  // unreadable: kept, and asked again later
        ledger_.back_off(move.entry, now_ + config_.retry_after);
        ledger_.forget_lost(move.entry);
    }
    fail_page(move.page);
    ledger_.unhold(Tier::cpu, move.page);
}

// What the slot holds is nobody's page any more: its record says so before the slot is used again.
void Driver::clear(SlotRef slot) {
    if (!ledger_.retired(slot.segment)) submit({.kind = OpKind::clear, .slot = slot}, config_.write_deadline);
}

void Driver::finish_write(const DiskMove& move, const Completion& done) {
    writes_in_flight_--;
    dirty_--;
    const bool ok = done.status == OpStatus::ok || !guarded(Guard::failed_write);
    if (ok) health_.well(DiskHealth::Side::writes);
    end_use(move);
    if (moved_away(move)) {
        ledger_.forget_lost(move.entry);
    } else if (ok) {
        counters_.writes++;
        ledger_.stored(move.entry);
        ledger_.forget_lost(move.entry);
    } else {
        counters_.spills_dropped++;
        ledger_.count_failure(Tier::disk);
        ledger_.add_slot(ledger_.forget(move.entry, EventKind::removed));
    }
    // A file that is gone says nothing about the disk.
    if (!ok && !ledger_.retired(move.slot.segment) && done.error != ENOENT && done.error != EBADF)
        pause_writes(done.status == OpStatus::full ? DiskHealth::Trouble::full : DiskHealth::Trouble::failing, done.error);
    ledger_.set_spilling(move.page, false);
    ledger_.unhold(Tier::cpu, move.page);
}

void Driver::finish_grow(const Completion& done) {
    growing_ = false;
    for (SlotRef slot : done.slots) ledger_.add_slot(slot);
    grow_again_at_ = done.status == OpStatus::ok && !done.slots.empty() ? now_ : now_ + config_.retry_after;
    // With nothing to overwrite either, writing waits until there may be room again.
    if (done.slots.empty() && ledger_.candidates(Tier::disk) == 0 && !disk_moving())
        pause_writes(done.status == OpStatus::failed ? DiskHealth::Trouble::failing : DiskHealth::Trouble::full, done.error);
}

// For a while; until one comes back where all the writes there may be at once hang.
void Driver::pause_writes(DiskHealth::Trouble trouble, int error) {
    const bool all_stuck = stuck_writes_ >= config_.writes_at_once;
    writes_again_at_ = all_stuck ? std::numeric_limits<double>::infinity() : now_ + config_.retry_after;
    health_.ill(DiskHealth::Side::writes, trouble, error, now_);
}

void Driver::copied(double now, std::uint64_t ticket, bool ok) {
    ledger_.set_time(now_ = now);
    const auto found = copies_.find(ticket);
    if (found == copies_.end()) {
        counters_.late_completions++;
        return;
    }
    CopyMove move = std::move(found->second);
    copies_.erase(found);
    if (!ok) counters_.copy_failures++;
    finish_copy(move, ok && !move.abandoned);
}

bool Driver::copies_of(LeaseId id, std::vector<std::uint64_t>& tickets) const {
    const Lease* lease = find(id);
    if (!lease || lease->settled) return true;
    std::uint32_t found = 0;
    for (const auto& [ticket, copy] : copies_) {
        if (!copy.up || copy.guest || copy.abandoned) continue;
        std::uint32_t mine = 0;
        for (PageId page : copy.pages) {
            const std::uint32_t index = ledger_.forest().at(page).depth - 1;
            mine += index < lease->path.size() && lease->path[index] == page;
        }
        if (mine > 0) tickets.push_back(ticket);
        found += mine;
    }
    return found == lease->missing;
}

void Driver::finish_copy(CopyMove& move, bool ok) {
    (move.up ? counters_.ups : counters_.downs) += ok ? move.pages.size() : 0;
    const Tier target = move.up ? Tier::gpu : Tier::cpu;
    const Tier source = move.up ? Tier::cpu : Tier::gpu;
    const bool source_held = move.up || !move.guest;
    const bool target_ours = !move.up || !move.guest;
    if (!move.up && !move.abandoned) saving_ -= static_cast<std::uint32_t>(move.pages.size());
    if (move.up && target_ours && !ok && !move.abandoned)  // all before the first fails: whoever is shortened keeps their rows
        for (PageId page : move.pages) uploading_.erase(page);
    for (std::size_t i = 0; i < move.pages.size(); ++i) {
        const PageId page = move.pages[i];
        if (move.abandoned) {
            if (target_ours) ledger_.give_row(target, move.up ? move.device[i] : move.slab[i]);
        } else if (target_ours) {
            if (move.up) uploading_.erase(page);
            if (ok) {
                ledger_.arrive(target, page, source);
                if (target == ledger_.home()) arrived_home(page);
                if (!move.up) queue_spill(page);
                if (!move.up && own_mode()) want(page);
            } else {
                ledger_.count_failure(target);
                if (move.up) {
                    fail_page(page);  // its row goes to a lease that computes the page now, or is free
                } else {
                    ledger_.give_row(target, ledger_.withdraw(target, page));
                    want(page);  // whoever joined this copy takes the page from the disk
                    if (!source_held) ledger_.retire(page);
                }
            }
        }
        if (source_held) ledger_.unhold(source, page);
    }
}

}  // namespace kvstrata
