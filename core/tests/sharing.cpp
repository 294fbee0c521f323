// Several processes on one directory: what one writes the others find, read and do not write again; what one leaves another takes over.
#include <algorithm>

#include "neighbour.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

}  // namespace

TEST_CASE("sharing: pages of a process that lives are found by others, at their start and after it") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    Resident second(medium, kCap, 8);
    first.serve({1, 2, 3});
    CHECK(first.own() == 3);
    CHECK(second.shared() == 0);
    second.poll();
    CHECK(second.shared() == 3);
    CHECK(second.own() == 0);
    CHECK(second.serve({1, 2, 3, 4}) == 3);
    CHECK(second.own() == 1);
    CHECK(second.driver.counters().reads == 3);
    Resident third(medium, kCap, 9);
    CHECK(third.shared() == 4);
    CHECK(third.serve({1, 2, 3, 4}) == 4);
    CHECK(third.own() == 0);
    first.poll();
    CHECK(first.shared() == 1);
    CHECK(first.stats().owners == 3);
    CHECK(first.serve({1, 2, 3, 4}) == 4);
    CHECK(first.writes() == 3);
}

TEST_CASE("sharing: nothing to see costs two small reads, and nothing where nobody else lives") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    first.serve({1});
    first.poll();
    medium->set_faults({});
    CHECK(first.shelf->poll().nothing());
    CHECK(medium->operations() <= 1);  // whether somebody came
    Resident second(medium, kCap, 8);
    first.poll();
    second.poll();
    first.poll();
    std::uint64_t least = 1000;
    for (int i = 0; i < 4; ++i) {
        medium->set_faults({});
        CHECK(first.shelf->poll().nothing());
        least = std::min(least, medium->operations());
    }
    CHECK(least <= 2);
}

TEST_CASE("sharing: first writer wins: what another wrote is not written again") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    Resident second(medium, kCap, 8);
    first.serve({1, 2});
    second.poll();
    second.serve({1, 2, 3}, false);  // computed without looking
    second.forget_memory();
    CHECK(second.serve({1, 2, 3}) == 3);
    CHECK(second.writes() == 1);
    CHECK(second.own() == 1);
    CHECK(second.shared() == 2);
}

TEST_CASE("sharing: both wrote the same pages before they looked: one copy stays, and both find it") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    Resident second(medium, kCap, 8);
    first.serve({1, 2, 3});
    second.serve({1, 2, 3});
    CHECK(first.own() == 3);
    CHECK(second.own() == 3);
    first.poll();
    second.poll();
    first.poll();
    second.poll();
    CHECK(first.own() + second.own() == 3);
    CHECK(first.shared() + second.shared() == 3);
    CHECK((first.own() == 0 || second.own() == 0));
    for (Resident* one : {&first, &second}) {
        one->forget_memory();
        CHECK(one->serve({1, 2, 3}) == 3);
    }
    first.shelf->close();
    first.shelf.reset();
    second.kill();
    Resident heir(medium, kCap, 9);
    CHECK(heir.own() == 3);
    CHECK(heir.driver.ledger().free_slots() == 5);
}

TEST_CASE("sharing: a slot that was used again is a miss, and is forgotten; the next look tells what is there") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    Resident second(medium, kCap, 8);
    first.serve({1});
    second.poll();
    // The other's page goes and its slot is used for another one, and nobody has looked since.
    const EntryId entry = second.driver.ledger().find_entry([&] {
        const Forest& forest = first.driver.ledger().forest();
        for (PageId page = 0; page < forest.id_bound(); ++page)
            if (forest.at(page).alive && !forest.at(page).is_root()) return forest.at(page).key;
        return Key{};
    }());
    REQUIRE(entry != kNoEntry);
    SlotRef slot;
    while (first.driver.ledger().resident(Tier::disk) > 0) REQUIRE(first.driver.ledger().take_slot(slot));
    first.driver.add_slot(slot);
    first.serve({9});
    CHECK(second.serve({1}) == 0);
    CHECK(second.driver.counters().stale == 1);
    CHECK(second.shared() == 0);
    CHECK(second.own() == 1);  // computed, and written by itself
    second.poll();
    CHECK(second.shared() == 1);
    CHECK(second.serve({9}) == 1);
    first.poll();
    CHECK(first.serve({9}) == 1);
}

TEST_CASE("sharing: a page that the other dropped while it is only in memory here is written when it is used") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    Resident second(medium, kCap, 8);
    first.serve({1, 2});
    second.poll();
    CHECK(second.serve({1, 2}) == 2);
    CHECK(second.own() == 0);
    std::vector<SlotRef> slots;
    while (first.own() > 0) REQUIRE(first.driver.ledger().take_slot(slots.emplace_back()));
    for (const SlotRef slot : slots) first.shelf->execute({.id = 1, .kind = OpKind::clear, .slot = slot, .page = {}}, nullptr);
    second.poll();
    CHECK(second.shared() == 0);
    CHECK(second.serve({1, 2}) == 2);  // from memory
    CHECK(second.own() == 2);
}

