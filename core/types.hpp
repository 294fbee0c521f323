// Words shared by every file of the core: ids, keys, tiers, the content of a page.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvstrata {

using PageId = std::uint32_t;   // a record of the forest
using EntryId = std::uint32_t;  // a record of the key index: one page on disk
using Row = std::int32_t;       // a row of the slab or of the device pool

inline constexpr PageId kNoPage = ~PageId{0};
inline constexpr EntryId kNoEntry = ~EntryId{0};
inline constexpr Row kNoRow = -1;

enum class Tier : std::uint8_t { gpu = 0, cpu = 1, disk = 2 };
inline constexpr int kTiers = 3;

// SHA-256 digests: page keys, namespaces, media digests.
struct Key {
    std::array<std::uint8_t, 32> bytes{};

    friend bool operator==(const Key&, const Key&) = default;
    // The first eight bytes; good enough for hash tables, since keys are digests.
    std::uint64_t prefix() const {
        std::uint64_t value;
        std::memcpy(&value, bytes.data(), sizeof value);
        return value;
    }
};

struct KeyOrder {
    bool operator()(const Key& a, const Key& b) const { return a.bytes < b.bytes; }
};

// What makes a page of one namespace and parent different from its siblings: exactly page_size tokens and the media items that
// begin or run in them, as a packed array of MediaItem. Borrowed; the owner keeps it alive for the duration of the call.
struct MediaItem {
    std::int32_t offset;  // of the item's first token, relative to the page's first; negative when it began in an earlier page
    Key digest;           // of the item's content
};
static_assert(sizeof(MediaItem) == 36);

struct Content {
    std::span<const std::int32_t> tokens;
    std::span<const MediaItem> media;
};

// Where a page lies on disk.
struct SlotRef {
    std::uint32_t segment = 0;
    std::uint32_t slot = 0;
    friend bool operator==(const SlotRef&, const SlotRef&) = default;
};

}  // namespace kvstrata
