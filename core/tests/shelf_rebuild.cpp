// Segments whose header block or table is lost: what is known is served at once, the rest is found again from the slots' own headers.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "../checksum.hpp"
#include "../disk_sim.hpp"
#include "../segment.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;
constexpr std::size_t kHeader = 4096;       // bytes
constexpr std::size_t kSlotsOffset = 8192;  // of segments of four slots
using Bytes = std::vector<std::byte>;

ShelfConfig other_model(std::uint64_t row_bytes) {
    ShelfConfig config = shelf_config(kCap);
    config.row_bytes = row_bytes;
    config.row_stride = round_up(row_bytes, 4096);
    config.planes = {{0, row_bytes}};
    config.space = key_of(0x33);
    return config;
}

// Two segments: four pages in the first, one in the second's third slot.
struct Library {
    explicit Library(const ShelfConfig& config = shelf_config(kCap)) : medium(SimMedium::make(9)) {
        Writer writer(medium->attach(), config);
        for (int i = 0; i < 2; ++i) REQUIRE(writer.grow() == OpStatus::ok);
        for (const std::size_t slot : {0, 1, 2, 3, 6})
            REQUIRE(writer.write(writer.empty[slot], FingerprintPage(std::uint32_t(slot))) == OpStatus::ok);
        writer.shelf.reset();
        for (const std::string& path : medium->files()) {
            if (path.ends_with(".kvs")) segments.push_back(path);
        }
    }
    void wipe(std::size_t segment, std::size_t at, std::size_t bytes, std::byte value = std::byte{0}) {
        medium->edit(segments[segment], [&](Bytes& data) { std::fill_n(data.begin() + std::ptrdiff_t(at), bytes, value); });
    }
    std::size_t known_at_once() {
        const Writer writer(medium->attach(), shelf_config(kCap));
        return writer.found.size();
    }
    std::shared_ptr<SimMedium> medium;
    std::vector<std::string> segments;
};

std::size_t good(Writer& writer) {
    std::size_t count = 0;
    for (const std::uint32_t number : {0, 1, 2, 3, 6}) {
        const FoundPage* found = writer.find(FingerprintPage(number));
        if (!found) continue;
        CHECK(found->parent == FingerprintPage(number).parent);
        CHECK(found->space == FingerprintPage(number).space);
        CHECK(found->last_use == number + 1);
        CHECK(writer.read(found->slot, FingerprintPage(number)) == OpStatus::ok);
        ++count;
    }
    return count;
}

}  // namespace

TEST_CASE("rebuild: a lost table is made again from the slots while the other segment is served") {
    for (const std::byte value : {std::byte{0}, std::byte{0xA5}}) {
        Library library;
        library.wipe(0, kHeader, 4096, value);
        {
            Writer writer(library.medium->attach(), shelf_config(kCap));
            CHECK(writer.found.size() == 1);  // of the other segment
            CHECK(writer.empty.size() == 3);
            CHECK(good(writer) == 1);
            CHECK(writer.shelf->has_news());
            CHECK(writer.shelf->stats().damaged_records == 4);
            CHECK(writer.shelf->stats().unproven_slots == 4);
            writer.settle();
            CHECK(good(writer) == 5);
            CHECK(writer.empty.size() == 3);
            CHECK(writer.shelf->stats().unproven_slots == 0);
            CHECK(writer.shelf->stats().rebuilt_pages == 4);
        }
        CHECK(library.known_at_once() == 5);
    }
}

TEST_CASE("rebuild: slots are free or hold a page, each exactly once") {
    Library library;
    library.wipe(1, kHeader, 4096);
    Writer writer(library.medium->attach(), shelf_config(kCap));
    writer.settle();
    std::set<std::pair<std::uint32_t, std::uint32_t>> slots;
    for (const FoundPage& page : writer.found) CHECK(slots.emplace(page.slot.segment, page.slot.slot).second);
    for (const SlotRef slot : writer.empty) CHECK(slots.emplace(slot.segment, slot.slot).second);
    CHECK(slots.size() == 8);
    for (const SlotRef slot : writer.empty) CHECK(writer.write(slot, FingerprintPage(50 + slot.slot)) == OpStatus::ok);
    CHECK(good(writer) == 5);
}

TEST_CASE("rebuild: a lost header block, with and without the table") {
    for (const bool magic_too : {false, true}) {
        for (const bool table_too : {false, true}) {
            for (const std::byte value : {std::byte{0}, std::byte{0xA5}}) {
                CAPTURE(magic_too);
                CAPTURE(table_too);
                Library library;
                library.wipe(0, magic_too ? 0 : 8, magic_too ? 4096 : 4088, value);
                if (table_too) library.wipe(0, kHeader, 4096, value);
                {
                    Writer writer(library.medium->attach(), shelf_config(kCap));
                    CHECK(writer.found.size() == 1);
                    CHECK(writer.shelf->stats().damaged_segments == 1);
                    // Nobody formats it before it is known what it is, full as the directory may be.
                    while (writer.grow() == OpStatus::ok) {
                    }
                    writer.settle();
                    CHECK(good(writer) == 5);
                    CHECK(writer.shelf->stats().unknown_files == 0);
                }
                CHECK(library.known_at_once() == 5);
                CHECK(library.medium->peak_bytes() <= kCap);
            }
        }
    }
}

