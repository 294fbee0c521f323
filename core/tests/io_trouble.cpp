// Threads that hang are stood in for; what the shelf learns in the background comes as news.
#include <doctest/doctest.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "../disk_sim.hpp"
#include "hooked_disk.hpp"
#include "io_bench.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

// A pool over a disk on which reads of some slots hang until the gate is opened.
struct HangingBench {
    explicit HangingBench(IoPoolConfig config) {
        config.hangs_after = milliseconds{20};
        bench = std::make_unique<IoBench>(disk, config, kCap);
        for (int i = 0; i < 4; ++i) bench->grow();
        for (const OpStatus status : bench->move(OpKind::write, bench->slots, *pages)) REQUIRE(status == OpStatus::ok);
        *armed = true;
    }
    ~HangingBench() { gate->open(); }
    void read(std::size_t page) {
        bench->slab->poison(Row(20 + page));
        bench->pool->submit({bench->op(OpKind::read, bench->slots[page], Row(20 + page), &(*pages)[page])});
    }
    bool good(std::size_t page) const { return (*pages)[page].matches(bench->slab->row(Row(20 + page))); }

    std::shared_ptr<Gate> gate = std::make_shared<Gate>();
    std::shared_ptr<std::atomic<bool>> armed = std::make_shared<std::atomic<bool>>(false);
    std::shared_ptr<std::vector<FingerprintPage>> pages = std::make_shared<std::vector<FingerprintPage>>(pages_from(0, 16));
    // The first three reads of a segment's first slot hang. What hangs outlives us.
    std::shared_ptr<SimMedium> medium = SimMedium::make(1);
    std::shared_ptr<HookedDisk> disk = std::make_shared<HookedDisk>(
        medium->attach(), [on = armed, held = gate, kept = pages, seen = std::make_shared<std::atomic<int>>(0)](
                              bool write, auto parts, std::uint64_t offset) {
            if (!write && offset == 8192 && bytes_of(parts) == kSlotBytes && on->load() && seen->fetch_add(1) < 3) held->pass();
            return 0;
        });
    std::unique_ptr<IoBench> bench;
};

}  // namespace

TEST_CASE("B16: reads that hang keep no other page waiting: their threads are stood in for") {
    HangingBench hanging({.threads = 2, .spare_threads = 8});
    IoBench& bench = *hanging.bench;
    const std::size_t before = bench.inbox->size();
    for (const std::size_t page : {0, 4, 8}) {
        hanging.read(page);
        hanging.gate->await(int(page / 4 + 1));  // of two threads three hang: the third is a stand-in already
    }
    for (const std::size_t page : {1, 5, 13, 14}) hanging.read(page);
    REQUIRE(bench.inbox->wait(before + 4));
    for (const std::size_t page : {1, 5, 13, 14}) CHECK(hanging.good(page));
    CHECK(bench.inbox->size() == before + 4);
    while (bench.pool->stats().hanging < 3) std::this_thread::yield();
    CHECK(bench.pool->stats().replaced >= 2);
    hanging.gate->open();
    REQUIRE(bench.inbox->wait(before + 7));
    for (const std::size_t page : {0, 4, 8}) CHECK(hanging.good(page));
    while (bench.pool->stats().hanging > 0) std::this_thread::yield();
    CHECK(bench.pool->close(milliseconds{5000}) == 0);
}

TEST_CASE("B16: a stand-in for which there is no thread is tried again") {
    HangingBench hanging({.threads = 2, .spare_threads = 8});
    IoBench& bench = *hanging.bench;
    pthread_attr_t before, huge;
    REQUIRE(pthread_getattr_default_np(&before) == 0);
    REQUIRE(pthread_attr_init(&huge) == 0);
    REQUIRE(pthread_attr_setstacksize(&huge, std::size_t{1} << 47) == 0);  // more than the address space holds
    REQUIRE(pthread_setattr_default_np(&huge) == 0);
    for (const std::size_t page : {0, 4}) hanging.read(page);
    hanging.gate->await(2);
    std::this_thread::sleep_for(milliseconds{200});  // several attempts
    CHECK(bench.pool->stats().replaced == 0);
    REQUIRE(pthread_setattr_default_np(&before) == 0);
    pthread_attr_destroy(&huge);
    pthread_attr_destroy(&before);
    const std::size_t answered = bench.inbox->size();
    hanging.read(1);
    REQUIRE(bench.inbox->wait(answered + 1));
    CHECK(hanging.good(1));
    CHECK(bench.pool->stats().replaced > 0);
}

