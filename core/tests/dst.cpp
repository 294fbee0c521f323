// Deterministic simulation, seed after seed. KVSTRATA_SEEDS=N runs N of them, KVSTRATA_SEED=S runs one again.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "simulation.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

void run_seed(std::uint64_t seed, Tally& total) {
    CAPTURE(seed);
    Simulation simulation(seed);
    try {
        simulation.run();
    } catch (const std::exception& broken) {
        FAIL("seed " << seed << " at " << simulation.now() << " s, step " << simulation.tally().steps << ": "
                     << std::string(broken.what()) << "\nagain: KVSTRATA_SEED=" << seed << " core_tests -tc='simulation*'");
    }
    total.add(simulation.tally());
}

}  // namespace

TEST_CASE("simulation: a seed says everything that happens") {
    for (const std::uint64_t seed : {3, 17, 64}) {
        std::array<Tally, 2> runs;
        std::array<double, 2> ends{};
        for (int i = 0; i < 2; ++i) {
            Simulation simulation(seed);
            simulation.run();
            runs[i] = simulation.tally();
            ends[i] = simulation.now();
        }
        CHECK(runs[0].steps == runs[1].steps);
        CHECK(runs[0].leases == runs[1].leases);
        CHECK(std::ranges::equal(runs[0].hits, runs[1].hits));
        CHECK(std::ranges::equal(runs[0].evicted, runs[1].evicted));
        CHECK(std::memcmp(&runs[0].driver, &runs[1].driver, sizeof(DriverCounters)) == 0);
        CHECK(ends[0] == ends[1]);
    }
}

TEST_CASE("simulation: every promise holds, whatever the seed") {
    Tally total;
    if (const std::uint64_t seed = number_from("KVSTRATA_SEED", 0); seed != 0) return run_seed(seed, total);
    const std::uint64_t seeds = number_from("KVSTRATA_SEEDS", 100);
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) run_seed(seed, total);
    if (seeds < 100) return;

    // A simulation that never gets there proves nothing.
    for (const std::uint64_t hits : total.hits) CHECK(hits > 100);
    for (const std::uint64_t evicted : total.evicted) CHECK(evicted > 100);
    for (const std::uint64_t ends : {total.kills, total.crashes, total.closes}) CHECK(ends > 10);
    CHECK(total.found > 100);
    CHECK(total.vanished > 10);
    CHECK(total.rebuilt > 10);
    CHECK(total.full > 0);
    CHECK(total.never > 0);
    CHECK(total.shortened > 10);
    CHECK(total.cancelled > 10);
    CHECK(total.saved > 100);
    const DriverCounters& driver = total.driver;
    for (const std::uint64_t count :
         {driver.corrupt, driver.unreadable, driver.timeouts, driver.copy_failures, driver.saves_dropped, driver.spills_dropped,
          driver.duplicates, driver.late_completions, driver.ups, driver.downs})
        CHECK(count > 0);
    MESSAGE(seeds << " seeds, " << total.steps << " steps, " << total.leases << " leases");
}
