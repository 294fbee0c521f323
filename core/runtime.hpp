// The driver in a running process: one lock round it, the I/O threads, a clock, a timer for deadlines, and people who wait.
//
// Every call takes the lock for the time of a decision, never for I/O. Completions step the driver on the I/O threads, so moves progress
// without further calls. Device copies are handed out by take_copies() to whoever drives the device and reported back by copied().
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "driver.hpp"
#include "io_pool.hpp"
#include "shelf.hpp"
#include "slab.hpp"

namespace kvstrata {

// Tells a new driver what the shelf holds: its pages, the least recently used first, and its empty slots. How many slots that is.
std::size_t adopt(Driver& driver, Shelf& shelf);
// Tells it what the shelf learnt since.
void hear(Driver& driver, const Shelf& shelf, const ShelfNews& news);

struct RuntimeConfig {
    DriverConfig driver;
    std::uint64_t row_stride = 4096;
    bool shared_slab = false;  // a memfd that worker processes can map
    bool poison = false;       // tests: freed slab rows are overwritten at once
    std::string disk_path;     // empty: no disk tier
    bool disk_group = false;   // its group shares it
    ShelfConfig shelf;
    unsigned io_threads = 4;
    double look_every = 5;  // seconds, at the shelf's files
};

class Runtime {
   public:
    // nullptr and one sentence in `error`. May block while the disk tier opens, bounded.
    static std::unique_ptr<Runtime> open(RuntimeConfig config, std::string& error);
    ~Runtime();
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    // Runs a decision of the driver under the lock and starts what follows from it.
    template <class F>
    auto decide(F&& decision) {
        std::unique_lock lock(state_->mutex);
        if constexpr (std::is_void_v<decltype(decision(state_->driver, now()))>) {
            decision(state_->driver, now());
            advance(*state_, lock, {});
        } else {
            auto answer = decision(state_->driver, now());
            advance(*state_, lock, {});
            return answer;
        }
    }
    // Reads the driver under the lock.
    template <class F>
    auto look(F&& reading) const {
        std::lock_guard lock(state_->mutex);
        return reading(static_cast<const Driver&>(state_->driver));
    }

    // Until `done` (asked under the lock after everything that happens) or `seconds` have passed; infinity waits for ever.
    bool wait(const std::function<bool(const Driver&)>& done, double seconds);
    // At least one batch, or none when `seconds` have passed or the runtime is closing.
    std::vector<CopyBatch> take_copies(double seconds);

    Slab* slab() const { return slab_.get(); }  // nullptr without a cpu tier
    Shelf* shelf() const { return shelf_.get(); }
    IoStats io_stats() const { return pool_ ? pool_->stats() : IoStats{}; }
    std::uint64_t adopted_pages() const { return adopted_pages_; }
    // Drops what the order names, in memory and from the shelves of this process, after what is moving has settled (`seconds` at most).
    // Blocks; does file I/O on the calling thread.
    MemoryDrops purge(const PurgeOrder& order, double seconds, PurgeReport& report);
    // Until the health of the disk tier has changed more often than `seen` times, or `seconds` have passed, or the runtime is closing.
    void wait_health(std::uint64_t seen, double seconds);
    bool closed() const;
    // Waits for what is moving, at most `seconds`, then ends threads, abandoning those that are stuck. True: everything was saved.
    bool close(double seconds);

   private:
    struct State {
        explicit State(const DriverConfig& config) : driver(config, make_lru()) {}
        std::mutex mutex;
        std::condition_variable changed;  // something finished
        std::condition_variable copies_ready;
        std::condition_variable timer;
        std::condition_variable health;
        Driver driver;
        std::vector<CopyBatch> copies;
        std::weak_ptr<IoPool> pool;
        std::shared_ptr<Slab> slab;
        bool poison = false;
        bool closed = false;
        double alarm = 0;  // when the timer thread will wake
        double look_every = 0;
        double look_at = 0;  // when the shelf looks after its files next
        double poll_at = 0;  // when it looks what other processes do
    };

    explicit Runtime(const RuntimeConfig& config) : state_(std::make_shared<State>(config.driver)) {}
    static double now();
    static MemoryDrops purge_now(State& state, Shelf* shelf, const PurgeOrder& order, double seconds, PurgeReport& report);
    static void carry_out(State& state, Shelf& shelf, const PurgeRequest& request);
    static void advance(State& state, std::unique_lock<std::mutex>& lock, std::span<Completion> done);
    void run_timer();

    std::shared_ptr<State> state_;
    std::shared_ptr<Slab> slab_;
    std::shared_ptr<Shelf> shelf_;
    std::shared_ptr<IoPool> pool_;
    std::uint64_t adopted_pages_ = 0;
    std::thread timer_;
};

}  // namespace kvstrata
