// The driver among real threads: I/O on a real directory, a mover, and requests that come and go at once.
#include "../runtime.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "../slot.hpp"
#include "folder.hpp"
#include "prompt.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint32_t kSize = 4;  // tokens of a page
constexpr std::size_t kBytes = 5000;
constexpr std::size_t kStride = 2 * kBlockBytes;

RuntimeConfig config_on(const std::string& path) {
    RuntimeConfig config;
    config.driver.ledger = {.page_size = kSize, .gpu_rows = 14, .cpu_rows = 8, .log_freed = true};
    config.driver.copy_rows = 3;
    config.row_stride = kStride;
    config.poison = true;
    config.disk_path = path;
    config.shelf = {.page_size = kSize,
                    .row_bytes = kBytes,
                    .row_stride = kStride,
                    .planes = {{0, 2000}, {2000, 3000}},
                    .cap_bytes = 2 << 20,
                    .space = {},
                    .space_json = {},
                    .seed = 0};
    return config;
}

// A process: a runtime, a device whose rows are plain memory and whose batches are over when they return, and a thread that copies.
class Process {
   public:
    explicit Process(const std::string& path) : device(15, std::vector<std::byte>(kBytes)) {
        std::string error;
        runtime = Runtime::open(config_on(path), error);
        REQUIRE_MESSAGE(runtime, error);
        mover = std::thread([this] { move(); });
    }
    ~Process() {
        runtime->close(10);
        mover.join();
    }
    void move() {
        for (;;) {
            const std::vector<CopyBatch> batches = runtime->take_copies(1e9);
            if (batches.empty()) return;
            for (const CopyBatch& batch : batches) {
                for (std::size_t i = 0; i < batch.slab.size(); ++i) {
                    std::byte* const row = device[static_cast<std::size_t>(batch.device[i])].data();
                    std::byte* const slab = runtime->slab()->row(batch.slab[i]);
                    std::memcpy(batch.up ? row : slab, batch.up ? slab : row, kBytes);
                }
                runtime->decide([&](Driver& driver, double now) { driver.copied(now, batch.ticket, true); });
            }
        }
    }
    Lease lease(LeaseId id) const {
        return runtime->look([&](const Driver& driver) { return *driver.find(id); });
    }
    bool settled_within(LeaseId id, double seconds) {
        return runtime->wait([id](const Driver& driver) { return driver.find(id)->settled; }, seconds);
    }

    std::unique_ptr<Runtime> runtime;
    std::vector<std::vector<std::byte>> device;
    std::thread mover;
};

struct Score {
    std::atomic<int> wrong{0}, hits{0}, leases{0}, full{0};
};

// One request, from its lease to its release or to where it is given up.
void serve(Process& process, Dice& dice, Score& score) {
    const Prompt prompt = Prompt::draw(dice, kSize, 4, 2);
    const LeaseRequest request{.space = prompt.space(), .tokens = prompt.tokens(), .media = prompt.media()};
    const LeaseId id = process.runtime->decide([&](Driver& driver, double now) { return driver.lease(now, request); }).id;
    if (id == 0) {
        score.full++;
        return;
    }
    score.leases++;
    const auto give_back = [&] { process.runtime->decide([&](Driver& driver, double now) { driver.release(now, id, 0); }); };
    if (dice.chance(0.1)) return give_back();
    if (!process.settled_within(id, dice.chance(0.2) ? 0 : 5)) {
        process.runtime->decide([&](Driver& driver, double now) { driver.settle(now, id); });
        if (!process.settled_within(id, 30)) score.wrong++;
    }
    const Lease held = process.lease(id);
    if (held.rows_lost) return give_back();
    score.hits += static_cast<int>(held.hit);
    const auto good = [&](std::size_t page) {
        return process.device[static_cast<std::size_t>(held.rows[page])] == row_of(prompt.pages()[page].chain, kBytes);
    };
    for (std::uint32_t page = 0; page < held.hit; ++page) score.wrong += !good(page);
    for (std::size_t page = held.hit; page < prompt.pages().size(); ++page) {
        process.device[static_cast<std::size_t>(held.rows[page])] = row_of(prompt.pages()[page].chain, kBytes);
        process.runtime->decide([&](Driver& driver, double now) { return driver.publish(now, id, (page + 1) * kSize, 0); });
    }
    for (std::size_t page = 0; page < prompt.pages().size(); ++page) score.wrong += !good(page);
    give_back();
}

}  // namespace

