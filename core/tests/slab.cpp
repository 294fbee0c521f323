#include "../slab.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "../prefault.hpp"

using namespace kvstrata;

TEST_CASE("slab: rows are aligned, apart from each other and writable") {
    std::string error;
    const auto slab = Slab::make({.rows = 5, .row_stride = 12288}, error);
    REQUIRE(slab);
    for (Row i = 0; i < 5; ++i) {
        CHECK(reinterpret_cast<std::uintptr_t>(slab->row(i)) % 4096 == 0);
        std::memset(slab->row(i), i + 1, slab->row_stride());
    }
    for (Row i = 0; i < 5; ++i) {
        CHECK(slab->row(i)[0] == std::byte(i + 1));
        CHECK(slab->row(i)[12287] == std::byte(i + 1));
    }
    slab->poison(2);
    CHECK(slab->row(2)[12287] == Slab::kPoison);
    CHECK(slab->row(3)[0] == std::byte{4});
}

TEST_CASE("slab: more memory than exists is a sentence, not a crash") {
    std::string error;
    CHECK_FALSE(Slab::make({.rows = 0x7fffffff, .row_stride = 1ull << 40}, error));
    CHECK(error.find("cpu_memory_size_GB") != std::string::npos);
    CHECK_FALSE(Slab::make({.rows = 1u << 20, .row_stride = 1ull << 30, .shared = true}, error));
    CHECK_FALSE(Slab::make({.rows = 4, .row_stride = 1000}, error));
}

TEST_CASE("C9: filled in chunks of whole rows, in the background, keeping what is there") {
    std::string error;
    const auto slab = Slab::make({.rows = 10, .row_stride = 12288, .chunk_bytes = 40000}, error);
    REQUIRE(slab);
    CHECK(slab->chunk_bytes() == 36864);
    slab->row(9)[5] = std::byte{77};
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::pair<std::byte*, std::size_t>> chunks;
    slab->start_prefault([&](std::byte* chunk, std::size_t bytes) {
        const std::lock_guard lock(mutex);
        chunks.emplace_back(chunk, bytes);
        changed.notify_all();
    });
    std::unique_lock lock(mutex);
    REQUIRE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return chunks.size() == 4; }));
    CHECK(chunks[0].first == slab->base());
    CHECK(chunks[3].second == 12288);
    CHECK(slab->prefaulted_bytes() == slab->bytes());
    CHECK(slab->row(9)[5] == std::byte{77});
}

TEST_CASE("C9: a stop waits for one chunk only") {
    std::string error;
    const auto slab = Slab::make({.rows = 1000, .row_stride = 4096, .chunk_bytes = 4096}, error);
    REQUIRE(slab);
    std::mutex mutex;
    std::condition_variable changed;
    bool arrived = false, go_on = false;
    slab->start_prefault([&](std::byte*, std::size_t) {
        std::unique_lock lock(mutex);
        arrived = true;
        changed.notify_all();
        changed.wait(lock, [&] { return go_on; });
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return arrived; });
    std::thread stopper([&] { slab->stop_prefault(); });
    go_on = true;
    changed.notify_all();
    lock.unlock();
    stopper.join();
    const std::size_t filled = slab->prefaulted_bytes();
    CHECK(filled >= 4096);
    slab->stop_prefault();
    CHECK(slab->prefaulted_bytes() == filled);
}

TEST_CASE("prefault: memory that begins within a page, and is in use already") {
    std::vector<std::byte> memory(64 << 10, std::byte{0});
    memory[100] = std::byte{1};
    memory.back() = std::byte{2};
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t filled = 0;
    Prefault prefault(memory.data() + 100, memory.size() - 100, 10000, [&](std::byte*, std::size_t bytes) {
        const std::lock_guard lock(mutex);
        filled += bytes;
        changed.notify_all();
    });
    std::unique_lock lock(mutex);
    REQUIRE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return filled == memory.size() - 100; }));
    CHECK(prefault.filled_bytes() == filled);
    CHECK(memory[100] == std::byte{1});
    CHECK(memory.back() == std::byte{2});
}

TEST_CASE("slab: a shared one can be mapped a second time") {
    std::string error;
    const auto slab = Slab::make({.rows = 3, .row_stride = 4096, .shared = true}, error);
    REQUIRE(slab);
    void* again = mmap(nullptr, slab->bytes(), PROT_READ, MAP_SHARED, slab->fd(), 0);
    REQUIRE(again != MAP_FAILED);
    slab->row(2)[1] = std::byte{42};
    CHECK(static_cast<std::byte*>(again)[2 * 4096 + 1] == std::byte{42});
    munmap(again, slab->bytes());
}
