// A purge and what goes on beside it: segments that are made, others that wait, a process that opens.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <functional>
#include <thread>

#include "../directory.hpp"
#include "../disk_sim.hpp"
#include "../driver.hpp"
#include "../io_pool.hpp"
#include "../purge.hpp"
#include "../runtime.hpp"
#include "fingerprint.hpp"
#include "hooked_disk.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kCap = 1 << 20;
// The first slot of each was never used: the purge opens the file to change it at the first that was.
constexpr std::ptrdiff_t kSecond = 8192 + 8192, kSecondOfOurs = 8192 + kSlotBytes;

// Of the test's own threads.
void wait_for(const std::atomic<bool>& flag) {
    for (int i = 0; i < 30000 && !flag; ++i) std::this_thread::sleep_for(milliseconds{1});
    REQUIRE(flag.load());
}

}  // namespace

TEST_CASE("purge: nothing is written into the segment that a grow makes in the place of one that is looked at") {
    const auto medium = SimMedium::make(1);
    ShelfConfig other = shelf_config(kCap);
    other.row_bytes = 3000;
    other.row_stride = 4096;
    other.planes = {{0, 3000}};
    {
        Writer before(medium->attach(), other);
        while (before.grow() == OpStatus::ok) {
        }
    }
    // Slots that held pages once (evicted: free records, headers still there).
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs"))
            medium->edit(path, [](auto& bytes) { std::fill(bytes.begin() + kSecond, bytes.end(), std::byte{0x5a}); });
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer writer(hooks, shelf_config(kCap));
    REQUIRE(writer.shelf->stats().other_segments > 0);
    std::atomic<bool> taken{false}, opened{false}, grown{false}, begin{false};
    hooks->on_remove = [&](const std::string&) {
        taken = true;                                                                           // grow has it; it is in no list
        for (int i = 0; i < 300 && !opened; ++i) std::this_thread::sleep_for(milliseconds{1});  // the purge may come to it, or wait
    };
    struct Claims : ShelfClaims {
        bool claim(SlotRef, const Key*) override { return false; }  // our driver grants nothing at all
        void done(SlotRef) override {}
        void retired(std::uint32_t) override {}
        bool over() const override {  // asked in front of each segment and after each slot
            const int now = asked++;
            if (now == 1) {  // in front of the first segment (the first call is finish_rebuilding's or the loop's)
            }
            if (step) step(now);
            return false;
        }
        mutable std::atomic<int> asked{0};
        std::function<void(int)> step;
    } claims;
    claims.step = [&](int now) {
        if (now == 0) {
            begin = true;
            wait_for(taken);
        } else if (now == 3) {  // 0: changes, 1: owner, 2: seg-000001, 3: its first slot was looked at
            opened = true;
            wait_for(grown);  // the thread loses the processor
        }
    };
    PurgeReport report;
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::spaces;
    order.keys.insert(key_of(0x77));  // nobody's
    std::thread purger([&] { writer.shelf->purge(order, claims, report); });
    wait_for(begin);
    REQUIRE(writer.grow() == OpStatus::ok);
    std::uint32_t number = 0;
    const std::vector<SlotRef> slots = writer.empty;
    for (const SlotRef slot : slots) REQUIRE(writer.write(slot, FingerprintPage(number++)) == OpStatus::ok);  // acknowledged
    grown = true;
    purger.join();
    number = 0;
    int lost = 0;
    for (const SlotRef slot : slots) lost += writer.read(slot, FingerprintPage(number++)) != OpStatus::ok;
    CHECK(lost == 0);
}

