#include "runtime.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "disk_posix.hpp"
#include "guard.hpp"
#include "purge.hpp"
#include "slot.hpp"
#include "thread_name.hpp"

namespace kvstrata {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr double kSettleForOthers = 1;  // seconds that a purge others ask for waits for what is moving
constexpr double kPollEvery = 0.25;     // seconds, at what other processes do
constexpr std::uint64_t kWindow = 16 << 20;

// wait_until with a far point overflows in libstdc++: a year is for ever.
std::chrono::steady_clock::time_point after(double seconds) {
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(Seconds(std::min(std::max(seconds, 0.0), 3.2e7)));
}

// Enough operations in flight for large requests of adjacent slots, whatever a slot's size; not so many that a stalled disk takes much
// of the slab.
std::uint32_t ops_at_once(const ShelfConfig& shelf) {
    return std::uint32_t(std::clamp<std::uint64_t>(kWindow / Shape::of(shelf).slot_bytes(), 8, 256));
}

}  // namespace

// Seconds since 1970 that never go back: the wall clock at the first call, the steady clock from there.
double Runtime::now() {
    static const auto steady = std::chrono::steady_clock::now();
    static const double wall = Seconds(std::chrono::system_clock::now().time_since_epoch()).count();
    return wall + Seconds(std::chrono::steady_clock::now() - steady).count();
}

std::size_t adopt(Driver& driver, Shelf& shelf) {
    const std::vector<FoundPage> found = shelf.take_found();
    const std::vector<SlotRef> empty = shelf.take_empty();
    // By last use, then as found: of a prompt whose pages were used together, parents mostly come first. There may be a million, so
    // what is sorted is small, and few are looked up a second time.
    std::vector<std::pair<std::uint32_t, std::uint32_t>> order(found.size());
    for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = {found[i].last_use, i};
    if (!std::is_sorted(order.begin(), order.end())) std::sort(order.begin(), order.end());
    std::vector<std::uint32_t> unlinked;
    driver.expect_found(found.size());
    constexpr std::size_t kAhead = 8;  // what is not in the processor's cache is asked for so many pages before it is needed
    for (std::size_t at = 0; at < order.size(); ++at) {
        if (at + 2 * kAhead < order.size()) __builtin_prefetch(&found[order[at + 2 * kAhead].second].key);
        if (at + kAhead < order.size()) driver.ledger().index().prefetch(found[order[at + kAhead].second].key);
        const FoundPage& page = found[order[at].second];
        if (!driver.add_found(page.key, page.parent, page.slot)) unlinked.push_back(order[at].second);
        if (!guarded(Guard::found_slots)) driver.add_slot(page.slot);
    }
    for (const std::uint32_t i : unlinked) driver.link_found(found[i].key, found[i].parent);
    for (const SlotRef slot : empty) driver.add_slot(slot);
    hear(driver, shelf, shelf.take_news());
    return found.size() + empty.size();
}

void hear(Driver& driver, const Shelf& shelf, const ShelfNews& news) {
    std::vector<const FoundPage*> unlinked;
    for (const std::uint32_t segment : news.vanished) driver.retire_segment(segment);
    for (const SlotRef slot : news.gone) driver.slot_gone(slot);
    for (const std::uint32_t segment : news.adopted) driver.adopt_segment(segment);
    for (const FoundPage& page : news.found) {
        if (!driver.add_found(page.key, page.parent, page.slot)) unlinked.push_back(&page);
    }
    for (const FoundPage& page : news.shared) {
        const EntryId known = driver.ledger().find_entry(page.key);
        const bool first = known != kNoEntry && shelf.precedes(page.slot, driver.ledger().index().at(known).slot);
        if (!driver.add_shared(page.key, page.parent, page.slot, first)) unlinked.push_back(&page);
    }
    for (const FoundPage* page : unlinked) driver.link_found(page->key, page->parent);
    for (const SlotRef slot : news.empty) driver.add_slot(slot);
    if (news.room) driver.try_again();
}

