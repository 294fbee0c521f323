// Every operation of a scenario of publish, evict, reopen and share goes wrong once, in every way, under the shipped driver and shelf.
// How many there are a run without trouble tells.
#include <doctest/doctest.h>

#include <cerrno>

#include "process.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 200 * 1024;   // four segments of four slots
constexpr std::uint64_t kLess = 160 * 1024;  // three
constexpr std::uint32_t kPrompts = 9;

// Three pages, the first of which another prompt has too.
Tokens prompt(std::int32_t number) {
    Tokens tokens;
    for (std::int32_t page = 0; page < 3; ++page)
        for (std::int32_t i = 0; i < 4; ++i) tokens.push_back(page == 0 ? number / 2 : 100 * number + 10 * page + i);
    return tokens;
}

World world_on(std::uint64_t seed) {
    World world;
    world.medium = SimMedium::make(seed);
    world.cap_bytes = kCap;
    return world;
}

void play(World& world) {
    {
        Process first(world);
        for (const std::int32_t number : {0, 1, 2, 3, 4, 5, 6, 0, 6, 2}) first.serve(prompt(number));
        first.close();
    }
    Process again(world), beside(world);
    for (const std::int32_t number : {5, 7}) again.serve(prompt(number));
    for (const std::int32_t number : {7, 8, 5, 3}) beside.serve(prompt(number));
    beside.kill();
    again.serve(prompt(8));
    again.close();
}

// Two processes at once, configured with different limits: the smaller one rules while both live.
void play_two_limits(World& world) {
    world.cap_bytes = kLess;
    Process less(world);
    less.serve(prompt(0));
    world.cap_bytes = kCap;
    Process more(world);
    for (const std::int32_t number : {1, 2, 3, 0}) more.serve(prompt(number));
    less.serve(prompt(4));
    for (const std::int32_t number : {5, 6, 4}) more.serve(prompt(number));
    if (less.alive()) CHECK(world.medium->peak_bytes() <= kLess);
    less.kill();
    for (const std::int32_t number : {7, 8, 0, 1}) more.serve(prompt(number));
    more.close();
}

// The disk is well again: what was acknowledged is there, what is there is exact, and what is published next survives.
void check_well(World& world, bool all_kept) {
    world.medium->set_faults({});
    world.delay = World::Delay::none;
    const auto acknowledged = world.acknowledged;
    {
        Process heir(world);
        REQUIRE_MESSAGE(heir.alive(), heir.error());
        std::size_t found = 0;
        for (const auto& key : acknowledged) found += heir.knows(Key{key});
        if (all_kept) CHECK(found == acknowledged.size());
        for (std::uint32_t number = 0; number < kPrompts; ++number) heir.serve(prompt(std::int32_t(number)));
        heir.serve(prompt(50));
        heir.pass(3);  // what was left alone for a while is tried again
        heir.serve(prompt(50));
        heir.close();
    }
    Process last(world);
    REQUIRE_MESSAGE(last.alive(), last.error());
    CHECK(last.serve(prompt(50)) == 3);
    last.close();
    CHECK(world.medium->peak_bytes() <= kCap);
}

struct Counts {
    std::uint64_t calls = 0;       // of the file system
    std::uint64_t operations = 0;  // of shelves
};

using Scenario = void (*)(World&);
constexpr Scenario kScenarios[] = {play, play_two_limits};

Counts without_trouble(Scenario scenario) {
    World world = world_on(1);
    world.medium->set_faults({});
    scenario(world);
    const Counts counts{world.medium->operations(), world.operations};
    CHECK(world.evicted > 3);
    CHECK(world.loaded > 3);
    CHECK(world.acknowledged.size() > 10);
    check_well(world, true);
    return counts;
}

}  // namespace

TEST_CASE("driver sweep: each call of the file system fails or is cut short, once or from there on") {
    for (const Scenario scenario : kScenarios) {
        const std::uint64_t calls = without_trouble(scenario).calls;
        CHECK(calls > 150);
        for (const int error : {EIO, ENOSPC, EROFS}) {
            for (const bool and_after : {false, true}) {
                for (const bool shorten : {false, true}) {
                    if (shorten && error != EIO) continue;
                    for (std::uint64_t n = 1; n <= calls; ++n) {
                        CAPTURE(n);
                        CAPTURE(error);
                        CAPTURE(and_after);
                        CAPTURE(shorten);
                        World world = world_on(n);
                        world.medium->set_faults({.fail_at = n, .and_after = and_after, .error = error, .shorten = shorten});
                        scenario(world);
                        check_well(world, true);
                    }
                }
            }
        }
    }
}

TEST_CASE("driver sweep: the power goes at each call; sectors are lost, old or torn") {
    for (const Scenario scenario : kScenarios) {
        const std::uint64_t calls = without_trouble(scenario).calls;
        for (std::uint64_t n = 1; n <= calls; ++n) {
            for (std::uint64_t seed = 0; seed < 3; ++seed) {
                CAPTURE(n);
                CAPTURE(seed);
                World world = world_on(n);
                world.medium->set_faults({.fail_at = n, .and_after = true});
                scenario(world);
                world.medium->crash(n * 1000 + seed);
                check_well(world, false);
            }
        }
    }
}

TEST_CASE("driver sweep: each operation is answered late, happens late, or hangs until its process has ended") {
    for (const Scenario scenario : kScenarios) {
        const std::uint64_t operations = without_trouble(scenario).operations;
        CHECK(operations > 30);
        for (const World::Delay delay : {World::Delay::answer, World::Delay::effect, World::Delay::end}) {
            for (std::uint64_t n = 1; n <= operations; ++n) {
                CAPTURE(n);
                CAPTURE(int(delay));
                World world = world_on(n);
                world.delay = delay;
                world.delayed = n;
                scenario(world);
                check_well(world, true);
            }
        }
    }
}
