// Space: one cap over all owners and restarts, orphans, reserves, other slot sizes.
#include <doctest/doctest.h>

#include <algorithm>

#include "../disk_sim.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

std::size_t segments_on(SimMedium& medium) {
    const auto files = medium.files();
    return std::size_t(std::count_if(files.begin(), files.end(), [](const std::string& path) { return path.ends_with(".kvs"); }));
}

}  // namespace

TEST_CASE("C2: two live owners share one cap, neither sees the other's slots, both are adopted later") {
    const auto medium = SimMedium::make(1);
    std::uint32_t first_count = 0, second_count = 0;
    {
        Writer first(medium->attach(), shelf_config(kCap));
        Writer second(medium->attach(), shelf_config(kCap));
        REQUIRE(first.shelf);
        REQUIRE(second.shelf);
        for (int i = 0; i < 5; ++i) {
            REQUIRE(first.grow() == OpStatus::ok);
            REQUIRE(second.grow() == OpStatus::ok);
        }
        first_count = fill(first, 0);
        second_count = fill(second, 1000);
        CHECK(second_count == 20);
        CHECK(second.grow() == OpStatus::full);
        Writer third(medium->attach(), shelf_config(kCap));
        REQUIRE(third.shelf);
        CHECK(third.found.empty());
        CHECK(third.grow() == OpStatus::full);
    }
    CHECK(medium->peak_bytes() <= kCap);
    Writer heir(medium->attach(), shelf_config(kCap));
    CHECK(heir.shelf->stats().adopted_shelves == 2);
    CHECK(served(heir, 0, first_count) == first_count);
    CHECK(served(heir, 1000, second_count) == second_count);
    CHECK(heir.shelf->allocated_bytes() < medium->allocated_bytes());
}

TEST_CASE("shelf: an empty orphan is cleared away, a vanished directory is made again") {
    const auto medium = SimMedium::make(1);
    for (int round = 0; round < 4; ++round) {
        Writer a(medium->attach(), shelf_config(kCap));
        Writer b(medium->attach(), shelf_config(kCap));
        REQUIRE(a.grow() == OpStatus::ok);
        if (round == 0) REQUIRE(b.grow() == OpStatus::ok);
    }
    std::vector<DirEntry> shelves;
    medium->attach()->list("shelves", shelves);
    CHECK(shelves.size() == 2);

    Writer writer(medium->attach(), shelf_config(kCap));
    const auto disk = medium->attach();
    for (const std::string& path : medium->files()) disk->remove(path);
    for (const DirEntry& entry : shelves) disk->remove("shelves/" + entry.name);
    disk->remove("shelves");
    CHECK(writer.grow() == OpStatus::ok);
    CHECK(writer.write(writer.empty.back(), FingerprintPage(9)) == OpStatus::ok);
    CHECK(writer.read(writer.empty.back(), FingerprintPage(9)) == OpStatus::ok);
}

TEST_CASE("C1: a lowered cap holds before open returns; the least recently used go first") {
    const auto medium = SimMedium::make(1);
    std::uint32_t count = 0;
    {
        Writer writer(medium->attach(), shelf_config(kCap));
        count = fill(writer, 0);
    }
    {
        Writer writer(medium->attach(), shelf_config(kCap / 4));
        REQUIRE_MESSAGE(writer.shelf, writer.error);
        CHECK(medium->allocated_bytes() <= kCap / 4);
        CHECK(writer.found.size() >= 12);
        for (const FoundPage& page : writer.found) CHECK(page.last_use > count - 20);
        CHECK(served(writer, 0, count) == writer.found.size());
        CHECK(writer.grow() == OpStatus::full);
        CHECK(writer.shelf->stats().removed_segments > 5);
    }
    Writer writer(medium->attach(), shelf_config(kCap));  // raised again
    CHECK(writer.grow() == OpStatus::ok);
}

TEST_CASE("shelf: free space is kept in reserve, a full file system is no error") {
    const auto medium = SimMedium::make(1, 400 * 1024);
    ShelfConfig config = shelf_config(kCap);
    config.reserve_free_bytes = 100 * 1024;
    Writer writer(medium->attach(), config);
    const std::uint32_t count = fill(writer, 0);
    CHECK(medium->allocated_bytes() <= 300 * 1024);
    CHECK(medium->allocated_bytes() > 200 * 1024);
    medium->set_capacity(1 << 30);
    CHECK(writer.grow() == OpStatus::ok);  // and goes on by itself when there is room again
    for (std::uint32_t number = 0; number < count; ++number) {
        CHECK(writer.read({number / 4, number % 4}, FingerprintPage(number)) == OpStatus::ok);
    }
}

TEST_CASE("shelf: after a change of the page size the old segments are taken over, oldest first, and the cap holds") {
    // A row of equal stride is reformatted in place, a larger one makes way first.
    for (const std::uint64_t row_bytes : {std::uint64_t{8000}, std::uint64_t{30000}}) {
        const auto medium = SimMedium::make(1);
        std::uint32_t count = 0;
        {
            Writer writer(medium->attach(), shelf_config(kCap));
            count = fill(writer, 0);
        }
        const std::size_t before = segments_on(*medium);
        ShelfConfig config = shelf_config(kCap);
        config.row_bytes = row_bytes;
        config.row_stride = round_up(row_bytes, 4096);
        config.planes = {{0, row_bytes}};
        config.space = key_of(0x33);
        {
            Writer writer(medium->attach(), config);
            REQUIRE_MESSAGE(writer.shelf, writer.error);
            CHECK(writer.found.empty());
            CHECK(writer.empty.empty());
            CHECK(writer.shelf->stats().other_segments == before);
            Completion done = writer.run(OpKind::grow);
            CHECK(done.status == OpStatus::ok);
            CHECK(done.lost.empty());  // its pages had never been reported
            CHECK(done.slots.size() >= 4);
            CHECK(writer.shelf->stats().other_segments < before);
            CHECK(medium->peak_bytes() <= kCap);
        }
        Writer writer(medium->attach(), shelf_config(kCap));  // back: what was not needed is still there
        const std::size_t left = served(writer, 0, count);
        CHECK(left == writer.found.size());
        CHECK(left < count);
        CHECK(left >= count - 16);
        CHECK_FALSE(writer.find(FingerprintPage(0)));
    }
}
