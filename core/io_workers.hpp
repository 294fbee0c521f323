// What the threads of an IoPool share, and what each of them does. Private to io_pool.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <thread>

#include "io_pool.hpp"
#include "op_queue.hpp"
#include "ring.hpp"

namespace kvstrata {

struct IoWorkers : std::enable_shared_from_this<IoWorkers> {
    using Clock = std::chrono::steady_clock;

    struct Worker {
        std::thread thread;
        bool alive = false;
        bool busy = false;  // in an operation, since:
        Clock::time_point since;
    };
    struct Flight {  // a request that the kernel has
        std::unique_ptr<SlotRun> run;
        Clock::time_point since;
    };
    struct Landed {
        std::unique_ptr<SlotRun> run;
        std::int64_t moved;
    };

    IoWorkers(std::shared_ptr<Shelf> the_shelf, std::shared_ptr<Slab> the_slab, const IoPoolConfig& the_config,
              IoPool::Sink the_sink, IoPool::NewsSink the_news);
    void start();

    // The threads: workers, one that waits for the ring, one that watches for workers that hang.
    void work(std::size_t self);
    void reap();
    void watch();

    // Everything below: called with `mutex` held, which `lock` is; given up while something is done.
    void hire(std::size_t count);
    void stand_in();
    bool may_start() const;
    bool may_write() const;
    bool chore_waits() const;
    bool poll_waits() const { return poll_wanted && news && !draining && !chore_running; }
    bool work_waits() const;
    bool idle() const { return reads.empty() && others.empty() && running == 0 && flights.empty() && landed.empty(); }
    std::size_t wanted() const;  // workers
    std::size_t alive() const;
    std::size_t resting() const;
    std::size_t hanging_threads() const;
    std::size_t hanging_flights() const;
    void run_ops(std::unique_lock<std::mutex>& lock, std::vector<Op> ops);
    void run_landed(std::unique_lock<std::mutex>& lock);
    void run_chore(std::unique_lock<std::mutex>& lock);
    void run_errands();  // starts the thread for them, where it does not run
    bool fly(std::unique_lock<std::mutex>& lock, std::unique_ptr<SlotRun>& run);
    void count(const SlotRun& run);
    void hand_over(std::unique_lock<std::mutex>& lock, std::vector<Completion> done);
    template <class Call>
    void tell(std::unique_lock<std::mutex>& lock, Call call);

    const std::shared_ptr<Shelf> shelf;
    const std::shared_ptr<Slab> slab;
    const IoPoolConfig config;
    const IoPool::Sink sink;
    const IoPool::NewsSink news;
    const std::unique_ptr<Ring> ring;
    std::mutex ring_mutex;  // submissions; never taken while holding `mutex`

    std::mutex mutex;
    std::condition_variable wake;     // workers: work, or the end
    std::condition_variable alarm;    // the watch: something is going on, or the end
    std::condition_variable settled;  // close(): an operation ended, a thread left
    OpQueue reads, others;
    std::list<Flight> flights;
    std::deque<Landed> landed;
    std::deque<std::function<void()>> errands;
    std::vector<Worker> workers;
    std::thread reaper, watcher, errander;
    bool reaping = false;
    unsigned writing = 0;  // requests other than reads under way, those that fly included
    unsigned writers = 0;  // workers in one
    unsigned running = 0;  // workers in an operation
    unsigned handing = 0;  // sink calls in progress
    bool look_wanted = false, poll_wanted = false, sync_wanted = false, chore_running = false, errand_running = false;
    bool draining = false;  // nothing is accepted any more
    bool over = false;      // nothing is started or handed over any more
    std::size_t flights_known_to_hang = 0;
    IoStats stats;
};

template <class Call>
void IoWorkers::tell(std::unique_lock<std::mutex>& lock, Call call) {
    if (over) return;
    ++handing;
    lock.unlock();
    try {
        call();
    } catch (...) {  // the sink's loss must not become the thread's
    }
    lock.lock();
    --handing;
    settled.notify_all();
}

}  // namespace kvstrata