TEST_CASE("purge: nor into one that a grow formats anew") {
    const auto medium = SimMedium::make(1);
    ShelfConfig other = shelf_config(kCap);
    other.planes = {{0, 3000}, {3000, 3000}};  // same row, other planes: same size of segments
    {
        Writer before(medium->attach(), other);
        while (before.grow() == OpStatus::ok) {
        }
    }
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs"))
            medium->edit(path, [](auto& bytes) { std::fill(bytes.begin() + kSecondOfOurs, bytes.end(), std::byte{0x5a}); });
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer writer(hooks, shelf_config(kCap));
    REQUIRE(writer.shelf->stats().other_segments > 0);
    std::atomic<bool> taken{false}, opened{false}, grown{false}, begin{false};
    struct Claims : ShelfClaims {
        bool claim(SlotRef, const Key*) override { return false; }
        void done(SlotRef) override {}
        void retired(std::uint32_t) override {}
        bool over() const override {
            step(asked++);
            return false;
        }
        mutable std::atomic<int> asked{0};
        std::function<void(int)> step;
    } claims;
    claims.step = [&](int now) {
        if (now == 0) {
            begin = true;
            wait_for(taken);
        } else if (now == 3) {  // 0: changes, 1: owner, 2: seg-000001, 3: its first slot was looked at
            opened = true;
            wait_for(grown);
        }
    };
    PurgeReport report;
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::spaces;
    order.keys.insert(key_of(0x77));
    std::thread purger([&] { writer.shelf->purge(order, claims, report); });
    wait_for(begin);
    hooks->on_allocate = [&] {  // grow's format(): before its first write
        taken = true;
        for (int i = 0; i < 300 && !opened; ++i) std::this_thread::sleep_for(milliseconds{1});
    };
    REQUIRE(writer.grow() == OpStatus::ok);
    std::uint32_t number = 0;
    const std::vector<SlotRef> slots = writer.empty;
    for (const SlotRef slot : slots) REQUIRE(writer.write(slot, FingerprintPage(number++)) == OpStatus::ok);
    grown = true;
    purger.join();
    number = 0;
    int lost = 0;
    for (const SlotRef slot : slots) lost += writer.read(slot, FingerprintPage(number++)) != OpStatus::ok;
    CHECK(lost == 0);
}

TEST_CASE("purge: what is asked of a process that opens is carried out") {
    const auto medium = SimMedium::make(1);
    {
        Writer dead(medium->attach(), shelf_config(kCap));
        REQUIRE(dead.grow() == OpStatus::ok);
        for (std::uint32_t i = 0; i < 4; ++i) REQUIRE(dead.write(dead.empty[i], FingerprintPage(i)) == OpStatus::ok);
    }
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    std::thread purger;
    PurgeReport report;
    std::atomic<bool> started{false}, heard{false};
    hooks->on_open = [&](const std::string& path, OpenMode) {
        if (!path.ends_with(".kvs") || started.exchange(true)) return 0;  // it reads its tables, which may take seconds
        purger = std::thread([&] {
            report = purge(
                medium->attach(), {}, [&](auto, auto) { return !heard; }, {}, std::chrono::seconds{30});
        });
        std::this_thread::sleep_for(milliseconds{300});
        return 0;
    };
    std::string error;
    std::shared_ptr<Shelf> shelf = Shelf::open(hooks, shelf_config(kCap), error);
    REQUIRE(shelf);
    Driver driver({.ledger = {.page_size = kPageSize, .gpu_rows = 0, .cpu_rows = 4}, .disk = true}, make_lru());
    driver.step(1, {});
    adopt(driver, *shelf);  // as Runtime::open
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds{30};
         !heard && std::chrono::steady_clock::now() < end;) {
        bool now = shelf->poll().purge.id != 0;
        while (shelf->has_news()) now |= shelf->next_news().purge.id != 0;
        heard = now;
        std::this_thread::sleep_for(milliseconds{10});
    }
    purger.join();
    CHECK(heard);
}

