#include "io_pool.hpp"

#include <algorithm>
#include <cerrno>

#include "io_workers.hpp"

namespace kvstrata {

IoPool::IoPool(std::shared_ptr<Shelf> shelf, std::shared_ptr<Slab> slab, const IoPoolConfig& config, Sink sink, NewsSink news)
    : workers_(std::make_shared<IoWorkers>(std::move(shelf), std::move(slab), config, std::move(sink), std::move(news))) {
    workers_->start();
}

IoPool::~IoPool() { close(std::chrono::milliseconds{0}); }

void IoPool::submit(std::vector<Op>&& ops) {
    const std::lock_guard lock(workers_->mutex);
    if (workers_->draining) return;
    for (Op& op : ops) (op.kind == OpKind::read ? workers_->reads : workers_->others).push(std::move(op));
    workers_->wake.notify_all();
}

void IoPool::look() {
    const std::lock_guard lock(workers_->mutex);
    workers_->look_wanted = true;
    workers_->wake.notify_one();
}

void IoPool::poll() {
    const std::lock_guard lock(workers_->mutex);
    workers_->poll_wanted = true;
    workers_->wake.notify_one();
}

void IoPool::errand(std::function<void()> work) {
    const std::lock_guard lock(workers_->mutex);
    if (workers_->draining) return;
    workers_->errands.push_back(std::move(work));
    workers_->run_errands();
}

std::size_t IoPool::queued() const {
    const std::lock_guard lock(workers_->mutex);
    return workers_->reads.size() + workers_->others.size();
}

IoStats IoPool::stats() const {
    const std::lock_guard lock(workers_->mutex);
    IoStats stats = workers_->stats;
    stats.hanging = workers_->hanging_threads() + workers_->hanging_flights();
    return stats;
}

std::size_t IoPool::close(std::chrono::milliseconds patience) {
    // For operations that may hang, when patience is over.
    constexpr std::chrono::milliseconds kGrace{50};
    IoWorkers& state = *workers_;
    const auto end = IoWorkers::Clock::now() + patience;
    std::vector<std::thread> finished;
    std::size_t hanging = 0;
    std::unique_lock lock(state.mutex);
    if (state.draining) return 0;
    state.draining = true;
    state.errands.clear();
    if (state.settled.wait_until(lock, end, [&] { return state.idle(); }) && patience.count() > 0) {
        state.sync_wanted = true;
        state.wake.notify_one();
        state.settled.wait_until(lock, end, [&] { return !state.sync_wanted; });
    }
    for (OpQueue* queue : {&state.reads, &state.others}) {
        while (!queue->empty()) {
            const Op op = queue->take(1).front();
            Completion completion;
            completion.id = op.id;
            completion.status = op.kind == OpKind::read ? OpStatus::unreadable : OpStatus::failed;
            completion.error = ECANCELED;
            state.hand_over(lock, {std::move(completion)});
        }
    }
    state.over = true;
    state.wake.notify_all();
    state.alarm.notify_all();
    lock.unlock();
    if (state.ring) {
        const std::lock_guard one(state.ring_mutex);
        state.ring->wake();
    }
    lock.lock();
    // Who is in no operation needs nothing but the processor to leave, however long it takes to get it.
    state.settled.wait(lock, [&] { return state.handing == 0 && state.resting() == 0; });
    state.settled.wait_for(lock, kGrace, [&] { return state.alive() == 0 && !state.reaping && !state.errand_running; });
    for (IoWorkers::Worker& worker : state.workers) {
        if (!worker.alive) {
            if (worker.thread.joinable()) finished.push_back(std::move(worker.thread));
        } else {
            worker.thread.detach();
            ++hanging;
        }
    }
    hanging += state.flights.size();
    if (state.errand_running) {
        state.errander.detach();
        ++hanging;
    } else if (state.errander.joinable()) {
        finished.push_back(std::move(state.errander));
    }
    if (state.reaping)
        state.reaper.detach();
    else if (state.reaper.joinable())
        finished.push_back(std::move(state.reaper));
    finished.push_back(std::move(state.watcher));
    lock.unlock();
    for (std::thread& thread : finished) thread.join();
    return hanging;
}

}  // namespace kvstrata
