// Runs something that may never come back (a file system that does not answer) and gives up waiting after a while.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace kvstrata {

// The result of `work`, or nothing when it took longer than `patience` or threw. `work` then goes on in a thread of its own and its late
// result is destroyed there, so it must own (shared_ptr, copies) whatever it touches.
template <class Work, class Result = decltype(std::declval<Work&>()())>
std::optional<Result> run_bounded(Work work, std::chrono::milliseconds patience) {
    struct State {
        std::mutex mutex;
        std::condition_variable done;
        std::optional<Result> result;
        bool over = false;
    };
    auto state = std::make_shared<State>();
    std::thread([state, work = std::move(work)]() mutable {
        std::optional<Result> result;
        try {
            Work once = std::move(work);  // gone, with what it owns (files and their locks), before anybody goes on
            result.emplace(once());
        } catch (...) {
            result.reset();
        }
        const std::lock_guard lock(state->mutex);
        state->result = std::move(result);
        state->over = true;
        state->done.notify_all();
    }).detach();
    std::unique_lock lock(state->mutex);
    state->done.wait_for(lock, patience, [&] { return state->over; });
    return std::move(state->result);
}

}  // namespace kvstrata
