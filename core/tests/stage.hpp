// A driver played by hand: what it asks for lies here until the test says how it ends. Pages have one token, so a prompt is a list of
// pages; prompts may be cached whole (leave = 0).
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../driver.hpp"
#include "../keys.hpp"
#include "fingerprint.hpp"

namespace kvstrata::testing {

using Tokens = std::vector<std::int32_t>;

class Stage {
   public:
    struct Sizes {
        std::uint32_t gpu_rows = 8, cpu_rows = 8;
        bool disk = false;
        std::uint32_t copy_rows = 64, reads_at_once = 8, writes_at_once = 4, saves_at_once = 512;
    };
    explicit Stage(const Sizes& sizes) : driver(configure(sizes), make_lru()) {}
    ~Stage() { check(); }

    LeaseAnswer ask(const Tokens& tokens, LeaseRequest request = {}) {
        request.space = space;
        request.tokens = tokens;
        request.leave = 0;
        const LeaseAnswer answer = driver.lease(now, request);
        step();
        return answer;
    }
    LeaseId lease(const Tokens& tokens, const LeaseRequest& request = {}) {
        const LeaseAnswer answer = ask(tokens, request);
        REQUIRE(answer.id != 0);
        return answer.id;
    }
    const Lease& at(LeaseId id) const {
        const Lease* lease = driver.find(id);
        REQUIRE(lease != nullptr);
        return *lease;
    }
    std::uint32_t publish(LeaseId id, std::uint64_t tokens, Fence ready = 0) {
        const std::uint32_t pages = driver.publish(now, id, tokens, ready);
        step();
        return pages;
    }
    void release(LeaseId id, Fence fence = 0) {
        driver.release(now, id, fence);
        step();
    }
    void settle(LeaseId id) {
        driver.settle(now, id);
        step();
    }
    // A request that is computed from what is cached of it, published and over.
    void serve(const Tokens& tokens) {
        const LeaseId id = lease(tokens);
        while (!at(id).settled) finish_all();
        publish(id, tokens.size());
        release(id);
        finish_all();
    }

    void step(std::vector<Completion> done = {}) {
        Submissions next = driver.step(now, done);
        for (Op& op : next.ops) ops.push_back(op);
        for (CopyBatch& copy : next.copies) copies.push_back(copy);
        check();
    }
    void pass(double seconds) {
        now += seconds;
        step();
    }

    std::size_t count(OpKind kind) const {
        return static_cast<std::size_t>(std::count_if(ops.begin(), ops.end(), [&](const Op& op) { return op.kind == kind; }));
    }
    // The oldest operation of this kind, taken off the list.
    Op take(OpKind kind) {
        const auto found = std::find_if(ops.begin(), ops.end(), [&](const Op& op) { return op.kind == kind; });
        REQUIRE(found != ops.end());
        const Op op = *found;
        ops.erase(found);
        return op;
    }
    // How the oldest operation of this kind ends.
    void finish(OpKind kind, OpStatus status = OpStatus::ok) { finish(take(kind), status); }
    void finish(const Op& op, OpStatus status = OpStatus::ok) {
        Completion done{.id = op.id, .status = status, .slots = {}, .lost = {}};
        if (op.kind == OpKind::grow && status == OpStatus::ok)
            for (std::uint32_t slot = 0; slot < 4; ++slot) done.slots.push_back({segments, slot});
        segments += op.kind == OpKind::grow;
        step({done});
    }
    CopyBatch take_copy(bool up) {
        const auto found = std::find_if(copies.begin(), copies.end(), [&](const CopyBatch& copy) { return copy.up == up; });
        REQUIRE(found != copies.end());
        const CopyBatch copy = *found;
        copies.erase(found);
        return copy;
    }
    void finish_copy(bool up, bool ok = true) { finish_copy(take_copy(up), ok); }
    void finish_copy(const CopyBatch& copy, bool ok = true) {
        driver.copied(now, copy.ticket, ok);
        step();
    }
    // Everything ends well, whatever follows from it.
    void finish_all() {
        while (!ops.empty() || !copies.empty()) {
            if (!ops.empty()) finish(ops.front().kind);
            if (!copies.empty()) finish_copy(copies.front().up);
        }
    }

    // The record of the last page of `tokens`, nullptr when it has none.
    const PageRecord* page(const Tokens& tokens) {
        const Forest& forest = driver.ledger().forest();
        const PageId root = driver.ledger().root(space);
        PageId page = root;
        for (const std::int32_t token : tokens) {
            page = forest.child(page, {{&token, 1}, {}});
            if (page == kNoPage) break;
        }
        driver.ledger().retire(root);
        return page == kNoPage ? nullptr : &forest.at(page);
    }
    bool has(Tier tier, const Tokens& tokens) {
        const PageRecord* record = page(tokens);
        if (!record) return false;
        if (tier == Tier::disk) return record->entry != kNoEntry && !driver.ledger().index().at(record->entry).writing;
        return record->state[static_cast<int>(tier)] == Residency::resident;
    }
    Key key(const Tokens& tokens) const {
        Key above = space;
        for (const std::int32_t token : tokens) above = page_key(space, above, {{&token, 1}, {}});
        return above;
    }
    // The disk held every page of `tokens` when this process started.
    void find_on_disk(const Tokens& tokens) {
        for (std::size_t i = 1; i <= tokens.size(); ++i) {
            const Tokens above(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(i) - 1);
            const Tokens all(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(i));
            driver.add_found(key(all), key(above), {segments, static_cast<std::uint32_t>(i)});
        }
        segments++;
    }
    void check() const {
        std::string fault;
        CHECK_MESSAGE(driver.check_integrity(fault), fault);
    }

    Key space = key_of(0x11);
    double now = 100;
    Driver driver;
    std::vector<Op> ops;
    std::vector<CopyBatch> copies;
    std::uint32_t segments = 0;

   private:
    static DriverConfig configure(const Sizes& sizes) {
        DriverConfig config;
        config.ledger = {.page_size = 1, .gpu_rows = sizes.gpu_rows, .cpu_rows = sizes.cpu_rows};
        config.disk = sizes.disk;
        config.copy_rows = sizes.copy_rows;
        config.saves_at_once = sizes.saves_at_once;
        config.reads_at_once = sizes.reads_at_once;
        config.writes_at_once = sizes.writes_at_once;
        return config;  // deadlines: reads 5 s, writes and copies 30 s; retries after 5 s
    }
};

}  // namespace kvstrata::testing
