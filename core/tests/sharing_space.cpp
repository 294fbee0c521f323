// One cap over processes that live at the same time: each to its share when room is short, and the smallest cap rules.
#include <algorithm>
#include <cerrno>
#include <thread>

#include "hooked_disk.hpp"
#include "neighbour.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

// Prompts of one page each, until nothing more grows: from this number on; the next number.
std::int32_t fill(Resident& resident, std::int32_t number) {
    const std::uint64_t before = resident.shelf->allocated_bytes();
    for (int i = 0; i < 100; ++i) resident.serve({number++});
    CHECK(resident.shelf->allocated_bytes() >= before);
    return number;
}

std::uint64_t bytes(const Resident& resident) { return resident.shelf->allocated_bytes(); }

}  // namespace

TEST_CASE("sharing: alone one may take all; who comes later gets a fair share") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    const std::int32_t next = fill(first, 1000);
    CHECK(bytes(first) > kCap * 3 / 4);
    Resident second(medium, kCap, 8);
    for (int round = 0; round < 40; ++round) {
        second.now += 1;
        second.serve({round});
        first.poll();
        second.poll();
        CHECK(medium->allocated_bytes() <= kCap);
    }
    fill(second, 5000);
    CHECK(bytes(second) > kCap / 2 - kCap / 8);
    CHECK(bytes(first) <= kCap / 2);
    CHECK(bytes(first) > kCap / 2 - kCap / 8);
    CHECK(first.serve({next - 1}) == 1);  // the least valuable went
    // And neither takes it back.
    const std::uint64_t before = bytes(second);
    first.now += 100;
    fill(first, 8000);
    second.poll();
    first.poll();
    CHECK(bytes(second) == before);
    CHECK(medium->peak_bytes() <= kCap);
}

TEST_CASE("sharing: when one has left the other may take all again") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    {
        Resident second(medium, kCap, 8);
        fill(second, 5000);
        second.kill();
    }
    first.poll();
    CHECK(bytes(first) > kCap * 3 / 4);  // what the other left
    CHECK(first.own() > 40);
    fill(first, 1000);
    CHECK(medium->peak_bytes() <= kCap);
}

TEST_CASE("sharing: a lower cap is acknowledged by those who live, and holds when open() returns") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    fill(first, 1000);
    std::atomic<bool> over{false};
    std::thread living([&] {
        while (!over) {
            first.poll();
            std::this_thread::yield();
        }
    });
    const auto begin = std::chrono::steady_clock::now();
    Resident second(medium, kCap / 2, 8, std::chrono::seconds{30});
    const auto took = std::chrono::steady_clock::now() - begin;
    const std::uint64_t allocated = medium->allocated_bytes();
    over = true;
    living.join();
    CHECK(allocated <= kCap / 2);
    CHECK(second.stats().unacknowledged == 0);
    CHECK(took < std::chrono::seconds{10});
    CHECK(first.stats().cap_bytes == kCap / 2);
    fill(first, 2000);
    fill(second, 3000);
    CHECK(medium->allocated_bytes() <= kCap / 2);
    second.kill();
    first.poll();
    first.now += 100;
    fill(first, 4000);
    CHECK(medium->allocated_bytes() > kCap / 2);
    CHECK(medium->allocated_bytes() <= kCap);
}

TEST_CASE("sharing: who does not acknowledge a lower cap in time is counted, and the others go on") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    fill(first, 1000);
    Resident second(medium, kCap / 2, 8);
    CHECK(second.stats().unacknowledged == 1);
    CHECK(second.serve({1}) == 0);
    CHECK(second.own() == 0);  // no room
    first.poll();
    CHECK(medium->allocated_bytes() <= kCap / 2);
    for (int round = 0; round < 2; ++round) {  // it asks for its share, and gets it
        second.now += 10;
        second.serve({1});
        first.poll();
        second.poll();
    }
    second.serve({1});
    CHECK(second.own() == 1);
}

TEST_CASE("sharing: descriptions of namespaces keep to the smallest cap too") {
    const auto medium = SimMedium::make(1);
    Resident small(medium, kCap / 2, 7);
    Resident large(medium, kCap, 8);
    fill(small, 1000);
    for (std::uint8_t i = 0; i < 200; ++i) large.shelf->describe(key_of(i), "{}\n");
    large.shelf->check_files();
    CHECK(medium->allocated_bytes() <= kCap / 2);
}

TEST_CASE("sharing: a shelf that cannot be made, again and again, leaves nothing behind") {
    const auto medium = SimMedium::make(1);
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    hooks->on_open = [](const std::string&, OpenMode mode) { return mode == OpenMode::create_new ? -ENOSPC : 0; };
    Writer writer(hooks, shelf_config(kCap));
    REQUIRE_MESSAGE(writer.shelf, writer.error);
    const std::uint64_t before = medium->allocated_bytes();
    for (int i = 0; i < 40; ++i) writer.shelf->poll();
    CHECK(writer.grow() != OpStatus::ok);
    CHECK(medium->allocated_bytes() <= before);
    std::vector<DirEntry> shelves;
    medium->attach()->list("shelves", shelves);
    CHECK(shelves.empty());
}

TEST_CASE("sharing: a shelf in which nothing was stored goes with its owner") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    first.serve({1});
    {
        Resident second(medium, kCap, 8);
        CHECK(second.shared() == 1);
        second.shelf->close();
    }
    std::vector<DirEntry> shelves;
    medium->attach()->list("shelves", shelves);
    CHECK(shelves.size() == 1);
    first.poll();
    CHECK(first.stats().owners == 1);
}
