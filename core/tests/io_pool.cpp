#include "../io_pool.hpp"

#include <doctest/doctest.h>

#include <cerrno>
#include <stdexcept>

#include "../disk_sim.hpp"
#include "io_bench.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;
using std::chrono::milliseconds;

namespace {

// Over a disk that fails on demand, with one segment of four slots.
struct Bench : IoBench {
    explicit Bench(unsigned threads, std::shared_ptr<SimMedium> the_medium = SimMedium::make(1))
        : IoBench(the_medium->attach(), {.threads = threads}), medium(std::move(the_medium)) {
        grow();
        REQUIRE(slots.size() >= 4);
    }
    std::shared_ptr<SimMedium> medium;
};

void wait_until_stalled(SimMedium& medium) {
    while (medium.stalled() == 0) std::this_thread::yield();
}

// A shelf for what the real one never does.
class OddShelf final : public Shelf {
   public:
    std::vector<FoundPage> take_found() override { return {}; }
    std::vector<SlotRef> take_empty() override { return {}; }
    Completion execute(const Op& op, std::byte*) override {
        if (op.slot.slot == 1) throw std::runtime_error("odd");
        if (op.slot.slot == 2) throw std::bad_alloc();
        Completion done;
        done.id = op.id;
        return done;
    }
    std::uint64_t allocated_bytes() const override { return 0; }
    void close() override {}
};

}  // namespace

TEST_CASE("pool: pages go out and come back through several threads") {
    Bench bench(3);
    const std::vector<FingerprintPage> pages{FingerprintPage(0), FingerprintPage(1), FingerprintPage(2), FingerprintPage(3)};
    std::vector<Op> writes, reads;
    for (std::size_t i = 0; i < 4; ++i) {
        pages[i].fill(bench.slab->row(Row(i)));
        writes.push_back(bench.op(OpKind::write, bench.slots[i], Row(i), &pages[i]));
    }
    bench.pool->submit(std::move(writes));
    REQUIRE(bench.inbox->wait(5));
    for (std::size_t i = 0; i < 4; ++i) {
        bench.slab->poison(Row(8 + i));
        reads.push_back(bench.op(OpKind::read, bench.slots[i], Row(8 + i), &pages[i]));
    }
    bench.pool->submit(std::move(reads));
    REQUIRE(bench.inbox->wait(9));
    CHECK(bench.pool->close(milliseconds{1000}) == 0);
    CHECK(bench.pool->close(milliseconds{1000}) == 0);
    for (std::uint64_t id = 2; id <= 9; ++id) CHECK(bench.inbox->at(id).status == OpStatus::ok);
    for (std::size_t i = 0; i < 4; ++i) CHECK(pages[i].matches(bench.slab->row(Row(8 + i))));
    bench.pool->submit({bench.op(OpKind::grow, {}, 0, nullptr)});  // too late: dropped
    CHECK(bench.inbox->size() == 9);
}

TEST_CASE("pool: reads overtake writes, and one thread stays free of writes") {
    Bench bench(2);
    const FingerprintPage page(0);
    page.fill(bench.slab->row(0));
    bench.pool->submit({bench.op(OpKind::write, bench.slots[0], 0, &page)});
    REQUIRE(bench.inbox->wait(2));
    bench.medium->set_faults({.stall_at = 1});
    bench.pool->submit({bench.op(OpKind::write, bench.slots[1], 0, &page)});
    wait_until_stalled(*bench.medium);
    bench.pool->submit({bench.op(OpKind::write, bench.slots[2], 0, &page), bench.op(OpKind::read, bench.slots[0], 4, &page)});
    REQUIRE(bench.inbox->wait(3));  // the read, although one write hangs and another was first
    CHECK(bench.inbox->order().back() == 5);
    bench.medium->release();
    REQUIRE(bench.inbox->wait(5));
    CHECK(bench.inbox->at(4).status == OpStatus::ok);
    CHECK(page.matches(bench.slab->row(4)));
}