TEST_CASE("runtime: what cannot be opened is a sentence") {
    const Folder folder;
    std::ofstream(folder.path + "/file") << "not a directory";
    std::string error;
    CHECK_FALSE(Runtime::open(config_on(folder.path + "/file"), error));
    CHECK(error.find(folder.path) != std::string::npos);
    RuntimeConfig config = config_on(folder.path + "/cache");
    config.shelf.cap_bytes = 1;
    error.clear();
    CHECK_FALSE(Runtime::open(config, error));
    CHECK_FALSE(error.empty());
    config = config_on("");
    config.driver.ledger.cpu_rows = 0x7fffffff;
    config.row_stride = 1ull << 40;
    error.clear();
    CHECK_FALSE(Runtime::open(config, error));
    CHECK_FALSE(error.empty());
}

TEST_CASE("runtime: requests on many threads get exact pages or none, and what was published survives the process") {
    const Folder folder;
    constexpr int kThreads = 4, kRequests = 150;
    Score score;
    {
        Process process(folder.path);
        std::vector<std::thread> threads;
        for (int number = 0; number < kThreads; ++number)
            threads.emplace_back([&, number] {
                Dice dice(static_cast<std::uint64_t>(number) + 1);
                for (int request = 0; request < kRequests; ++request) serve(process, dice, score);
            });
        for (std::thread& thread : threads) thread.join();
        CHECK(score.wrong == 0);
        CHECK(score.leases > kRequests);
        CHECK(score.hits > 0);
        CHECK(process.runtime->wait([](const Driver& driver) { return driver.idle(); }, 30));
        std::string fault;
        CHECK_MESSAGE(process.runtime->look([&](const Driver& driver) { return driver.check_integrity(fault); }), fault);
        CHECK(process.runtime->look([](const Driver& driver) { return driver.leases(); }) == 0);
        CHECK(process.runtime->look([](const Driver& driver) { return driver.counters().writes; }) > 0);
        CHECK(process.runtime->close(10));
        CHECK(process.runtime->closed());
    }
    Process heir(folder.path);
    const std::uint32_t found = heir.runtime->look([](const Driver& driver) { return driver.ledger().resident(Tier::disk); });
    CHECK(found > 0);
    Score again;
    Dice dice(99);
    for (int request = 0; request < kRequests; ++request) serve(heir, dice, again);
    CHECK(again.wrong == 0);
    CHECK(heir.runtime->look([](const Driver& driver) { return driver.counters().reads; }) > 0);
}

TEST_CASE("runtime: closing does not wait for copies that nobody makes, and says so") {
    const Folder folder;
    std::string error;
    const auto runtime = Runtime::open(config_on(folder.path), error);
    REQUIRE_MESSAGE(runtime, error);
    const std::vector<std::int32_t> tokens(kSize);
    const LeaseRequest request{.space = {}, .tokens = tokens, .media = {}};
    const LeaseId id = runtime->decide([&](Driver& driver, double now) { return driver.lease(now, request); }).id;
    runtime->decide([&](Driver& driver, double now) { return driver.publish(now, id, kSize, 0); });
    CHECK_FALSE(runtime->close(0.05));
    CHECK(runtime->close(0.05));  // closed already
    CHECK(runtime->take_copies(1e9).size() == 1);
    CHECK(runtime->take_copies(1e9).empty());
}
