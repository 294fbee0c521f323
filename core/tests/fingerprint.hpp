// Pages for tests: content, name and bytes all follow from a number, so that a wrong byte is seen wherever it turns up.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "../keys.hpp"
#include "../shelf.hpp"
#include "../slot.hpp"

namespace kvstrata::testing {

inline constexpr std::uint32_t kPageSize = 8;
inline constexpr std::uint64_t kRowBytes = 6000;
inline constexpr std::uint64_t kRowStride = 8192;
inline constexpr std::uint64_t kSlotBytes = kRowStride + 4096;

inline Key key_of(std::uint8_t byte) {
    Key key;
    key.bytes.fill(byte);
    return key;
}

struct FingerprintPage {
    explicit FingerprintPage(std::uint32_t page_number, Key page_space = key_of(0x11)) : number(page_number), space(page_space) {
        for (std::uint32_t i = 0; i < kPageSize; ++i) tokens.push_back(std::int32_t(number * 1000 + i));
        if (number % 3 == 0) media.push_back({std::int32_t(number % kPageSize), key_of(std::uint8_t(number))});
        parent = number % 2 == 0 ? space : key_of(0x22);
        key = page_key(space, parent, content());
    }
    Content content() const { return {tokens, media}; }
    PageImage image() const { return {space, parent, key, content(), 1, number + 1}; }
    void fill(std::byte* row) const {
        std::uint64_t state = key.prefix() | 1;
        for (std::uint64_t i = 0; i < kRowBytes; ++i)
            row[i] = std::byte((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 56);
    }
    bool matches(const std::byte* row) const {
        std::vector<std::byte> expected(kRowBytes);
        fill(expected.data());
        return std::memcmp(expected.data(), row, kRowBytes) == 0;
    }

    std::uint32_t number;
    Key space, parent, key;
    std::vector<std::int32_t> tokens;
    std::vector<MediaItem> media;
};

inline ShelfConfig shelf_config(std::uint64_t cap_bytes) {
    ShelfConfig config;
    config.page_size = kPageSize;
    config.row_bytes = kRowBytes;
    config.row_stride = kRowStride;
    config.planes = {{0, 1000}, {1000, 3000}, {4000, 2000}};
    config.cap_bytes = cap_bytes;
    config.space = key_of(0x11);
    config.space_json = "{\"model\": \"test\"}\n";
    config.seed = 7;
    return config;
}

// One process with a shelf and one row of memory; knows where it put which page.
class Writer {
   public:
    Writer(std::shared_ptr<Disk> disk, const ShelfConfig& config) : row_(kRowStride) {
        std::memset(row_.data(), 0, kRowStride);
        shelf = Shelf::open(std::move(disk), config, error);
        if (!shelf) return;
        found = shelf->take_found();
        empty = shelf->take_empty();
    }

    Completion run(OpKind kind, SlotRef slot = {}, const FingerprintPage* page = nullptr) {
        Op op;
        op.id = ++id_;
        op.kind = kind;
        op.slot = slot;
        op.row = 0;
        if (page) op.page = page->image();
        return shelf->execute(op, row_.data());
    }
    // Lets the shelf finish what it does in the background.
    void settle() {
        while (shelf->has_news()) {
            const ShelfNews news = shelf->next_news();
            found.insert(found.end(), news.found.begin(), news.found.end());
            empty.insert(empty.end(), news.empty.begin(), news.empty.end());
            vanished.insert(vanished.end(), news.vanished.begin(), news.vanished.end());
        }
    }
    OpStatus grow() {
        Completion done = run(OpKind::grow);
        empty.insert(empty.end(), done.slots.begin(), done.slots.end());
        return done.status;
    }
    OpStatus write(SlotRef slot, const FingerprintPage& page) {
        page.fill(row_.data());
        return run(OpKind::write, slot, &page).status;
    }
    // ok only when the bytes are right too; a wrong byte served as good is `failed`, which no read returns by itself.
    OpStatus read(SlotRef slot, const FingerprintPage& page) {
        std::memset(row_.data(), 0xDB, kRowStride);
        const OpStatus status = run(OpKind::read, slot, &page).status;
        return status == OpStatus::ok && !page.matches(row_.data()) ? OpStatus::failed : status;
    }
    const FoundPage* find(const FingerprintPage& page) const {
        for (const FoundPage& candidate : found) {
            if (candidate.key == page.key) return &candidate;
        }
        return nullptr;
    }

    std::string error;
    std::unique_ptr<Shelf> shelf;
    std::vector<FoundPage> found;
    std::vector<SlotRef> empty;
    std::vector<std::uint32_t> vanished;

   private:
    AlignedBuffer row_;
    std::uint64_t id_ = 0;
};

// Fills the shelf with pages first, first + 1, ... until it is full; the number of pages.
inline std::uint32_t fill(Writer& writer, std::uint32_t first) {
    while (writer.grow() == OpStatus::ok) {
    }
    std::uint32_t number = first;
    for (const SlotRef slot : writer.empty) REQUIRE(writer.write(slot, FingerprintPage(number++)) == OpStatus::ok);
    writer.empty.clear();
    return number - first;
}

// Pages first ... first + count - 1 that the shelf reported when it was opened; each has to read back exactly.
inline std::size_t served(Writer& writer, std::uint32_t first, std::uint32_t count) {
    std::size_t good = 0;
    for (std::uint32_t number = first; number < first + count; ++number) {
        const FingerprintPage page(number);
        const FoundPage* found = writer.find(page);
        if (!found) continue;
        CHECK(found->parent == page.parent);
        CHECK(found->space == page.space);
        CHECK(found->last_use == number + 1);
        CHECK(writer.read(found->slot, page) == OpStatus::ok);
        ++good;
    }
    return good;
}

}  // namespace kvstrata::testing