TEST_CASE("B16: close returns in time from a disk that hangs; the late read touches nothing that lives") {
    Bench bench(2);
    const FingerprintPage page(0);
    page.fill(bench.slab->row(0));
    bench.pool->submit({bench.op(OpKind::write, bench.slots[0], 0, &page)});
    REQUIRE(bench.inbox->wait(2));
    bench.medium->set_faults({.stall_at = 1});
    bench.pool->submit({bench.op(OpKind::read, bench.slots[0], 1, &page)});
    wait_until_stalled(*bench.medium);
    const auto before = std::chrono::steady_clock::now();
    CHECK(bench.pool->close(milliseconds{50}) == 1);
    CHECK(std::chrono::steady_clock::now() - before < kLong);
    bench.shelf->close();
    // While the read hangs the shelf is still ours: nobody else may hand out its slots.
    {
        Writer other(bench.medium->attach(), shelf_config(1 << 20));
        REQUIRE(other.shelf);
        CHECK(other.found.empty());
    }
    const std::weak_ptr<Slab> slab = bench.slab;
    const std::weak_ptr<Shelf> shelf = bench.shelf;
    bench.pool.reset();
    bench.slab.reset();
    bench.shelf.reset();
    CHECK_FALSE(slab.expired());  // the thread holds what its read will write to
    bench.medium->release();
    while (!slab.expired() || !shelf.expired()) std::this_thread::yield();
    CHECK(bench.inbox->size() == 2);
    Writer heir(bench.medium->attach(), shelf_config(1 << 20));
    CHECK(heir.found.size() == 1);
}

TEST_CASE("pool: what close does not get to comes back as cancelled") {
    Bench bench(1);
    const FingerprintPage page(0);
    bench.medium->set_faults({.stall_at = 1});
    std::vector<Op> ops;
    for (int i = 0; i < 4; ++i) ops.push_back(bench.op(i % 2 == 0 ? OpKind::write : OpKind::read, bench.slots[0], Row(i), &page));
    bench.pool->submit(std::move(ops));
    wait_until_stalled(*bench.medium);
    CHECK(bench.pool->queued() == 3);
    CHECK(bench.pool->close(milliseconds{0}) == 1);
    CHECK(bench.inbox->size() == 4);
    for (const std::uint64_t id : bench.inbox->order()) {
        if (id != 1) CHECK(bench.inbox->at(id).error == ECANCELED);
    }
    bench.medium->release();
}

TEST_CASE("D5: an exception costs the operation, not the thread; a sink that throws neither") {
    Inbox inbox;
    IoPool pool(std::make_shared<OddShelf>(), nullptr, IoPoolConfig{.threads = 1}, [&](std::span<Completion> done) {
        for (Completion& one : done) inbox.put(std::move(one));
        throw std::runtime_error("odd sink");
    });
    std::vector<Op> ops(3);
    for (std::uint32_t i = 0; i < 3; ++i) {
        ops[i].id = i;
        ops[i].slot.slot = (i + 1) % 3;
    }
    ops[1].kind = OpKind::write;
    pool.submit(std::move(ops));
    REQUIRE(inbox.wait(3));
    CHECK(inbox.at(0).status == OpStatus::unreadable);
    CHECK(inbox.at(0).error == EIO);
    CHECK(inbox.at(1).status == OpStatus::failed);
    CHECK(inbox.at(1).error == ENOMEM);
    CHECK(inbox.at(2).status == OpStatus::ok);
    CHECK(pool.close(milliseconds{1000}) == 0);
}

TEST_CASE("pool: closed at once while operations come in from other threads") {
    for (int round = 0; round < 20; ++round) {
        Bench bench(3);
        const FingerprintPage page(0);
        std::thread submitter([&] {
            for (std::uint64_t i = 0; i < 50; ++i) {
                Op op;
                op.id = 1000 + i;
                op.kind = i % 3 == 0 ? OpKind::write : OpKind::read;
                op.slot = bench.slots[i % 4];
                op.row = Row(i % 16);
                if (i % 3 == 0) op.slot = bench.slots[0];
                op.page = page.image();
                op.slot.segment = i % 2 == 0 ? 7 : op.slot.segment + 9;  // no such segment: rows and slots stay untouched
                bench.pool->submit({op});
            }
        });
        bench.pool->close(milliseconds{round % 3});  // a thread in the middle of an operation may be left behind
        submitter.join();
    }
}
