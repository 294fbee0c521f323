#include "key_index.hpp"

#include <bit>

namespace kvstrata {

KeyIndex::KeyIndex() : table_(64) {}

EntryId KeyIndex::find(const Key& key) const {
    const std::size_t mask = table_.size() - 1;
    for (std::size_t i = key.prefix() & mask; table_[i].entry != kNoEntry; i = (i + 1) & mask)
        if (table_[i].tag == tag(key) && entries_[table_[i].entry].key == key) return table_[i].entry;
    return kNoEntry;
}

void KeyIndex::table_insert(EntryId entry) {
    const std::size_t mask = table_.size() - 1;
    const Key& key = entries_[entry].key;
    std::size_t i = key.prefix() & mask;
    while (table_[i].entry != kNoEntry) i = (i + 1) & mask;
    table_[i] = {entry, tag(key)};
}

void KeyIndex::rebuild(std::size_t size) {
    table_.assign(size, {});
    for (EntryId entry = 0; entry < entries_.size(); ++entry)
        if (entries_[entry].alive) table_insert(entry);
}

void KeyIndex::reserve(std::size_t more) {
    entries_.reserve(entries_.size() + more);
    const std::size_t size = std::bit_ceil(2 * (live_ + more));
    if (size > table_.size()) rebuild(size);
}

EntryId KeyIndex::insert(const Key& key, const Key& parent, SlotRef slot, bool foreign) {
    EntryId entry;
    if (!free_.empty()) {
        entry = free_.back();
        free_.pop_back();
    } else {
        entry = static_cast<EntryId>(entries_.size());
        entries_.emplace_back();
    }
    Entry& made = entries_[entry];
    made = Entry{};
    made.key = key;
    made.slot = slot;
    made.alive = true;
    made.foreign = foreign;
    ++live_;
    if (live_ * 2 > table_.size())
        rebuild(table_.size() * 2);
    else
        table_insert(entry);
    link(entry, parent);
    return entry;
}

void KeyIndex::link(EntryId entry, const Key& parent) {
    if (entries_[entry].parent != kNoEntry) return;
    const EntryId above = find(parent);
    if (above == kNoEntry || above == entry) return;
    hang(entry, above);
}

void KeyIndex::count(EntryId above, bool more) {
    while (above != kNoEntry) {
        Entry& one = entries_[above];
        const bool counted = counts(one);
        one.children += more ? 1 : ~std::uint32_t{0};
        if (counts(one) == counted) return;
        above = one.parent;
    }
}

void KeyIndex::hang(EntryId entry, EntryId above) {
    Entry& made = entries_[entry];
    made.parent = above;
    made.previous = kNoEntry;
    made.next = entries_[above].first_child;
    if (made.next != kNoEntry) entries_[made.next].previous = entry;
    entries_[above].first_child = entry;
    if (counts(made)) count(above, true);
}

void KeyIndex::unhang(EntryId entry) {
    Entry& gone = entries_[entry];
    if (gone.parent == kNoEntry) return;
    if (counts(gone)) count(gone.parent, false);
    if (gone.next != kNoEntry) entries_[gone.next].previous = gone.previous;
    (gone.previous != kNoEntry ? entries_[gone.previous].next : entries_[gone.parent].first_child) = gone.next;
    gone.parent = gone.next = gone.previous = kNoEntry;
}

void KeyIndex::set_foreign(EntryId entry, bool foreign) {
    Entry& one = entries_[entry];
    const bool counted = counts(one);
    one.foreign = foreign;
    if (counts(one) != counted) count(one.parent, !counted);
}

void KeyIndex::erase(EntryId entry) {
    const EntryId above = entries_[entry].parent;
    // Rare: a parent was damaged, or another process dropped it, while its children are sound. What is above it still counts as used
    // with them.
    for (EntryId child = entries_[entry].first_child; child != kNoEntry; child = entries_[entry].first_child) {
        unhang(child);
        if (above != kNoEntry) hang(child, above);
    }
    unhang(entry);

    const std::size_t mask = table_.size() - 1;
    std::size_t gap = entries_[entry].key.prefix() & mask;
    while (table_[gap].entry != entry) gap = (gap + 1) & mask;
    for (std::size_t i = (gap + 1) & mask; table_[i].entry != kNoEntry; i = (i + 1) & mask) {
        const std::size_t home = entries_[table_[i].entry].key.prefix() & mask;
        if (((i - home) & mask) >= ((i - gap) & mask)) {
            table_[gap] = table_[i];
            gap = i;
        }
    }
    table_[gap] = {};
    entries_[entry].alive = false;
    --live_;
    free_.push_back(entry);
}

bool KeyIndex::check_integrity(std::string& fault) const {
    std::vector<std::uint32_t> children(entries_.size(), 0), listed(entries_.size(), 0);
    std::size_t live = 0;
    for (EntryId entry = 0; entry < entries_.size(); ++entry) {
        if (!entries_[entry].alive) continue;
        ++live;
        if (find(entries_[entry].key) != entry) return fault = "entry " + std::to_string(entry) + " cannot be found", false;
        for (EntryId child = entries_[entry].first_child; child != kNoEntry; child = entries_[child].next)
            if (!entries_[child].alive || entries_[child].parent != entry || listed[child]++ > 0)
                return fault = "entry " + std::to_string(entry) + " lists a child that is not its own", false;
        const EntryId above = entries_[entry].parent;
        if (above == kNoEntry) continue;
        if (!entries_[above].alive) return fault = "entry " + std::to_string(entry) + " has a dead parent", false;
        children[above] += counts(entries_[entry]);
    }
    if (live != live_) return fault = "the key index counts " + std::to_string(live_) + " and has " + std::to_string(live), false;
    for (EntryId entry = 0; entry < entries_.size(); ++entry)
        if (entries_[entry].alive &&
            (entries_[entry].children != children[entry] || (listed[entry] == 1) != (entries_[entry].parent != kNoEntry)))
            return fault = "entry " + std::to_string(entry) + ": wrong child count, or its parent does not list it", false;
    return true;
}

}  // namespace kvstrata
