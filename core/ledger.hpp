// The ledger: the one place that knows which page is where, who uses it and what to drop. Pure decisions: no I/O, no clock, no thread.
//
// Life of a copy in a memory tier: take_row -> expect (incoming) -> arrive (resident: findable) -> drop. A copy on disk is an entry of
// the key index: add_entry (writing) -> stored (findable) -> forget. A copy may be evicted when nothing in its tier lies below it, no
// move reads it (hold) and, in the serving tier, no lease is pinned to it: so one pin on the deepest page of a lease protects all.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "event.hpp"
#include "forest.hpp"
#include "key_index.hpp"
#include "policy.hpp"

namespace kvstrata {

struct LedgerConfig {
    std::uint32_t page_size = 256;
    std::uint32_t gpu_rows = 0;  // of the device pool, the scratch row not counted; 0: the engine owns the device (guest mode)
    Row first_gpu_row = 1;       // rows below it (the scratch row) are never given out
    std::uint32_t cpu_rows = 0;
    std::size_t event_capacity = 0;  // 0: events are off
    bool log_freed = false;          // tests: remember freed slab rows, to be poisoned
};

struct TierCounters {
    std::uint64_t stored = 0;    // copies that became findable
    std::uint64_t evicted = 0;   // copies dropped to make room
    std::uint64_t dropped = 0;   // copies dropped for another reason (purge, damage)
    std::uint64_t failures = 0;  // moves into the tier that failed
};

class Ledger {
   public:
    Ledger(const LedgerConfig& config, std::unique_ptr<Policy> policy);

    const Forest& forest() const { return forest_; }
    const KeyIndex& index() const { return index_; }
    Tier home() const { return home_; }  // the tier that leases are served from
    void set_time(double now) { now_ = now; }

    // --- finding
    PageId root(const Key& space) { return forest_.root(space); }
    PageId child(PageId parent, const Content& content) const { return forest_.child(parent, content); }
    // Whether a lease may count on the page: resident somewhere, or on its way to the home tier from a copy that is.
    bool findable(PageId page) const;
    bool readable(EntryId entry) const {
        const Entry& one = index_.at(entry);
        return !one.writing && one.retry_at <= now_ && disk_back_at_ <= now_ && !lost(one);
    }
    void pause_disk_reads(double until) { disk_back_at_ = until; }  // the tier is ill: its pages are not promised to anybody
    // A new record without any copy. Retired by itself as soon as it is left with no copy, child, pin or move.
    PageId add_page(PageId parent, const Content& content, const Key& key) { return forest_.insert(parent, content, key); }
    void retire(PageId page);
    bool has_copy(Tier tier, PageId page) const {
        const PageRecord& record = forest_.at(page);
        return tier == Tier::disk ? record.entry != kNoEntry : record.state[slot(tier)] == Residency::resident;
    }
    void used(Tier tier, PageId deepest);  // somebody used the chain whose last copy in the tier is this one's
    void used(PageId deepest);             // the chain that ends here, in every tier; costs a look at what has no copy there
    void used_again(EntryId entry);        // its page was computed anew
    void set_noted(PageId page, std::uint32_t seconds) { forest_.at(page).noted = seconds; }
    Entry& entry(EntryId id) { return index_.at(id); }

    // --- rows of a memory tier
    Row take_row(Tier tier);  // free, or freed by evicting; kNoRow when nothing may go
    void give_row(Tier tier, Row row);
    std::vector<Row> take_freed() { return std::exchange(freed_, {}); }  // slab rows freed since the last call
    std::uint32_t free_rows(Tier tier) const { return static_cast<std::uint32_t>(rows_[slot(tier)].free.size()); }
    std::uint32_t capacity(Tier tier) const { return rows_[slot(tier)].total; }
    std::uint32_t resident(Tier tier) const { return tier == Tier::disk ? stored_entries_ : rows_[slot(tier)].resident; }

    // --- copies in a memory tier
    void expect(Tier tier, PageId page, Row row);
    void arrive(Tier tier, PageId page, Tier source);
    Row withdraw(Tier tier, PageId page);  // an incoming copy that will not come; the row is the caller's again
    void drop(Tier tier, PageId page);     // a resident copy; its row is free
    void hold(Tier tier, PageId page);     // a move reads the copy
    void unhold(Tier tier, PageId page);
    void pin(PageId page);
    void unpin(PageId page);
    void set_ready(PageId page, std::uint64_t batch) { forest_.at(page).ready = batch; }
    void set_load_queued(PageId page, bool queued) { forest_.at(page).load_queued = queued; }
    void set_spilling(PageId page, bool spilling) { forest_.at(page).spilling = spilling; }

