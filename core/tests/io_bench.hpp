// An IoPool for tests: somebody who collects its completions, and pages to send through it.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "../io_pool.hpp"
#include "fingerprint.hpp"

namespace kvstrata::testing {

inline constexpr std::chrono::seconds kLong{30};  // what is waited for comes at once; this only bounds a broken test

// Collects completions and lets a test wait for them.
class Inbox {
   public:
    void put(Completion&& completion) {
        const std::lock_guard lock(mutex_);
        order_.push_back(completion.id);
        done_.emplace(completion.id, std::move(completion));
        changed_.notify_all();
    }
    bool wait(std::size_t count) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, kLong, [&] { return done_.size() >= count; });
    }
    std::size_t size() const {
        const std::lock_guard lock(mutex_);
        return done_.size();
    }
    Completion at(std::uint64_t id) const {
        const std::lock_guard lock(mutex_);
        return done_.at(id);
    }
    std::vector<std::uint64_t> order() const {
        const std::lock_guard lock(mutex_);
        return order_;
    }

   private:
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::uint64_t, Completion> done_;
    std::vector<std::uint64_t> order_;
};

// An IoPool over a shelf, with rows to read into and write from.
struct IoBench {
    static constexpr std::uint32_t kRows = 64;

    explicit IoBench(std::shared_ptr<Disk> disk, const IoPoolConfig& config, std::uint64_t cap = 1 << 20,
                     IoPool::NewsSink news = {}) {
        std::string error;
        slab = Slab::make({.rows = kRows, .row_stride = kRowStride}, error);
        shelf = Shelf::open(std::move(disk), shelf_config(cap), error);
        REQUIRE_MESSAGE(shelf, error);
        pool = std::make_unique<IoPool>(
            shelf, slab, config,
            [inbox = inbox](std::span<Completion> done) {
                for (Completion& one : done) inbox->put(std::move(one));
            },
            std::move(news));
    }
    // One more segment; its slots.
    std::vector<SlotRef> grow() {
        const Op grow = op(OpKind::grow, {}, kNoRow, nullptr);
        submit({grow});
        std::vector<SlotRef> made = inbox->at(grow.id).slots;
        slots.insert(slots.end(), made.begin(), made.end());
        return made;
    }
    Op op(OpKind kind, SlotRef slot, Row row, const FingerprintPage* page) {
        Op made;
        made.id = ++last_id;
        made.kind = kind;
        made.slot = slot;
        made.row = row;
        if (page) made.page = page->image();
        return made;
    }
    // Waits for all that was ever submitted.
    void submit(std::vector<Op> ops) {
        pool->submit(std::move(ops));
        REQUIRE(inbox->wait(last_id));
    }
    // Page i to slot i of `where` from row i, for as many as there are; or back. The statuses.
    std::vector<OpStatus> move(OpKind kind, std::span<const SlotRef> where, std::span<const FingerprintPage> pages) {
        std::vector<Op> ops;
        for (std::size_t i = 0; i < where.size(); ++i) {
            if (kind == OpKind::write)
                pages[i].fill(slab->row(Row(i)));
            else
                slab->poison(Row(i));
            ops.push_back(op(kind, where[i], Row(i), &pages[i]));
        }
        const std::uint64_t first = last_id - ops.size() + 1;
        submit(std::move(ops));
        std::vector<OpStatus> statuses;
        for (std::size_t i = 0; i < where.size(); ++i) {
            statuses.push_back(inbox->at(first + i).status);
            if (statuses[i] == OpStatus::ok) CHECK(pages[i].matches(slab->row(Row(i))));
        }
        return statuses;
    }

    std::shared_ptr<Slab> slab;
    std::shared_ptr<Shelf> shelf;
    std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
    std::unique_ptr<IoPool> pool;
    std::vector<SlotRef> slots;
    std::uint64_t last_id = 0;
};

inline std::vector<FingerprintPage> pages_from(std::uint32_t first, std::size_t count) {
    std::vector<FingerprintPage> pages;
    for (std::size_t i = 0; i < count; ++i) pages.emplace_back(std::uint32_t(first + i));
    return pages;
}

}  // namespace kvstrata::testing