std::unique_ptr<Runtime> Runtime::open(RuntimeConfig config, std::string& error) {
    config.driver.disk = !config.disk_path.empty();
    if (config.driver.disk) config.driver.reads_at_once = config.driver.writes_at_once = ops_at_once(config.shelf);
    std::shared_ptr<Slab> slab;  // first: more memory than there is ends here, before the ledger lists its rows
    if (config.driver.ledger.cpu_rows > 0) {
        slab = Slab::make({.rows = config.driver.ledger.cpu_rows, .row_stride = config.row_stride, .shared = config.shared_slab},
                          error);
        if (!slab) return nullptr;
    }
    std::unique_ptr<Runtime> runtime(new Runtime(config));
    State& state = *runtime->state_;
    state.poison = config.poison;
    state.look_every = config.look_every;
    runtime->slab_ = state.slab = std::move(slab);
    if (config.driver.disk) {
        std::shared_ptr<Disk> disk = PosixDisk::open_root(config.disk_path, error, config.disk_group);
        if (!disk) return nullptr;
        runtime->shelf_ = Shelf::open(disk, config.shelf, error);
        if (!runtime->shelf_) return nullptr;
        state.driver.step(now(), {});
        adopt(state.driver, *runtime->shelf_);
        runtime->adopted_pages_ = state.driver.ledger().resident(Tier::disk);
        const auto sink = [state = runtime->state_](std::span<Completion> done) {
            std::unique_lock lock(state->mutex);
            if (!state->closed) advance(*state, lock, done);
        };
        const auto news = [state = runtime->state_, shelf = runtime->shelf_](ShelfNews&& found) {
            std::unique_lock lock(state->mutex);
            if (state->closed) return;
            hear(state->driver, *shelf, found);
            advance(*state, lock, {});
            if (found.purge.id == 0) return;
            if (const auto pool = state->pool.lock())
                pool->errand([state, shelf, asked = std::move(found.purge)] { carry_out(*state, *shelf, asked); });
        };
        const std::lock_guard lock(state.mutex);  // what the threads tell before they are known to the state would start nothing
        runtime->pool_ =
            std::make_shared<IoPool>(runtime->shelf_, runtime->slab_, IoPoolConfig{.threads = config.io_threads}, sink, news);
        state.pool = runtime->pool_;
    }
    if (runtime->slab_) runtime->slab_->start_prefault();
    runtime->timer_ = std::thread([raw = runtime.get()] {
        name_thread("kvstrata-timer");
        raw->run_timer();
    });
    return runtime;
}

Runtime::~Runtime() { close(0); }

// Steps the driver and starts what it decided; ends with the lock released.
void Runtime::advance(State& state, std::unique_lock<std::mutex>& lock, std::span<Completion> done) {
    const std::uint64_t health = state.driver.health().changes();
    Submissions next = state.driver.step(now(), done);
    if (state.poison)
        for (Row row : state.driver.ledger().take_freed()) state.slab->poison(row);
    const bool copies = !next.copies.empty();
    for (CopyBatch& batch : next.copies) state.copies.push_back(std::move(batch));
    const bool alarm = state.driver.next_deadline() < state.alarm;
    const bool other_health = state.driver.health().changes() != health;
    const std::shared_ptr<IoPool> pool = next.ops.empty() ? nullptr : state.pool.lock();
    lock.unlock();
    if (pool) pool->submit(std::move(next.ops));
    if (copies) state.copies_ready.notify_all();
    if (alarm) state.timer.notify_all();
    if (other_health) state.health.notify_all();
    state.changed.notify_all();
}

void Runtime::run_timer() {
    std::unique_lock lock(state_->mutex);
    state_->look_at = pool_ ? now() + state_->look_every : kForever;
    state_->poll_at = pool_ ? now() + kPollEvery : kForever;
    while (!state_->closed) {
        const double deadline = std::min({state_->driver.next_deadline(), state_->look_at, state_->poll_at});
        state_->alarm = deadline;
        if (deadline == kForever)
            state_->timer.wait(lock);
        else
            state_->timer.wait_until(lock, after(deadline - now()));
        if (state_->closed) return;
        if (state_->look_at <= now()) {
            state_->look_at = now() + state_->look_every;
            shelf_->note_uses(state_->driver.take_uses());
            pool_->look();
        }
        if (state_->poll_at <= now()) {
            state_->poll_at = now() + kPollEvery;
            pool_->poll();
        }
        if (state_->driver.next_deadline() <= now()) {
            advance(*state_, lock, {});
            lock.lock();
        }
    }
}

void Runtime::wait_health(std::uint64_t seen, double seconds) {
    std::unique_lock lock(state_->mutex);
    const auto ready = [&] { return state_->closed || state_->driver.health().changes() != seen; };
    if (seconds == kForever)
        state_->health.wait(lock, ready);
    else
        state_->health.wait_until(lock, after(seconds), ready);
}

