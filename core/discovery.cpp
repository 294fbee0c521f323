// What the driver learns of the disk besides the ends of its own operations: pages that are found there, and those of other processes.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "driver.hpp"

namespace kvstrata {

bool Driver::add_found(const Key& key, const Key& parent, SlotRef slot) {
    const EntryId known = ledger_.find_entry(key);
    if (known != kNoEntry && ledger_.index().at(known).slot == slot) return true;  // it was another process's until now
    const EntryId entry = ledger_.add_found(key, parent, slot);
    if (entry == kNoEntry) ledger_.add_slot(slot);  // a second copy: its slot is free
    return entry == kNoEntry || ledger_.index().at(entry).parent != kNoEntry;
}

bool Driver::add_shared(const Key& key, const Key& parent, SlotRef slot, bool first) {
    if (ledger_.retired(slot.segment)) return true;
    EntryId known = ledger_.find_entry(key);
    if (known == kNoEntry) {
        known = ledger_.add_shared(key, parent, slot);
    } else if (const Entry& entry = ledger_.index().at(known); first || ledger_.lost(entry)) {
        const bool clear_it = !entry.foreign && entry.busy == 0;
        const SlotRef before = ledger_.move_entry(known, slot);
        if (clear_it) clear(before);
    }
    return ledger_.index().at(known).parent != kNoEntry;
}

void Driver::try_again() {
    constexpr double kNever = std::numeric_limits<double>::infinity();
    if (grow_again_at_ != kNever) grow_again_at_ = now_;
    if (writes_again_at_ != kNever) writes_again_at_ = now_;
}

void Driver::link_found(const Key& key, const Key& parent) {
    const EntryId entry = ledger_.find_entry(key);
    if (entry != kNoEntry) ledger_.link_found(entry, parent);
}

}  // namespace kvstrata
