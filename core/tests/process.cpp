#include "process.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "../keys.hpp"
#include "../runtime.hpp"
#include "fingerprint.hpp"

namespace kvstrata::testing {
namespace {

constexpr std::uint32_t kRows = 6;  // of the slab
constexpr double kForever = std::numeric_limits<double>::infinity();

const Key kSpace = key_of(0x33);

DriverConfig driver_config() {
    DriverConfig config;
    config.ledger = {.page_size = Process::kTokens, .gpu_rows = 0, .cpu_rows = kRows, .event_capacity = 4096};
    config.disk = true;
    config.read_deadline = config.write_deadline = config.copy_deadline = config.engine_deadline = 1;
    config.retry_after = 1;
    return config;
}

ShelfConfig config_of(World& world) {
    ShelfConfig config;
    config.page_size = Process::kTokens;
    config.row_bytes = config.row_stride = Process::kRow;
    config.planes = {{0, 1000}, {1000, Process::kRow - 1000}};
    config.cap_bytes = world.cap_bytes;
    config.space = kSpace;
    config.space_json = "{}\n";
    config.seed = 100 + ++world.shelves;
    return config;
}

void fill(std::byte* row, const Key& key) {
    std::uint64_t state = key.prefix() | 1;
    for (std::uint64_t i = 0; i < Process::kRow; ++i)
        row[i] = std::byte((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 56);
}

bool holds(const std::byte* row, const Key& key) {
    std::array<std::byte, Process::kRow> right;
    fill(right.data(), key);
    return std::memcmp(row, right.data(), right.size()) == 0;
}

}  // namespace

Process::Process(World& world) : world_(world), driver_(driver_config(), make_lru()), disk_(world.medium->attach()) {
    slab_ = Slab::make({.rows = kRows, .row_stride = kRow}, error_);
    REQUIRE(slab_);
    shelf_ = Shelf::open(disk_, config_of(world), error_, std::chrono::hours{1});
    if (!shelf_) return;
    driver_.step(now_, {});
    adopt(driver_, *shelf_);
    check();
}

Process::~Process() {
    if (shelf_) kill();
}

std::vector<Key> Process::keys(const Tokens& tokens) {
    std::vector<Key> keys;
    Key above = kSpace;
    for (std::size_t at = 0; at + kTokens <= tokens.size(); at += kTokens)
        keys.push_back(above = page_key(kSpace, above, {std::span(tokens).subspan(at, kTokens), {}}));
    return keys;
}

std::uint32_t Process::serve(const Tokens& tokens) {
    if (!alive()) return 0;
    hear(driver_, *shelf_, shelf_->poll());  // what others did meanwhile
    listen();
    step({});
    while (turn()) {
    }
    const std::vector<Key> names = keys(tokens);
    const LeaseId id = driver_.lease(now_, {.space = kSpace, .tokens = tokens, .media = {}, .reserve = 0, .leave = 0}).id;
    REQUIRE(id != 0);
    step({});
    while (!driver_.find(id)->settled) {
        if (!turn()) pass(driver_.next_deadline() - now_);
    }
    const Lease& lease = *driver_.find(id);
    const std::uint32_t hit = lease.hit;
    for (std::uint32_t page = 0; page < hit; ++page) {
        const Row row = driver_.ledger().forest().at(lease.path[page]).row[1];
        CHECK_MESSAGE(holds(slab_->row(row), names[page]), "a page was served with bytes of another");
    }
    std::vector<Row> blocks(names.size() - hit);  // of an engine whose pages are always at hand
    if (!blocks.empty()) driver_.save(now_, id, hit, blocks, 0);
    step({});
    driver_.release(now_, id, 0);
    step({});
    while (turn()) {
    }
    return hit;
}

bool Process::turn() {
    if (queue_.empty()) return false;
    const Op op = queue_.front();
    queue_.pop_front();
    perform(op);
    listen();
    return true;
}

void Process::perform(Op op) {
    if (++world_.operations != world_.delayed || world_.delay == World::Delay::none) return step({execute(op)});
    Held& held = held_.emplace_back();
    held.op = op;
    held.until = world_.delay == World::Delay::end ? kForever : now_ + 2.5;
    if (world_.delay == World::Delay::answer) held.done = std::make_unique<Completion>(execute(op));
}

Completion Process::execute(const Op& op) {
    std::byte* const row = op.row == kNoRow ? nullptr : slab_->row(op.row);
    if (op.kind == OpKind::write) CHECK_MESSAGE(holds(row, op.page.key), "a row changed before it was written");
    Completion done = shelf_->execute(op, row);
    if (op.kind == OpKind::read && done.status == OpStatus::ok) {
        ++world_.loaded;
        CHECK_MESSAGE(holds(row, op.page.key), "the shelf served wrong bytes");
    }
    return done;
}

void Process::step(std::vector<Completion> done) {
    for (;;) {
        Submissions next = driver_.step(now_, done);
        done.clear();
        for (const Op& op : next.ops) queue_.push_back(op);
        for (const Event& event : driver_.ledger().drain_events()) {
            if (event.tier != Tier::disk) continue;
            world_.evicted += event.kind == EventKind::removed;
            if (event.kind == EventKind::stored && event.source == Tier::disk) continue;  // another process did
            if (event.kind == EventKind::stored)
                world_.acknowledged.insert(event.key.bytes);
            else
                world_.acknowledged.erase(event.key.bytes);
        }
        check();
        if (next.copies.empty()) return;
        const Forest& forest = driver_.ledger().forest();
        for (const CopyBatch& batch : next.copies) {
            for (PageId page = 0; page < forest.id_bound(); ++page) {
                const PageRecord& record = forest.at(page);
                if (record.alive && record.state[1] != Residency::none && std::ranges::count(batch.slab, record.row[1]) > 0)
                    fill(slab_->row(record.row[1]), record.key);
            }
            driver_.copied(now_, batch.ticket, true);
        }
    }
}

void Process::pass(double seconds) {
    const double end = now_ + seconds;
    REQUIRE(end < kForever);
    for (;;) {
        double next = std::min(end, driver_.next_deadline());
        for (const Held& held : held_) next = std::min(next, held.until);
        now_ = std::max(now_, next);
        release_held(now_);
        step({});
        while (turn()) {
        }
        if (now_ >= end) return;
    }
}

void Process::release_held(double now) {
    std::vector<Held> due;
    for (Held& held : held_)
        if (held.until <= now) due.push_back(std::move(held));
    std::erase_if(held_, [&](const Held& held) { return held.until <= now; });
    for (Held& held : due) step({held.done ? *held.done : execute(held.op)});
}

void Process::listen() {
    while (shelf_->has_news()) {
        hear(driver_, *shelf_, shelf_->next_news());
        step({});
    }
}

// The operation that hung comes back when nobody is there any more: it must not touch what others own by then.
void Process::close() {
    if (!alive()) return;
    shelf_->close();
    for (const Held& held : held_) shelf_->execute(held.op, held.op.row == kNoRow ? nullptr : slab_->row(held.op.row));
    shelf_.reset();
}

void Process::kill() {
    disk_->kill();
    shelf_.reset();
}

void Process::check() {
    std::string fault;
    CHECK_MESSAGE(driver_.check_integrity(fault), fault);
}

}  // namespace kvstrata::testing