bool Runtime::wait(const std::function<bool(const Driver&)>& done, double seconds) {
    std::unique_lock lock(state_->mutex);
    const auto ready = [&] { return state_->closed || done(state_->driver); };
    if (seconds == kForever)
        state_->changed.wait(lock, ready);
    else
        state_->changed.wait_until(lock, after(seconds), ready);
    return done(state_->driver);
}

MemoryDrops Runtime::purge_now(State& state, Shelf* shelf, const PurgeOrder& order, double seconds, PurgeReport& report) {
    class Claims final : public ShelfClaims {
       public:
        Claims(State& state, const Shelf& shelf) : state_(state), shelf_(shelf) {}
        bool claim(SlotRef slot, const Key* page) override {
            const std::lock_guard lock(state_.mutex);
            return state_.driver.claim_slot(now(), slot, page);
        }
        void done(SlotRef slot) override {
            const std::lock_guard lock(state_.mutex);
            state_.driver.add_slot(slot);
        }
        void heard(ShelfNews&& news) override {
            std::unique_lock lock(state_.mutex);
            if (state_.closed) return;
            hear(state_.driver, shelf_, news);
            advance(state_, lock, {});
        }
        bool over() const override {
            const std::lock_guard lock(state_.mutex);
            return state_.closed;
        }
        void retired(std::uint32_t segment) override {
            const std::lock_guard lock(state_.mutex);
            state_.driver.retire_segment(segment);
        }

       private:
        State& state_;
        const Shelf& shelf_;
    };
    std::unique_lock lock(state.mutex);
    state.changed.wait_until(lock, after(seconds), [&] { return state.closed || state.driver.idle(); });
    const MemoryDrops drops = state.driver.drop_pages(now(), order);
    if (shelf) shelf->note_uses(state.driver.take_uses());
    advance(state, lock, {});
    if (!shelf) return drops;
    Claims claims(state, *shelf);
    shelf->purge(order, claims, report);
    return drops;
}

MemoryDrops Runtime::purge(const PurgeOrder& order, double seconds, PurgeReport& report) {
    return purge_now(*state_, shelf_.get(), order, seconds, report);
}

// Somebody else asks, and waits for the answer.
void Runtime::carry_out(State& state, Shelf& shelf, const PurgeRequest& request) {
    {
        std::unique_lock lock(state.mutex);
        state.changed.wait_until(lock, after(kSettleForOthers), [&] { return state.closed || state.driver.idle(); });
    }
    if (!shelf.still_asked(request.id)) return;  // what was published since is none of his business
    PurgeReport report;
    const MemoryDrops drops = purge_now(state, &shelf, request.order, 0, report);
    if (report.cancelled) return;  // the shelf is given up: it is not for us to say what is on it
    shelf.answer({.request = request.id,
                  .pages = report.pages,
                  .bytes = report.bytes,
                  .leftovers = report.leftovers,
                  .segments = report.segments,
                  .freed = report.freed,
                  .used_pages = report.used_pages + drops.in_use,
                  .used_bytes = report.used_bytes,
                  .failures = report.failures});
}

std::vector<CopyBatch> Runtime::take_copies(double seconds) {
    std::unique_lock lock(state_->mutex);
    const auto ready = [&] { return state_->closed || !state_->copies.empty(); };
    if (seconds == kForever)
        state_->copies_ready.wait(lock, ready);
    else
        state_->copies_ready.wait_until(lock, after(seconds), ready);
    return std::exchange(state_->copies, {});
}

bool Runtime::closed() const {
    std::lock_guard lock(state_->mutex);
    return state_->closed;
}

bool Runtime::close(double seconds) {
    const auto end = after(seconds);
    bool saved;
    {
        std::unique_lock lock(state_->mutex);
        if (state_->closed) return true;
        saved = state_->changed.wait_until(lock, end, [&] { return state_->driver.idle(); });
        state_->closed = true;
        if (shelf_) shelf_->note_uses(state_->driver.take_uses());
    }
    state_->timer.notify_all();
    state_->copies_ready.notify_all();
    state_->changed.notify_all();
    state_->health.notify_all();
    if (timer_.joinable()) timer_.join();  // not started when open() failed
    if (slab_) slab_->stop_prefault();
    if (pool_)
        pool_->close(std::max(std::chrono::milliseconds(100),
                              std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now())));
    if (shelf_) shelf_->close();
    return saved;
}

}  // namespace kvstrata
