#include "io_workers.hpp"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "thread_name.hpp"

namespace kvstrata {
namespace {

bool is_write(const Op& op) { return op.kind != OpKind::read; }

std::vector<Completion> all_failed(std::span<const Op> ops, int error) {
    std::vector<Completion> done;
    for (const Op& op : ops) {
        Completion completion;
        completion.id = op.id;
        completion.status = is_write(op) ? OpStatus::failed : OpStatus::unreadable;
        completion.error = error;
        done.push_back(std::move(completion));
    }
    return done;
}

// What `work` returns, or all operations failed where it threw.
template <class Work>
std::vector<Completion> guarded(std::span<const Op> ops, Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return all_failed(ops, ENOMEM);
    } catch (...) {
        return all_failed(ops, EIO);
    }
}

}  // namespace

IoWorkers::IoWorkers(std::shared_ptr<Shelf> the_shelf, std::shared_ptr<Slab> the_slab, const IoPoolConfig& the_config,
                     IoPool::Sink the_sink, IoPool::NewsSink the_news)
    : shelf(std::move(the_shelf)),
      slab(std::move(the_slab)),
      config(the_config),
      sink(std::move(the_sink)),
      news(std::move(the_news)),
      ring(the_config.ring ? Ring::open() : nullptr) {
    stats.ring = ring != nullptr;
}

void IoWorkers::start() {
    const std::lock_guard lock(mutex);
    hire(wanted());
    watcher = std::thread([state = shared_from_this()] {
        name_thread("kvstrata-watch");
        state->watch();
    });
    if (!ring) return;
    reaping = true;
    reaper = std::thread([state = shared_from_this()] {
        name_thread("kvstrata-reap");
        state->reap();
    });
}

void IoWorkers::hire(std::size_t count) {
    for (std::size_t i = 0; count > 0; ++i) {
        if (i == workers.size()) workers.emplace_back();
        Worker& worker = workers[i];
        if (worker.alive) continue;
        if (worker.thread.joinable()) worker.thread.join();  // it has left, or is about to without needing the lock
        worker.thread = std::thread([state = shared_from_this(), i] { state->work(i); });  // it waits for our lock
        worker.alive = true;
        worker.busy = false;
        pthread_setname_np(worker.thread.native_handle(), ("kvstrata-io-" + std::to_string(i)).c_str());
        --count;
    }
}

// As many as configured, beside those that hang.
std::size_t IoWorkers::wanted() const {
    return std::max(1u, config.threads) + std::min<std::size_t>(hanging_threads(), config.spare_threads);
}

std::size_t IoWorkers::alive() const { return std::size_t(std::ranges::count_if(workers, &Worker::alive)); }

std::size_t IoWorkers::resting() const {
    return std::size_t(std::ranges::count_if(workers, [](const Worker& worker) { return worker.alive && !worker.busy; }));
}

std::size_t IoWorkers::hanging_threads() const {
    const auto latest = Clock::now() - config.hangs_after;
    return std::size_t(std::ranges::count_if(
        workers, [&](const Worker& worker) { return worker.alive && worker.busy && worker.since <= latest; }));
}

std::size_t IoWorkers::hanging_flights() const {
    const auto latest = Clock::now() - config.hangs_after;
    return std::size_t(std::ranges::count_if(flights, [&](const Flight& flight) { return flight.since <= latest; }));
}

// Requests that hang do not count, as long as the ring has room.
bool IoWorkers::may_start() const {
    if (!ring) return true;
    return flights.size() < Ring::kEntries && flights.size() - flights_known_to_hang < config.requests;
}

// One worker, and one request, is kept free of writes, so that a read never waits behind all of them.
bool IoWorkers::may_write() const {
    const auto free = [](std::size_t used, std::size_t all) { return all == 1 || used + 1 < all; };
    return !others.empty() && may_start() && free(writers, alive()) &&
           (!ring || free(writing, config.requests + flights_known_to_hang));
}

bool IoWorkers::chore_waits() const {
    if (poll_waits()) return true;
    return !chore_running && reads.empty() && (sync_wanted || (!draining && (look_wanted || (news && shelf->has_news()))));
}

bool IoWorkers::work_waits() const { return !landed.empty() || (!reads.empty() && may_start()) || may_write() || chore_waits(); }

void IoWorkers::work(std::size_t self) {
    std::unique_lock lock(mutex);
    for (;;) {
        wake.wait(lock, [this] { return over || work_waits(); });
        if (over) break;
        workers[self].busy = true;
        workers[self].since = Clock::now();
        if (running++ == 0) alarm.notify_one();
        if (!landed.empty())
            run_landed(lock);
        else if (poll_waits())  // others wait for it, a second at most
            run_chore(lock);
        else if (!reads.empty() && may_start())
            run_ops(lock, reads.take(shelf->max_run()));
        else if (may_write())
            run_ops(lock, others.take(shelf->max_run()));
        else
            run_chore(lock);
        --running;
        workers[self].busy = false;
        settled.notify_all();
        if (alive() > wanted()) break;  // it had been replaced
    }
    workers[self].alive = false;
    settled.notify_all();
}

