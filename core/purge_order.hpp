// What is to be dropped from a cache, and what became of it in memory.
#pragma once

#include <cstdint>
#include <set>

#include "types.hpp"

namespace kvstrata {

struct PurgeOrder {
    enum class Kind : std::uint8_t {
        all,
        spaces,   // the namespaces `keys`
        unused,   // not used since `before`
        prefix,   // the pages `keys` and all that continue them
        to_size,  // whole segments, the least recently used first, until the directory takes at most `bytes`
    };
    Kind kind = Kind::all;
    std::uint32_t before = 0;  // seconds since 1970
    std::uint64_t bytes = 0;
    std::set<Key, KeyOrder> keys;

    bool drops(const Key& key, const Key& page_space, std::uint32_t last_use) const {
        switch (kind) {
            case Kind::all:
                return true;
            case Kind::spaces:
                return keys.contains(page_space);
            case Kind::unused:
                return last_use < before;
            case Kind::prefix:
                return keys.contains(key);
            case Kind::to_size:
                return false;
        }
        return false;
    }
};

// What an owner that was asked to purge its shelves did.
struct PurgeAnswer {
    std::uint64_t request = 0;  // its id; 0: it was never asked
    std::uint64_t pages = 0, bytes = 0, leftovers = 0, segments = 0, freed = 0;
    std::uint64_t used_pages = 0, used_bytes = 0;  // that it had to keep: on disk, and copies in memory
    std::uint64_t failures = 0;
    // What it had done before it was asked again; what it had to keep it tells again.
    void also_did(const PurgeAnswer& before) {
        pages += before.pages;
        bytes += before.bytes;
        leftovers += before.leftovers;
        segments += before.segments;
        freed += before.freed;
    }
    friend bool operator==(const PurgeAnswer&, const PurgeAnswer&) = default;
};

// Of the pages in memory that an order names.
struct MemoryDrops {
    std::uint64_t gpu = 0, cpu = 0;  // copies dropped
    std::uint64_t in_use = 0;        // copies that a lease or a move uses: they stay until these end
};

}  // namespace kvstrata
