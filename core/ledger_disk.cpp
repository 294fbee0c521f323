// The ledger's copies on disk: entries of the key index, the slots they lie in, and those of other processes.
#include <algorithm>
#include <utility>

#include "ledger.hpp"

namespace kvstrata {

EntryId Ledger::own_from(EntryId id) const {
    while (id != kNoEntry && index_.at(id).foreign) id = index_.at(id).parent;
    return id;
}

std::uint32_t Ledger::own_above(EntryId id) const {
    const EntryId above = own_from(index_.at(id).parent);
    return above == kNoEntry ? kNobody : above;
}

void Ledger::refresh_entry(EntryId id) {
    Entry& entry = index_.at(id);
    const bool may_go = !entry.foreign && !entry.writing && entry.busy == 0 && entry.children == 0;
    if (may_go == entry.candidate) return;
    entry.candidate = may_go;
    if (may_go)
        policy_->enter(Tier::disk, id);
    else
        policy_->leave(Tier::disk, id);
}

// What counts below an entry of another process counts for ours above it.
void Ledger::refresh_from(EntryId id) {
    const EntryId ours = own_from(id);
    if (ours != kNoEntry) refresh_entry(ours);
}

bool Ledger::take_slot(SlotRef& into) {
    if (!free_slots_.empty()) {
        into = free_slots_.back();
        free_slots_.pop_back();
        return true;
    }
    const std::uint32_t victim = policy_->victim(Tier::disk, now_);
    if (victim == kNobody) return false;
    counters_[slot(Tier::disk)].evicted++;
    into = forget(victim, EventKind::removed);
    return true;
}

bool Ledger::take_this_slot(SlotRef wanted) {
    const auto found = std::ranges::find(free_slots_, wanted);
    if (found == free_slots_.end()) return false;
    *found = free_slots_.back();
    free_slots_.pop_back();
    return true;
}

EntryId Ledger::add_entry(PageId page, SlotRef where) {
    PageRecord& record = forest_.at(page);
    const EntryId id = index_.insert(record.key, forest_.at(record.parent).key, where);
    place(where, id);
    index_.at(id).writing = true;
    index_.at(id).used = static_cast<std::uint32_t>(now_);
    index_.at(id).page = page;
    record.entry = id;
    policy_->inserted(Tier::disk, id, own_above(id), now_);
    refresh_from(index_.at(id).parent);
    return id;
}

EntryId Ledger::add_found(const Key& key, const Key& parent, SlotRef where) {
    if (index_.find(key) != kNoEntry || retired(where.segment)) return kNoEntry;
    const EntryId id = index_.insert(key, parent, where);
    place(where, id);
    stored_entries_++;
    policy_->inserted(Tier::disk, id, own_above(id), now_);
    refresh_from(index_.at(id).parent);
    refresh_entry(id);
    return id;
}

void Ledger::link_found(EntryId id, const Key& parent) {
    index_.link(id, parent);
    refresh_from(index_.at(id).parent);  // it is no leaf any more
}

void Ledger::attach(PageId page, EntryId id) {
    forest_.at(page).entry = id;
    forest_.at(page).noted = 0;
    index_.at(id).page = page;
    const EntryId above = forest_.at(forest_.at(page).parent).entry;
    if (above != kNoEntry && index_.at(id).parent == kNoEntry) link_found(id, index_.at(above).key);  // that one was found later
}

void Ledger::detach(PageId page) {
    const EntryId id = std::exchange(forest_.at(page).entry, kNoEntry);
    index_.at(id).page = kNoPage;
    index_.at(id).contested = true;
    retire(page);
}

void Ledger::stored(EntryId id) {
    index_.at(id).writing = false;
    stored_entries_++;
    counters_[slot(Tier::disk)].stored++;
    const PageId page = index_.at(id).page;
    note(EventKind::stored, Tier::disk, Tier::cpu, index_.at(id).key, page == kNoPage ? 0 : forest_.at(page).depth);
    refresh_entry(id);
}

SlotRef Ledger::forget(EntryId id, EventKind why) {
    Entry& entry = index_.at(id);
    if (entry.candidate) {
        entry.candidate = false;
        policy_->leave(Tier::disk, id);
    }
    const EntryId above = entry.parent;
    if (!entry.foreign) policy_->removed(Tier::disk, id, own_above(id));
    const PageId page = entry.page;
    if (!entry.writing) {
        (entry.foreign ? shared_entries_ : stored_entries_)--;
        note(why, Tier::disk, Tier::disk, entry.key, page == kNoPage ? 0 : forest_.at(page).depth);
    }
    const SlotRef where = entry.slot;
    if (!entry.gone) place(where, kNoEntry);
    index_.erase(id);
    refresh_from(above);
    if (page != kNoPage) {
        forest_.at(page).entry = kNoEntry;
        retire(page);
    }
    return where;
}

void Ledger::hold_entry(EntryId id) {
    index_.at(id).busy++;
    refresh_entry(id);
}

void Ledger::unhold_entry(EntryId id) {
    index_.at(id).busy--;
    refresh_entry(id);
}

Ledger::SegmentSlots& Ledger::segment(std::uint32_t number) {
    if (number >= segments_.size()) segments_.resize(number + 1);
    return segments_[number];
}

void Ledger::place(SlotRef where, EntryId id) {
    std::vector<EntryId>& entries = segment(where.segment).entries;
    if (where.slot >= entries.size()) entries.resize(where.slot + 1, kNoEntry);
    entries[where.slot] = id;
}

EntryId Ledger::entry_at(SlotRef where) const {
    if (where.segment >= segments_.size() || where.slot >= segments_[where.segment].entries.size()) return kNoEntry;
    return segments_[where.segment].entries[where.slot];
}

void Ledger::retire_segment(std::uint32_t number) {
    segment(number).retired = true;
    std::erase_if(free_slots_, [number](const SlotRef& free) { return free.segment == number; });
    const std::vector<EntryId> entries = segments_[number].entries;
    for (EntryId id : entries) {
        if (id != kNoEntry) forget_lost(id);
    }
}

void Ledger::forget_lost(EntryId id) {
    const Entry& entry = index_.at(id);
    if (!lost(entry) || entry.writing || entry.busy > 0) return;
    counters_[slot(Tier::disk)].dropped += !entry.foreign;
    forget(id, EventKind::removed);
}

// --- copies of other processes

EntryId Ledger::add_shared(const Key& key, const Key& parent, SlotRef where) {
    segment(where.segment).foreign = true;
    const EntryId id = index_.insert(key, parent, where, true);
    place(where, id);
    shared_entries_++;
    note(EventKind::stored, Tier::disk, Tier::disk, key, 0);
    return id;
}

SlotRef Ledger::move_entry(EntryId id, SlotRef to) {
    segment(to.segment).foreign = true;
    Entry& entry = index_.at(id);
    const SlotRef from = entry.slot;
    if (!entry.gone) place(from, kNoEntry);
    entry.gone = false;
    entry.slot = to;
    place(to, id);
    if (entry.foreign) return from;
    index_.set_foreign(id, true);
    refresh_entry(id);
    policy_->removed(Tier::disk, id, own_above(id));
    refresh_from(entry.parent);
    shared_entries_++;
    if (!std::exchange(entry.writing, false))
        stored_entries_--;
    else
        note(EventKind::stored, Tier::disk, Tier::disk, entry.key, entry.page == kNoPage ? 0 : forest_.at(entry.page).depth);
    return from;
}

void Ledger::slot_gone(SlotRef where) {
    const EntryId id = entry_at(where);
    if (id == kNoEntry || !index_.at(id).foreign) return;
    index_.at(id).gone = true;
    place(where, kNoEntry);
    forget_lost(id);
}

void Ledger::adopt_segment(std::uint32_t number) {
    segment(number).foreign = false;
    for (EntryId id : segments_[number].entries) {
        if (id == kNoEntry) continue;
        index_.set_foreign(id, false);
        shared_entries_--;
        stored_entries_++;
        policy_->inserted(Tier::disk, id, own_above(id), now_);
        refresh_from(index_.at(id).parent);
        refresh_entry(id);
    }
}

}  // namespace kvstrata
