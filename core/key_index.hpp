// The key index: every page on disk by its key, also those of earlier runs whose tokens this process never saw.
//
// A key is a name, never a proof: contents are compared when the slot is read. The ledger is the only writer.
#pragma once

#include <string>
#include <vector>

#include "types.hpp"

namespace kvstrata {

struct Entry {
    Key key;
    SlotRef slot;
    EntryId parent = kNoEntry;                     // entry of the parent page, where it is on disk too
    EntryId first_child = kNoEntry;                // of a list in no order
    EntryId next = kNoEntry, previous = kNoEntry;  // in the parent's list
    std::uint32_t children = 0;                    // entries right below this one that are ours, or have some of ours below them
    PageId page = kNoPage;                         // the forest record that claims this copy
    std::uint32_t busy = 0;                        // reads in flight
    std::uint32_t used = 0;                        // when its use was noted last, in seconds; 0: not by us
    bool alive = false;
    bool gone = false;       // its slot holds something else by now: not findable, forgotten when nothing uses it
    bool foreign = false;    // another process's copy: read, never written, never a victim
    bool candidate = false;  // the policy may name it a victim
    bool writing = false;    // its bytes are not there yet: not findable
    bool contested = false;  // a page of another content was found to have this key too
    double retry_at = 0;     // unreadable: skipped until then
};

class KeyIndex {
   public:
    KeyIndex();

    EntryId find(const Key& key) const;
    void prefetch(const Key& key) const {
        __builtin_prefetch(&table_[key.prefix() & (table_.size() - 1)]);
    }  // it is looked for soon
    // `key` must not be in the index. Finds its parent by key; children that are there already keep no link.
    EntryId insert(const Key& key, const Key& parent, SlotRef slot, bool foreign = false);
    void erase(EntryId entry);  // what is below it goes on below its parent
    void set_foreign(EntryId entry, bool foreign);
    void reserve(std::size_t more);  // before a bulk load of so many
    // After a bulk load: links every entry to its parent, whatever the order of insertion was.
    void link(EntryId entry, const Key& parent);

    Entry& at(EntryId entry) { return entries_[entry]; }
    const Entry& at(EntryId entry) const { return entries_[entry]; }
    std::size_t size() const { return live_; }
    EntryId id_bound() const { return static_cast<EntryId>(entries_.size()); }
    bool check_integrity(std::string& fault) const;

   private:
    bool counts(const Entry& entry) const { return !entry.foreign || entry.children > 0; }
    void count(EntryId above, bool more);  // one child of `above` counts from now on, or no longer
    void hang(EntryId entry, EntryId above);
    void unhang(EntryId entry);
    void table_insert(EntryId entry);
    void rebuild(std::size_t size);

    std::vector<Entry> entries_;
    std::vector<EntryId> free_;
    // As in the forest: linear probing, no tombstones, at most half full. A part of the key spares looking at entries of other keys.
    struct Place {
        EntryId entry = kNoEntry;
        std::uint32_t tag = 0;
    };
    static std::uint32_t tag(const Key& key) { return std::uint32_t(key.prefix() >> 32); }
    std::vector<Place> table_;
    std::size_t live_ = 0;
};

}  // namespace kvstrata