    // --- copies on disk
    void add_slot(SlotRef slot) {
        if (!retired(slot.segment)) free_slots_.push_back(slot);
    }
    bool take_slot(SlotRef& slot);      // free, or freed by evicting
    bool take_this_slot(SlotRef slot);  // where it is free
    bool has_free_slot() const { return !free_slots_.empty(); }
    std::size_t free_slots() const { return free_slots_.size(); }
    std::size_t candidates(Tier tier) const { return policy_->candidates(tier); }
    EntryId find_entry(const Key& key) const { return index_.find(key); }
    EntryId add_entry(PageId page, SlotRef slot);                        // being written
    EntryId add_found(const Key& key, const Key& parent, SlotRef slot);  // of an earlier run; kNoEntry if the key is known already
    void link_found(EntryId entry, const Key& parent);
    void expect_found(std::size_t pages) { index_.reserve(pages); }
    void attach(PageId page, EntryId entry);  // the page claims this copy (unproven until read)
    void detach(PageId page);                 // it was another page's
    void stored(EntryId entry);
    SlotRef forget(EntryId entry, EventKind why);  // the copy is gone; the slot is the caller's
    void hold_entry(EntryId entry);
    void unhold_entry(EntryId entry);
    // The segment is gone, or about to be: no slot of it is used any more. Its entries go at once; those that a move still uses are not
    // findable any more, and go by forget_lost() when the move ends.
    void retire_segment(std::uint32_t segment);
    bool retired(std::uint32_t segment) const { return segment < segments_.size() && segments_[segment].retired; }
    bool lost(const Entry& entry) const { return entry.gone || retired(entry.slot.segment); }
    void forget_lost(EntryId entry);
    EntryId entry_at(SlotRef slot) const;

    // --- copies of other processes: found and read as our own, but never written, cleared, or named as victims
    EntryId add_shared(const Key& key, const Key& parent, SlotRef slot);  // of a key that is not in the index
    SlotRef move_entry(EntryId entry, SlotRef slot);                      // from now on the entry is this copy; where it was before
    void slot_gone(SlotRef slot);                                         // it holds something else by now, or nothing
    void adopt_segment(std::uint32_t segment);                            // it is ours from now on
    bool foreign(std::uint32_t segment) const { return segment < segments_.size() && segments_[segment].foreign; }
    std::uint32_t shared() const { return shared_entries_; }
    void back_off(EntryId entry, double until) { index_.at(entry).retry_at = until; }

    // Pages that could leave the home tier if everything not pinned, held or incoming left it; `enough`, or more, where there are at
    // least so many. Costs the length of what is in use, but for that case.
    std::uint32_t evictable(const std::vector<PageId>& in_use, std::uint32_t enough);

    const TierCounters& counters(Tier tier) const { return counters_[static_cast<std::size_t>(tier)]; }
    void count_failure(Tier tier) { counters_[static_cast<std::size_t>(tier)].failures++; }
    std::vector<Event> drain_events() { return events_.drain(events_lost_); }
    std::uint64_t events_lost() const { return events_lost_; }
    bool check_integrity(std::string& fault) const;

   private:
    struct Rows {
        std::vector<Row> free;
        std::uint32_t total = 0;
        std::uint32_t resident = 0;
        Row first = 0;
    };

    struct SegmentSlots {
        std::vector<EntryId> entries;  // by slot, as far as any was used
        bool retired = false;
        bool foreign = false;
    };

    static std::size_t slot(Tier tier) { return static_cast<std::size_t>(tier); }
    SegmentSlots& segment(std::uint32_t number);
    void place(SlotRef slot, EntryId entry);
    EntryId own_from(EntryId entry) const;  // the entry or the next above it that is ours
    std::uint32_t own_above(EntryId entry) const;
    void refresh_from(EntryId entry);
    void set_state(Tier tier, PageId page, Residency state);
    void refresh(Tier tier, PageId page);  // tells the policy when a copy becomes or ceases to be a candidate
    void refresh_entry(EntryId entry);
    std::uint32_t parent_in(Tier tier, PageId page) const;
    void leave_tier(Tier tier, PageId page);
    void note(EventKind kind, Tier tier, Tier source, const Key& key, std::uint32_t depth);

    Forest forest_;
    KeyIndex index_;
    std::unique_ptr<Policy> policy_;
    Tier home_;
    double now_ = 0;
    double disk_back_at_ = 0;
    std::array<Rows, 2> rows_;
    bool log_freed_;
    std::vector<Row> freed_;
    std::vector<SlotRef> free_slots_;
    std::vector<SegmentSlots> segments_;
    std::uint32_t stored_entries_ = 0;  // of ours
    std::uint32_t shared_entries_ = 0;
    std::array<TierCounters, kTiers> counters_;
    EventRing events_;
    std::uint64_t events_lost_ = 0;
    std::vector<std::uint32_t> visited_;  // marks of evictable()
    std::uint32_t visit_ = 0;
};

}  // namespace kvstrata