void IoWorkers::run_ops(std::unique_lock<std::mutex>& lock, std::vector<Op> ops) {
    const bool write = is_write(ops.front());
    writing += write;
    writers += write;
    lock.unlock();
    std::unique_ptr<SlotRun> run;
    bool flies = false;
    std::vector<Completion> done = guarded(ops, [&] {
        std::vector<Completion> completions;
        std::vector<std::byte*> rows;
        rows.reserve(ops.size());
        for (const Op& op : ops) rows.push_back(op.row == kNoRow ? nullptr : slab->row(op.row));
        if (ops.front().kind == OpKind::read || ops.front().kind == OpKind::write) run = shelf->begin(ops, rows);
        if (!run) {
            for (std::size_t i = 0; i < ops.size(); ++i) {
                const auto one = guarded({&ops[i], 1}, [&] { return std::vector<Completion>{shelf->execute(ops[i], rows[i])}; });
                completions.push_back(one.front());
            }
            return completions;
        }
        const int result = run->prepare();
        if (result == 0 && ring && fly(lock, run)) {
            flies = true;
            return completions;
        }
        return shelf->finish(*run, result == 0 ? run->transfer().run() : result, false);
    });
    lock.lock();
    writers -= write;
    writing -= write && !flies;
    if (write) wake.notify_one();  // another write may have waited for its turn
    if (flies) return;
    if (run) count(*run);
    hand_over(lock, std::move(done));
}

// Without the lock. True: the kernel has it, and `run` is not the caller's any more.
bool IoWorkers::fly(std::unique_lock<std::mutex>& lock, std::unique_ptr<SlotRun>& run) {
    lock.lock();
    if (over) {  // nobody waits for the ring any more
        lock.unlock();
        return false;
    }
    const SlotRun& flying = *run;
    const auto flight = flights.insert(flights.end(), {std::move(run), Clock::now()});
    lock.unlock();
    bool taken = false;
    {
        const std::lock_guard one(ring_mutex);
        taken = ring->submit(flying.transfer(), &*flight);
    }
    if (taken) return true;
    lock.lock();
    run = std::move(flight->run);
    flights.erase(flight);
    lock.unlock();
    return false;
}

void IoWorkers::reap() {
    for (;;) {
        std::int64_t moved = 0;
        const void* tag = ring->wait(moved);
        const std::lock_guard lock(mutex);
        const auto flight = std::ranges::find_if(flights, [&](const Flight& item) { return &item == tag; });
        if (flight != flights.end()) {
            landed.push_back({std::move(flight->run), moved});
            flights.erase(flight);
            flights_known_to_hang = std::min(flights_known_to_hang, flights.size());
            wake.notify_one();
        }
        if (over && flights.empty()) break;
    }
    const std::lock_guard lock(mutex);
    landed.clear();
    reaping = false;
    settled.notify_all();
}

void IoWorkers::run_landed(std::unique_lock<std::mutex>& lock) {
    const Landed next = std::move(landed.front());
    landed.pop_front();
    const bool write = next.run->writes();
    lock.unlock();
    std::vector<Completion> done = guarded(next.run->ops(), [&] { return shelf->finish(*next.run, next.moved, true); });
    lock.lock();
    writing -= write;
    wake.notify_all();  // a request became free
    count(*next.run);
    hand_over(lock, std::move(done));
}

void IoWorkers::run_chore(std::unique_lock<std::mutex>& lock) {
    const bool poll = poll_waits(), sync = !poll && sync_wanted, look = !poll && !sync && look_wanted;
    chore_running = true;
    lock.unlock();
    ShelfNews found;
    try {
        if (poll) {
            found = shelf->poll();
        } else if (sync) {
            shelf->sync();
        } else if (look) {
            shelf->check_files();
        } else {
            found = shelf->next_news();
        }
    } catch (...) {  // out of memory: tried again
    }
    lock.lock();
    chore_running = false;
    if (poll)
        poll_wanted = false;
    else if (sync)
        sync_wanted = false;
    else if (look)
        look_wanted = false;
    if (!found.nothing())
        tell(lock, [&] { news(std::move(found)); });
    else if (!poll && !sync && !look)
        wake.wait_for(lock, std::chrono::milliseconds{5});  // somebody else is at it, and may be for long
    wake.notify_one();                                      // there may be more
}

void IoWorkers::run_errands() {
    if (errand_running) return;
    if (errander.joinable()) errander.join();  // it has ended, or is about to without needing the lock
    errander = std::thread([state = shared_from_this()] {
        name_thread("kvstrata-errand");
        std::unique_lock lock(state->mutex);
        while (!state->errands.empty()) {
            std::function<void()> errand = std::move(state->errands.front());
            state->errands.pop_front();
            lock.unlock();
            try {
                errand();
                errand = {};  // with what it owns
            } catch (...) {   // its loss must not become the thread's
            }
            lock.lock();
        }
        state->errand_running = false;
        state->settled.notify_all();
    });
    errand_running = true;  // where there was a thread to be had; it waits for our lock
}

void IoWorkers::count(const SlotRun& run) {
    (run.writes() ? stats.write_requests : stats.read_requests) += run.requests();
    (run.writes() ? stats.write_pages : stats.read_pages) += run.ops().size();
    (run.writes() ? stats.write_bytes : stats.read_bytes) += run.bytes();
}

void IoWorkers::hand_over(std::unique_lock<std::mutex>& lock, std::vector<Completion> done) {
    tell(lock, [&] { sink(done); });
}

// A thread that hangs in the file system must not keep the pages of others waiting.
void IoWorkers::watch() {
    std::unique_lock lock(mutex);
    while (!over) {
        if (running == 0 && flights.empty()) {
            alarm.wait(lock);
        } else {
            alarm.wait_for(lock, config.hangs_after / 2);
            stand_in();
        }
    }
}

void IoWorkers::stand_in() {
    if (over) return;
    const std::size_t before = alive();
    if (const std::size_t missing = wanted() - std::min(wanted(), before); missing > 0) {
        try {
            hire(missing);
        } catch (...) {  // no thread to be had: tried again
        }
        stats.replaced += alive() - before;
    }
    const std::size_t hanging = hanging_flights();
    if (std::exchange(flights_known_to_hang, hanging) < hanging) wake.notify_all();
}

}  // namespace kvstrata