TEST_CASE("purge: nobody spins while it rebuilds") {
    const auto medium = SimMedium::make(1);
    {
        Writer before(medium->attach(), shelf_config(kCap));
        fill(before, 0);
    }
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs")) medium->edit(path, [](auto& bytes) { std::fill_n(bytes.begin() + 4096, 4096, std::byte{0}); });
    static thread_local bool purging = false;
    static std::atomic<bool> go_on{false}, there{false};
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    std::string error;
    std::shared_ptr<Shelf> shelf = Shelf::open(hooks, shelf_config(kCap), error);
    REQUIRE(shelf->has_news());
    hooks->on_read = [&] {  // a disk that is slow to answer
        if (!purging) return;
        there = true;
        while (!go_on) std::this_thread::sleep_for(milliseconds{20});
    };
    struct Claims : ShelfClaims {
        bool claim(SlotRef, const Key*) override { return false; }
        void done(SlotRef) override {}
        void retired(std::uint32_t) override {}
    } claims;
    PurgeReport report;
    std::thread purger([&] {
        purging = true;
        shelf->purge({}, claims, report);
    });
    wait_for(there);
    std::shared_ptr<Slab> slab = Slab::make({.rows = 16, .row_stride = kRowStride}, error);
    IoPool pool(
        shelf, slab, {.threads = 2}, [](std::span<Completion>) {}, [](ShelfNews&&) {});
    double cpu = 1;  // of a second; the least of several spans, since starting costs something too
    for (int span = 0; span < 5; ++span) {
        const std::clock_t before = std::clock();
        const auto began = std::chrono::steady_clock::now();
        std::this_thread::sleep_for(milliseconds{200});
        const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - began;
        cpu = std::min(cpu, double(std::clock() - before) / CLOCKS_PER_SEC / wall.count());
    }
    go_on = true;
    purger.join();
    pool.close(milliseconds{1000});
    CHECK(cpu < 0.5);  // a thread that spins takes all of every span
}

TEST_CASE("purge: a lowered limit is acknowledged while it rebuilds") {
    const auto medium = SimMedium::make(1);
    constexpr std::uint64_t cap = 32 << 20;
    {
        Writer before(medium->attach(), shelf_config(cap));
        fill(before, 0);
    }
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs")) medium->edit(path, [](auto& bytes) { std::fill_n(bytes.begin() + 4096, 4096, std::byte{0}); });
    static thread_local bool purging = false;
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer owner(hooks, shelf_config(cap));
    hooks->on_read = [&] {
        if (purging) std::this_thread::sleep_for(milliseconds{20});  // as a whole it would take longer than the other waits
    };
    struct Claims : ShelfClaims {
        bool claim(SlotRef, const Key*) override { return false; }
        void done(SlotRef) override {}
        bool over() const override { return stop; }
        void retired(std::uint32_t) override {}
        std::atomic<bool> stop{false};
    } claims;
    PurgeReport report;
    std::thread purger([&] {
        purging = true;
        owner.shelf->purge({}, claims, report);
    });
    std::this_thread::sleep_for(milliseconds{100});
    std::atomic<bool> over{false};
    std::thread poller([&] {
        while (!over) {
            owner.shelf->poll();
            std::this_thread::sleep_for(milliseconds{250});
        }
    });
    ShelfConfig lower = shelf_config(cap / 2);
    lower.seed = 9;
    lower.await_others = std::chrono::seconds{30};
    Writer second(medium->attach(), lower);
    const std::uint64_t unacknowledged = second.shelf->stats().unacknowledged;
    over = true;
    claims.stop = true;
    poller.join();
    purger.join();
    CHECK(unacknowledged == 0);
}

TEST_CASE("purge: no answer is waited for where nothing was asked") {
    const auto medium = SimMedium::make(1);
    std::uint64_t cap = 32 << 20;
    {
        Writer writer(medium->attach(), shelf_config(cap));
        fill(writer, 0);
        writer.shelf->close();
    }
    cap = medium->allocated_bytes() + Directory::kSlackBytes;
    Writer owner(medium->attach(), shelf_config(cap));
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::prefix;
    for (const FoundPage& page : owner.found) order.keys.insert(page.key);
    const auto began = std::chrono::steady_clock::now();
    const PurgeReport report = purge(medium->attach(), order, {}, {}, milliseconds{30000});
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    CHECK(report.failures == 1);
    CHECK(report.where == PurgeRequest::kPath);
    CHECK(took < 15);
}
