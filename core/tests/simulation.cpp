#include "simulation.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "../runtime.hpp"
#include "../slot.hpp"
#include "session.hpp"

namespace kvstrata::testing {
namespace {

constexpr double kTickTime = 0.004;  // seconds, at most

}  // namespace

Simulation::Simulation(std::uint64_t seed)
    : dice_(seed), setup_(Setup::draw(dice_)), book_(setup_.row_bytes), medium_(SimMedium::make(seed)) {}

Simulation::~Simulation() = default;

void Simulation::run() {
    for (std::uint32_t life = 0; life < setup_.lives; ++life) {
        open_life();
        ticks_left_ = setup_.ticks;
        agenda_.after(0, [this] { tick(); });
        while (ticks_left_ > 0) happen_next();
        const bool at_rest = life + 1 == setup_.lives || dice_.chance(0.4);
        if (at_rest) rest();
        end_life(at_rest);
    }
    // Once more, in perfect health: what was stored last is found, loaded, and used; then everything can be evicted.
    setup_.io = {};
    setup_.device = {};
    open_life();
    rest();
    prove_evictable();
    tally_.add(*driver_);
}

void Simulation::tell(const char* format, ...) const {
    static const bool wanted = std::getenv("KVSTRATA_TRACE") != nullptr;
    if (!wanted) return;
    std::va_list values;
    va_start(values, format);
    std::printf("%9.4f  ", agenda_.now());
    std::vprintf(format, values);
    std::printf("\n");
    va_end(values);
}

// --- a life of the process

ShelfConfig Simulation::shelf_config() {
    ShelfConfig config;
    config.page_size = setup_.page_size();
    config.row_bytes = setup_.row_bytes;
    config.row_stride = kBlockBytes;
    config.planes = {{0, 16}, {16, setup_.row_bytes - 24}, {setup_.row_bytes - 8, 8}};
    config.cap_bytes = setup_.disk_bytes;
    config.space.bytes.fill(0x40);
    config.space_json = "{\"model\": \"simulated\"}\n";
    config.seed = dice_.next() | 1;
    return config;
}

void Simulation::open_life() {
    agenda_.clear();
    std::string error;
    const LedgerConfig& ledger = setup_.driver.ledger;
    slab_ = ledger.cpu_rows == 0 ? nullptr : Slab::make({.rows = ledger.cpu_rows, .row_stride = kBlockBytes}, error);
    require(slab_ || ledger.cpu_rows == 0, "no slab");
    if (slab_)
        for (std::uint32_t row = 0; row < ledger.cpu_rows; ++row) slab_->poison(static_cast<Row>(row));
    driver_ = std::make_unique<Driver>(setup_.driver, make_lru());
    device_ =
        std::make_unique<SimDevice>(agenda_, dice_, slab_.get(), setup_.device_rows, setup_.row_bytes, setup_.driver.copy_deadline,
                                    setup_.device, [this](std::uint64_t ticket, bool ok, const std::vector<Key>& pages) {
                                        find_overdue();
                                        if (!ok)
                                            for (const Key& key : pages) book_.at(key).trouble_at = now();
                                        tell("copy %llu over: %d", static_cast<unsigned long long>(ticket), ok);
                                        ended_well_.try_emplace(ticket, ok && driver_->copying(ticket));
                                        driver_->copied(now(), ticket, ok);
                                        advance({});
                                    });
    io_ = std::make_unique<SimIo>(agenda_, dice_, book_, slab_.get(), setup_.row_bytes, setup_.driver.read_deadline, setup_.io,
                                  [this](const Op& op, const Completion& done) { deliver(op, done); });
    driver_->step(now(), {});
    slots_ = 0;
    if (setup_.driver.disk) {
        disk_ = medium_->attach();
        // Never late, however busy the machine is: a seed must replay.
        shelf_ = Shelf::open(disk_, shelf_config(), error, std::chrono::hours{1});
        if (!shelf_) throw Broken("the shelf does not open: " + error);
        io_->mount(shelf_, medium_);
        slots_ = adopt(*driver_, *shelf_);
    }
    std::size_t found = 0;
    const KeyIndex& index = driver_->ledger().index();
    book_.for_each([&](PageFacts& page) {
        const bool there = index.find(page.name.key) != kNoEntry;
        require(!there || page.tried, "a page is found that was never written");
        require(there || !page.in[2] || records_harmed_, "a stored page is not found again");
        page.in[2] = there;
        found += there;
    });
    require(found == index.size(), "something is found that never was a page");
    tally_.found += found;
    records_harmed_ = false;
    blocks_.clear();
    returned_.clear();
    given_up_.clear();
    ended_well_.clear();
    if (setup_.guest())
        for (std::uint32_t row = 0; row < setup_.device_rows; ++row) blocks_.push_back(static_cast<Row>(row));
    device_free_.assign(setup_.device_rows, 1);
    last_overdue_ = -1e18;
    check();
}

void Simulation::end_life(bool at_rest) {
    tally_.add(*driver_);
    sessions_.clear();
    const double how = dice_.real(0, 1);
    if (shelf_) {
        if (how < 0.4) {
            tally_.kills++;
            if (!at_rest) io_->tear_one();
            disk_->kill();
        } else if (how < 0.7) {
            tally_.crashes++;
            if (!at_rest) io_->tear_one();
            medium_->crash(dice_.next());
            records_harmed_ = true;
        } else {
            tally_.closes++;
            shelf_->close();
        }
    }
    io_.reset();
    device_.reset();
    driver_.reset();
    shelf_.reset();
    disk_.reset();
    book_.lose_memory();
}

void Simulation::tick() {
    if (ticks_left_ == 0) return;
    --ticks_left_;
    agenda_.after(dice_.real(0, kTickTime), [this] { tick(); });
    std::erase_if(sessions_, [](const auto& session) { return session->over(); });
    if (sessions_.size() < setup_.sessions && dice_.chance(0.5)) {
        sessions_.push_back(
            std::make_unique<Session>(*this, Prompt::draw(dice_, setup_.page_size(), setup_.most_pages, setup_.spaces)));
    } else if (!sessions_.empty()) {
        sessions_[dice_.below(sessions_.size())]->act();
    }
    harm_disk();
    if (dice_.chance(0.2)) listen();
    if (dice_.chance(0.02)) {  // numbers that nobody knows
        const std::uint64_t number = dice_.chance(0.5) ? 0 : 1'000'000 + dice_.below(1000);
        decide([&](Driver& driver, double time) {
            driver.release(time, number, 0);
            driver.settle(time, number);
            driver.append(number, {});
            driver.copied(time, number, true);
            return driver.publish(time, number, 100, 0) + driver.load(time, number, 0, {}) + driver.save(time, number, 0, {}, 0) +
                   driver.grow(time, number, 1);
        });
    }
}

void Simulation::harm_disk() {
    if (!setup_.driver.disk) return;
    if (dice_.chance(setup_.full)) medium_->set_capacity(dice_.chance(0.5) ? medium_->allocated_bytes() : 1ull << 40);
    const bool flip = dice_.chance(setup_.flip), gone = dice_.chance(setup_.gone);
    if (!flip && !gone) return;
    const std::vector<std::string> files = medium_->files();
    const std::string& file = files[dice_.below(files.size())];
    if (file.find("seg-") == std::string::npos) return;
    if (gone) {
        records_harmed_ = true;
        medium_->attach()->remove(file);
        return;
    }
    tally_.flips++;
    records_harmed_ = true;
    medium_->edit(file, [&](std::vector<std::byte>& data) {
        if (data.empty()) return;
        // Mostly in the slots, where this process sees it; the table is read at the start only.
        const std::size_t from = dice_.chance(0.8) ? std::min<std::size_t>(2 * kBlockBytes, data.size() - 1) : 0;
        for (int i = 0; i < 8; ++i) data[from + dice_.below(data.size() - from)] ^= std::byte{0x10};
    });
}

// What the runtime's background does: looking after files that are gone, rebuilding what was damaged.
void Simulation::listen() {
    if (!shelf_) return;
    if (dice_.chance(0.3)) shelf_->check_files();
    while (shelf_->has_news()) {
        const ShelfNews news = shelf_->next_news();
        const KeyIndex& index = driver_->ledger().index();
        for (EntryId id = 0; id < index.id_bound(); ++id) {
            const Entry& entry = index.at(id);
            const bool gone = std::find(news.vanished.begin(), news.vanished.end(), entry.slot.segment) != news.vanished.end();
            if (entry.alive && gone) given_up_.push_back(entry.key);
        }
        for (const FoundPage& page : news.found) {
            require(book_.at(page.key).tried, "a page is found again that was never written");
            if (index.find(page.key) != kNoEntry) continue;
            book_.at(page.key).in[2] = true;
            book_.at(page.key).unreadable_until = -kNever;
        }
        kvstrata::hear(*driver_, *shelf_, news);
        for (const Key& key : given_up_) {  // as long as a move uses it
            const EntryId id = index.find(key);
            if (id != kNoEntry && driver_->ledger().retired(index.at(id).slot.segment)) book_.at(key).unreadable_until = kNever;
        }
        tally_.vanished += news.vanished.size();
        tally_.rebuilt += news.found.size();
        const std::size_t slots = count_slots();
        require(slots <= slots_ + news.found.size() + news.empty.size(), "slots come from nowhere");
        require(slots + 4 * news.vanished.size() >= slots_, "slots of other segments are gone too");
        slots_ = slots;
        for (const Event& event : driver_->ledger().drain_events()) hear(event);
        advance({});
    }
}

// --- time

void Simulation::happen_next() {
    const double due = driver_->next_deadline();
    require(due > now(), "a deadline has passed and nothing was done");
    if (due <= agenda_.next()) {
        require(due < std::numeric_limits<double>::infinity(), "nothing will ever happen again");
        agenda_.pass_to(due);
        advance({});
    } else {
        agenda_.run_next();
    }
    check();
}

void Simulation::find_overdue() {
    io_->find_overdue([&](const Key& page) {
        last_overdue_ = now();
        book_.read_overdue(page, now(), setup_.driver.retry_after);
    });
    device_->find_overdue([&](const std::vector<Key>& pages) {
        for (const Key& key : pages) book_.at(key).trouble_at = now();
    });
}

void Simulation::deliver(const Op& op, const Completion& done) {
    find_overdue();
    if (op.kind == OpKind::grow) slots_ += done.slots.size();
    if (op.kind == OpKind::grow && done.slots.empty()) grow_refused_ = true;
    if (op.kind == OpKind::read && done.status != OpStatus::ok) {
        book_.at(op.page.key).trouble_at = now();
        if (done.status == OpStatus::unreadable) book_.read_failed(op.page.key, now(), setup_.driver.retry_after);
        if (done.status == OpStatus::corrupt || done.status == OpStatus::stale) condemned_.push_back(op.page.key);
    }
    tell("%s of page %04x: status %d",
         op.kind == OpKind::read    ? "read"
         : op.kind == OpKind::write ? "write"
                                    : "other operation",
         name(op.page.key), static_cast<int>(done.status));
    Completion copy = done;
    advance({&copy, 1});
}

// As Runtime::advance does it: step, poison what was freed, start what follows.
void Simulation::advance(std::span<Completion> done) {
    tally_.steps++;
    find_overdue();
    Submissions next = driver_->step(now(), done);
    for (const Row row : driver_->ledger().take_freed()) slab_->poison(row);
    for (const Event& event : driver_->ledger().drain_events()) hear(event);
    require(driver_->ledger().events_lost() == 0, "events were lost");
    condemned_.clear();
    for (const CopyBatch& batch : next.copies) {
        device_->start(batch, pages_of(batch));
        tell("copy %llu %s of %zu rows, fence %llu", static_cast<unsigned long long>(batch.ticket), batch.up ? "up" : "down",
             batch.slab.size(), static_cast<unsigned long long>(batch.fence));
    }
    io_->submit(std::move(next.ops));
    require(driver_->next_deadline() <= std::min(io_->next_deadline(), device_->next_deadline()), "a deadline is not announced");
    check();
}

std::vector<Key> Simulation::pages_of(const CopyBatch& batch) const {
    const Forest& forest = driver_->ledger().forest();
    std::vector<Key> keys;
    for (PageId page = 0; page < forest.id_bound(); ++page) {
        const PageRecord& record = forest.at(page);
        if (record.alive && record.state[1] != Residency::none &&
            std::find(batch.slab.begin(), batch.slab.end(), record.row[1]) != batch.slab.end())
            keys.push_back(record.key);
    }
    require(keys.size() == batch.slab.size(), "a copy of rows that hold no page");
    return keys;
}

// --- the end of a life, or of the simulation

// Nobody comes any more: everybody is served in time, whatever hangs; then what hangs comes back, and nothing is left over.
void Simulation::rest() {
    ticks_left_ = 0;
    const auto waiting = [&] {
        return std::any_of(sessions_.begin(), sessions_.end(),
                           [](const auto& session) { return !session->over() && !session->settled(); });
    };
    while (waiting()) happen_next();
    while (!sessions_.empty()) {
        const auto session = sessions_.begin() + dice_.below(sessions_.size());
        if (!(*session)->over() && dice_.chance(0.3)) (*session)->compute_all();
        (*session)->release();
        sessions_.erase(session);
    }
    if (shelf_) shelf_->check_files();
    quieten();
    const Ledger& ledger = driver_->ledger();
    require(driver_->idle() || ledger.free_rows(Tier::cpu) == 0, "something waits although nothing but what hangs is under way");
    medium_->set_capacity(1ull << 40);
    io_->drain();
    device_->drain();
    quieten();
    prove_rest();
    agenda_.pass_to(now() + 2 * setup_.driver.retry_after);
    prove_alive();
    quieten();
    prove_rest();
}

// After all trouble is over a new prompt goes all the way down, and is found there.
void Simulation::prove_alive() {
    const LedgerConfig& ledger = setup_.driver.ledger;
    const std::uint32_t group = setup_.multiple / setup_.page_size();
    const std::uint32_t pages = std::min(3u, setup_.guest() ? ledger.cpu_rows : ledger.gpu_rows - 1) / group * group;
    if (pages == 0) return;
    grow_refused_ = false;
    const Prompt prompt = Prompt::apart(setup_.page_size(), pages * setup_.page_size() + 1);
    for (int round = 0; round < 2; ++round) {
        sessions_.push_back(std::make_unique<Session>(*this, prompt, true));
        Session& session = *sessions_.back();
        require(!session.refused(), "an idle cache refuses a small request");
        while (!session.settled()) happen_next();
        if (!setup_.guest() && driver_->find(session.id())->rows_lost) {  // it may ask again, and finds less to lose
            session.release();
            sessions_.pop_back();
            quieten();
            --round;
            continue;
        }
        require(round == 0 || session.hit() == pages, "what was computed last is not found");
        session.compute_all();
        quieten();
        // Again: pages that were on their way are no longer, and a guest saves only as many at once as may be dirty.
        for (std::uint32_t i = 0; i < pages; ++i) session.publish_all(), quieten();
        session.release();
        sessions_.pop_back();
        for (std::uint32_t i = 0; i < pages; ++i) {
            const PageName& page = prompt.pages()[i];
            require(setup_.guest() || book_.at(page.key).in[0], "a page was not kept on an idle device");
            require(ledger.cpu_rows < prompt.pages().size() || book_.at(page.key).in[1], "a page was not saved to an idle slab");
            const bool no_slots = !setup_.driver.disk || (grow_refused_ && slots_ < 2 * prompt.pages().size());
            require(no_slots || book_.at(page.key).in[2], "a page was not written to a sound disk");
        }
    }
}

void Simulation::quieten() {
    listen();
    while (!agenda_.empty() || driver_->next_deadline() < std::numeric_limits<double>::infinity()) happen_next();
}

}  // namespace kvstrata::testing