TEST_CASE("rebuild: a file whose making was interrupted becomes usable") {
    Library library;
    const std::string shelf = library.segments[0].substr(0, library.segments[0].rfind('/') + 1);
    const std::size_t size = kSlotsOffset + 4 * kSlotBytes;
    library.medium->edit(shelf + "seg-000007.kvs", [&](Bytes& data) { data.assign(size, std::byte{0}); });  // just our size
    library.medium->edit(shelf + "seg-000008.kvs", [](Bytes& data) { data.assign(5000, std::byte{0}); });
    library.medium->edit(shelf + "seg-000009.kvs", [](Bytes& data) { data.clear(); });
    Writer writer(library.medium->attach(), shelf_config(kCap));
    writer.settle();
    CHECK(good(writer) == 5);
    CHECK(writer.empty.size() == 3 + 4);
    CHECK(writer.shelf->stats().other_segments == 2);
    while (writer.grow() == OpStatus::ok) {
    }
    CHECK(writer.shelf->stats().other_segments == 0);
    CHECK(library.medium->peak_bytes() <= kCap);
}

TEST_CASE("rebuild: the segment of another model keeps its pages for that model") {
    Library library;
    library.wipe(0, 0, kSlotsOffset);
    {
        Writer writer(library.medium->attach(), other_model(8000));  // slots of equal size, other planes
        writer.settle();
        CHECK(writer.found.empty());
        CHECK(writer.shelf->stats().other_segments == 2);
    }
    Writer writer(library.medium->attach(), shelf_config(kCap));
    writer.settle();
    CHECK(good(writer) == 5);
}

TEST_CASE("rebuild: what another model left behind in the slots does not win over our pages") {
    Library library(other_model(8000));
    {
        Writer writer(library.medium->attach(), shelf_config(kCap));
        library.medium->edit("filler", [](Bytes& data) { data.assign(800 * 1024, std::byte{1}); });
        std::uint32_t number = 0;
        while (writer.grow() == OpStatus::ok) {
        }
        REQUIRE(writer.shelf->stats().other_segments == 0);
        for (const SlotRef slot : writer.empty) {
            if (slot.slot == 3) REQUIRE(writer.write(slot, FingerprintPage(number++)) == OpStatus::ok);
        }
    }
    library.wipe(0, 0, kSlotsOffset);
    Writer writer(library.medium->attach(), shelf_config(kCap));
    const std::size_t at_once = writer.found.size();
    writer.settle();
    CHECK(writer.found.size() == at_once + 1);
}

TEST_CASE("rebuild: a header that lies is not believed") {
    Library library;
    library.wipe(0, kHeader, 4096);
    library.medium->edit(library.segments[0], [](Bytes& data) {
        const auto reseal = [&](std::size_t slot) {
            std::byte* header = data.data() + kSlotsOffset + slot * kSlotBytes;
            const std::uint64_t sum = checksum(header, 4088);
            std::memcpy(header + 4088, &sum, sizeof sum);
        };
        data[kSlotsOffset + 112] ^= std::byte{1};  // another key than its content has, under a good checksum
        reseal(0);
        data[kSlotsOffset + kSlotBytes + 24 + 2] = std::byte{0xff};  // millions of media items
        reseal(1);
        data[kSlotsOffset + 2 * kSlotBytes + 200] ^= std::byte{1};  // no good checksum
    });
    Writer writer(library.medium->attach(), shelf_config(kCap));
    writer.settle();
    CHECK(good(writer) == 2);
    CHECK(writer.empty.size() == 3 + 3);
}

TEST_CASE("rebuild: a row that was not all there is found out when it is read") {
    Library library;
    library.wipe(0, kHeader, 4096);
    library.medium->edit(library.segments[0], [](Bytes& data) { data[kSlotsOffset + 4096 + 17] ^= std::byte{1}; });
    Writer writer(library.medium->attach(), shelf_config(kCap));
    writer.settle();
    REQUIRE(writer.find(FingerprintPage(0)));
    CHECK(writer.read(writer.find(FingerprintPage(0))->slot, FingerprintPage(0)) == OpStatus::corrupt);
}

TEST_CASE("rebuild: interrupted or failing at any operation, it ends well at the next start") {
    std::uint64_t operations = 0;
    for (std::uint64_t n = 0; n <= operations; ++n) {
        for (const bool and_after : {false, true}) {
            CAPTURE(n);
            CAPTURE(and_after);
            Library library;
            library.wipe(0, 0, kSlotsOffset);
            library.wipe(1, kHeader, 4096);
            {
                Writer writer(library.medium->attach(), shelf_config(kCap));
                library.medium->set_faults({.fail_at = n, .and_after = and_after});
                writer.settle();
                if (n == 0) operations = library.medium->operations();
                library.medium->set_faults({});
                for (const SlotRef slot : writer.empty) CHECK(writer.write(slot, FingerprintPage(60 + slot.slot)) == OpStatus::ok);
                good(writer);
            }
            Writer writer(library.medium->attach(), shelf_config(kCap));
            writer.settle();
            CHECK(good(writer) == 5);
        }
    }
    CHECK(operations > 20);
}

TEST_CASE("rebuild: a lowered cap takes damaged segments too") {
    Library library;
    library.wipe(0, 0, kSlotsOffset);
    const std::uint64_t cap = kSlotsOffset + 4 * kSlotBytes + 64 * 1024;
    Writer writer(library.medium->attach(), shelf_config(cap));
    REQUIRE_MESSAGE(writer.shelf, writer.error);
    CHECK(library.medium->allocated_bytes() <= cap);
    writer.settle();
    CHECK(good(writer) == 1);
}
