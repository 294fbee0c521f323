// What a seed is about: sizes small enough that everything is contended, and how much goes wrong.
#include "../segment.hpp"
#include "simulation.hpp"

namespace kvstrata::testing {

Setup Setup::draw(Dice& dice) {
    Setup setup;
    DriverConfig& driver = setup.driver;
    driver.ledger.page_size = dice.pick(std::vector<std::uint32_t>{1, 2, 4, 16});
    const bool guest = dice.chance(0.3);
    driver.ledger.gpu_rows = guest ? 0 : dice.between(1, 16);
    driver.ledger.cpu_rows = guest ? dice.between(1, 12) : dice.below(11);
    driver.ledger.event_capacity = 4096;
    driver.ledger.log_freed = true;
    driver.disk = driver.ledger.cpu_rows > 0 && dice.chance(0.85);
    driver.copy_rows = dice.between(1, 4);
    driver.saves_at_once = 2 * driver.copy_rows;
    driver.reads_at_once = dice.between(1, 4);
    driver.writes_at_once = dice.between(1, 3);
    driver.read_deadline = dice.real(0.05, 0.2);
    driver.write_deadline = dice.real(0.1, 0.4);
    driver.copy_deadline = driver.engine_deadline = dice.real(0.03, 0.1);
    driver.retry_after = dice.real(0.02, 0.2);
    setup.row_bytes = dice.between(40, 200);
    setup.device_rows = guest ? 40 : driver.ledger.gpu_rows + 1;
    setup.multiple = driver.ledger.page_size * (dice.chance(0.3) ? 2 : 1);
    setup.most_pages = guest ? dice.between(1, 7) : std::min(dice.between(1, 7), driver.ledger.gpu_rows);
    setup.spaces = dice.between(1, 3);
    setup.sessions = dice.between(1, 6);
    setup.ticks = dice.between(100, 800);
    setup.lives = dice.between(1, 4);
    setup.patience = driver.read_deadline * dice.real(0.5, 4);
    // Between one and five segments of four slots, and what else lies in the directory.
    setup.disk_bytes = dice.between(1, 5) * (2 + 4 * 2) * std::uint64_t{4096} + 96 * 1024;

    const auto trouble = dice.below(4);  // none, the disk's, the device's, all
    if (trouble & 1) {
        setup.io = {.late = dice.real(0, 0.08),
                    .hang = dice.real(0, 0.04),
                    .odd = dice.real(0, 0.03),
                    .repeat = 0.05,
                    .medium = dice.chance(0.5) ? dice.real(0, 0.15) : 0};
        setup.flip = dice.real(0, 0.04);
        setup.full = dice.real(0, 0.03);
        setup.gone = dice.real(0, 0.01);
    }
    if (trouble & 2)
        setup.device = {.fail = dice.real(0, 0.2), .late = dice.real(0, 0.08), .hang = dice.real(0, 0.03), .repeat = 0.05};
    return setup;
}

void Tally::add(const Tally& other) {
    static_assert(sizeof(Tally) % sizeof(std::uint64_t) == 0);  // counters only
    std::uint64_t mine[sizeof(Tally) / sizeof(std::uint64_t)], theirs[sizeof(Tally) / sizeof(std::uint64_t)];
    std::memcpy(mine, this, sizeof mine);
    std::memcpy(theirs, &other, sizeof theirs);
    for (std::size_t i = 0; i < std::size(mine); ++i) mine[i] += theirs[i];
    std::memcpy(static_cast<void*>(this), mine, sizeof mine);
}

void Tally::add(const Driver& from) {
    Tally other;
    other.driver = from.counters();
    for (const Tier tier : {Tier::gpu, Tier::cpu, Tier::disk})
        other.evicted[static_cast<int>(tier)] = from.ledger().counters(tier).evicted;
    add(other);
}

}  // namespace kvstrata::testing
