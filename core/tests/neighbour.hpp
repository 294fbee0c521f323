// A process among others on one directory: a shelf, the driver that hears of it, and its operations run at once on the test's thread. Pages
// have eight tokens and are named by a number; prompts are lists of numbers.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../disk_sim.hpp"
#include "../runtime.hpp"
#include "fingerprint.hpp"

namespace kvstrata::testing {

class Resident {
   public:
    explicit Resident(const std::shared_ptr<SimMedium>& medium, std::uint64_t cap = 1 << 20, std::uint64_t seed = 7,
                      std::chrono::milliseconds await_others = std::chrono::seconds{1})
        : disk(medium->attach()), driver(configure(), make_lru()) {
        ShelfConfig config = shelf_config(cap);
        config.seed = seed;
        config.await_others = await_others;
        std::string error;
        slab = Slab::make({.rows = kRows, .row_stride = kRowStride}, error);
        REQUIRE_MESSAGE(slab, error);
        shelf = Shelf::open(disk, config, error);
        REQUIRE_MESSAGE(shelf, error);
        driver.step(now, {});
        adopt(driver, *shelf);
        step();
    }
    ~Resident() {
        if (shelf) check();
    }
    // Dies without a word.
    void kill() {
        disk->kill();
        shelf.reset();
    }
    // Looks what the others did, as often as it takes to look at everything.
    void poll() {
        for (int i = 0; i < 4; ++i) {
            hear(driver, *shelf, shelf->poll());
            while (shelf->has_news()) hear(driver, *shelf, shelf->next_news());
            step();
        }
    }

    // A request for these pages: what it found in cache, before it computed the rest and published all.
    std::uint32_t serve(const std::vector<std::int32_t>& numbers, bool read = true) {
        std::vector<std::int32_t> tokens;
        for (const std::int32_t number : numbers)
            for (std::uint32_t i = 0; i < kPageSize; ++i) tokens.push_back(number * 100 + std::int32_t(i));
        const LeaseRequest request{.space = space, .tokens = tokens, .media = {}, .leave = 0, .read = read};
        const LeaseId id = driver.lease(now, request).id;
        step();
        REQUIRE(driver.find(id)->settled);
        const std::uint32_t hit = driver.find(id)->hit;
        for (std::uint32_t i = 0; i < hit; ++i) CHECK(right(driver.find(id)->path[i]));
        std::vector<Row> blocks(numbers.size());
        driver.save(now, id, 0, blocks, 0);
        step();
        driver.release(now, id, 0);
        step();
        return hit;
    }
    // Other requests push everything out of the slab.
    void forget_memory() {
        for (std::uint32_t i = 0; i < kRows; ++i) {
            const Row row = driver.ledger().take_row(Tier::cpu);
            REQUIRE(row != kNoRow);
            rows.push_back(row);
        }
        for (const Row row : rows) driver.ledger().give_row(Tier::cpu, row);
        rows.clear();
    }
    std::uint32_t own() const { return driver.ledger().resident(Tier::disk); }
    std::uint32_t shared() const { return driver.ledger().shared(); }
    std::uint64_t writes() const { return driver.counters().writes; }
    ShelfStats stats() const { return shelf->stats(); }

    void step() {
        std::vector<Completion> done = std::exchange(done_, {});
        do {
            Submissions next = driver.step(now, done);
            done.clear();
            for (const Op& op : next.ops) {
                if (hold(op))
                    held.push_back(op);
                else
                    done.push_back(run(op));
            }
            for (const CopyBatch& copy : next.copies) {
                if (!copy.up)
                    for (const Row row : copy.slab) fill(row);
                driver.copied(now, copy.ticket, true);
            }
            if (done.empty() && next.copies.empty()) break;
        } while (true);
        check();
    }
    void check() const {
        std::string fault;
        CHECK_MESSAGE(driver.check_integrity(fault), fault);
    }

    static constexpr std::uint32_t kRows = 16;
    Key space = key_of(0x11);
    double now = 100;
    std::shared_ptr<SimDisk> disk;
    std::shared_ptr<Slab> slab;
    std::unique_ptr<Shelf> shelf;
    Driver driver;
    std::vector<Op> held;  // operations that were started and are not to happen yet
    std::function<bool(const Op&)> hold = [](const Op&) { return false; };

    Completion run(const Op& op) { return shelf->execute(op, op.row == kNoRow ? nullptr : slab->row(op.row)); }
    void finish_held() {
        hold = [](const Op&) { return false; };
        for (const Op& op : std::exchange(held, {})) done_.push_back(run(op));
        step();
    }

   private:
    static DriverConfig configure() {
        DriverConfig config;
        config.ledger = {.page_size = kPageSize, .gpu_rows = 0, .cpu_rows = kRows};
        config.disk = true;
        return config;
    }
    PageId page_in(Row row) const {
        const Forest& forest = driver.ledger().forest();
        for (PageId page = 0; page < forest.id_bound(); ++page)
            if (forest.at(page).alive && forest.at(page).row[1] == row) return page;
        return kNoPage;
    }
    void bytes_of(PageId page, std::byte* row) const {
        std::uint64_t state = driver.ledger().forest().at(page).key.prefix() | 1;
        for (std::uint64_t i = 0; i < kRowBytes; ++i)
            row[i] = std::byte((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 56);
    }
    void fill(Row row) { bytes_of(page_in(row), slab->row(row)); }
    bool right(PageId page) const {
        std::vector<std::byte> expected(kRowBytes);
        bytes_of(page, expected.data());
        return std::memcmp(expected.data(), slab->row(driver.ledger().forest().at(page).row[1]), kRowBytes) == 0;
    }

    std::vector<Row> rows;
    std::vector<Completion> done_;
};

}  // namespace kvstrata::testing