TEST_CASE("sharing: a file that is gone is a miss, is forgotten, and is no trouble") {
    for (const bool looked : {false, true}) {
        const auto medium = SimMedium::make(1);
        Resident first(medium, kCap, 7);
        Resident second(medium, kCap, 8);
        first.serve({1, 2});
        second.poll();
        for (const std::string& path : medium->files())
            if (path.ends_with(".kvs")) first.disk->remove(path);
        if (looked) {
            second.shelf->check_files();
            second.poll();
            CHECK(second.shared() == 0);
        }
        CHECK(second.serve({1, 2}) == 0);
        CHECK(second.shared() == 0);
        CHECK(second.own() == 2);
        CHECK(second.stats().vanished_segments == 0);
        CHECK(second.driver.health().sentence() == "ok");
    }
}

TEST_CASE("sharing: what a killed process leaves is taken over by one that lives, with every page where it was") {
    const auto medium = SimMedium::make(1);
    Resident second(medium, kCap, 8);
    {
        Resident first(medium, kCap, 7);
        first.serve({1, 2, 3});
        second.poll();
        CHECK(second.shared() == 3);
        CHECK(second.serve({1}) == 1);
        first.serve({4});  // not seen any more
        first.kill();
    }
    second.poll();
    CHECK(second.own() == 4);
    CHECK(second.shared() == 0);
    CHECK(second.stats().owners == 1);
    CHECK(second.stats().adopted_shelves == 1);
    CHECK(second.driver.ledger().free_slots() == 0);
    CHECK(second.serve({1, 2, 3}) == 3);
    CHECK(second.serve({4}) == 1);
    second.serve({5});
    CHECK(second.own() == 5);
    Resident third(medium, kCap, 9);
    CHECK(third.shared() == 5);
    CHECK(third.stats().owners == 2);
    second.kill();
    third.poll();
    CHECK(third.own() == 5);
    CHECK(third.stats().adopted_shelves == 2);
    CHECK(third.serve({1, 2, 3}) == 3);
}

TEST_CASE("sharing: a copy that is being read when it is the other's turn is cleared when the read has ended") {
    for (const bool killed : {false, true}) {
        const auto medium = SimMedium::make(1);
        Resident first(medium, kCap, 7);
        Resident second(medium, kCap, 8);
        first.serve({1});
        second.serve({1});
        Resident* loser = &first;
        Resident* winner = &second;
        first.forget_memory();
        second.forget_memory();
        for (Resident* one : {&first, &second}) one->hold = [](const Op& op) { return op.kind == OpKind::read; };
        for (Resident* one : {&first, &second}) {
            std::vector<std::int32_t> tokens;
            for (std::uint32_t i = 0; i < kPageSize; ++i) tokens.push_back(100 + std::int32_t(i));
            one->driver.lease(one->now, {.space = one->space, .tokens = tokens, .media = {}, .leave = 0});
            one->step();
            REQUIRE(one->held.size() == 1);
            one->poll();
        }
        if (first.own() == 1) std::swap(loser, winner);
        CHECK(loser->own() == 0);
        CHECK(loser->shared() == 1);
        CHECK(winner->own() == 1);
        CHECK(loser->driver.ledger().free_slots() == 3);
        if (killed) {  // and what it moved to is gone as well
            SlotRef slot;
            winner->finish_held();
            while (!winner->driver.ledger().take_slot(slot) || winner->own() > 0) {
            }
            winner->shelf->execute({.id = 1, .kind = OpKind::clear, .slot = slot, .page = {}}, nullptr);
            loser->poll();
        }
        loser->finish_held();
        CHECK(loser->driver.counters().reads == 1);
        CHECK(loser->driver.ledger().free_slots() == 4);
        CHECK(loser->shared() == (killed ? 0 : 1));
        if (!killed) winner->finish_held();
    }
}

TEST_CASE("sharing: the name of a file that somebody removed is not used again before that was found out") {
    const auto medium = SimMedium::make(1);
    Resident first(medium, kCap, 7);
    first.serve({1, 2, 3, 4});
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs")) first.disk->remove(path);
    first.serve({5});  // a new segment
    CHECK(first.own() == 5);
    first.shelf->check_files();
    first.poll();
    CHECK(first.own() == 1);
    first.forget_memory();
    CHECK(first.serve({5}) == 1);
}