TEST_CASE("B16: stand-ins are bounded, and close still returns in time") {
    HangingBench hanging({.threads = 1, .spare_threads = 1});
    IoBench& bench = *hanging.bench;
    const std::size_t before = bench.inbox->size();
    for (const std::size_t page : {0, 4}) {
        hanging.read(page);
        hanging.gate->await(int(page / 4 + 1));
    }
    while (bench.pool->stats().hanging < 2) std::this_thread::yield();
    hanging.read(1);
    CHECK(bench.pool->close(milliseconds{60}) == 2);
    CHECK(bench.inbox->size() == before + 1);  // the one that waited, cancelled
    CHECK(bench.inbox->at(bench.last_id).error == ECANCELED);
}

TEST_CASE("news: damaged segments are rebuilt by the pool while others are served") {
    const auto medium = SimMedium::make(1);
    {
        IoBench bench(medium->attach(), {}, kCap);
        for (int i = 0; i < 5; ++i) bench.grow();
        for (const OpStatus status : bench.move(OpKind::write, bench.slots, pages_from(0, 20))) REQUIRE(status == OpStatus::ok);
        bench.pool->close(milliseconds{1000});
    }
    for (const std::string& path : medium->files()) {
        if (path.find("seg-000002") != std::string::npos)
            medium->edit(path, [](auto& data) { std::fill_n(data.begin(), 8192, std::byte{0}); });
        if (path.find("seg-000004") != std::string::npos)
            medium->edit(path, [](auto& data) { std::fill_n(data.begin() + 4096, 256, std::byte{7}); });
    }
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<FoundPage> found;
    IoBench bench(medium->attach(), {.threads = 2}, kCap, [&](ShelfNews&& news) {
        const std::lock_guard lock(mutex);
        CHECK(news.empty.empty());
        CHECK(news.vanished.empty());
        found.insert(found.end(), news.found.begin(), news.found.end());
        changed.notify_all();
    });
    const std::vector<FoundPage> known = bench.shelf->take_found();
    CHECK(known.size() == 14);
    {
        std::unique_lock lock(mutex);
        REQUIRE(changed.wait_for(lock, kLong, [&] { return found.size() == 6; }));
    }
    for (const FoundPage& page : found) {
        const std::vector<SlotRef> slot{page.slot};
        CHECK(bench.move(OpKind::read, slot, pages_from(page.last_use - 1, 1))[0] == OpStatus::ok);
    }
    CHECK(bench.pool->close(milliseconds{1000}) == 0);
}

TEST_CASE("news: files that are gone are noticed when the pool looks") {
    const auto medium = SimMedium::make(1);
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::uint32_t> vanished;
    IoBench bench(medium->attach(), {}, kCap, [&](ShelfNews&& news) {
        const std::lock_guard lock(mutex);
        vanished.insert(vanished.end(), news.vanished.begin(), news.vanished.end());
        changed.notify_all();
    });
    for (int i = 0; i < 3; ++i) bench.grow();
    for (const std::string& path : medium->files()) {
        if (path.find("seg-000002") != std::string::npos) medium->attach()->remove(path);
    }
    bench.pool->look();
    std::unique_lock lock(mutex);
    REQUIRE(changed.wait_for(lock, kLong, [&] { return !vanished.empty(); }));
    CHECK(vanished == std::vector<std::uint32_t>{1});
}
