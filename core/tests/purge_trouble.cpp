// Purges that meet others: another purge, an owner that ends meanwhile, a close.
#include <doctest/doctest.h>

#include <atomic>
#include <future>

#include "../disk_sim.hpp"
#include "../purge.hpp"
#include "fingerprint.hpp"
#include "hooked_disk.hpp"
#include "io_bench.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kCap = 1 << 20;
constexpr std::uint32_t kPages = 6;

// A directory with one shelf of two segments, whose owner lives.
struct Owned {
    Owned() {
        for (int i = 0; i < 2; ++i) REQUIRE(owner->grow() == OpStatus::ok);
        for (std::uint32_t i = 0; i < kPages; ++i) REQUIRE(owner->write(owner->empty[i], FingerprintPage(i)) == OpStatus::ok);
    }
    std::size_t left() const { return Writer(medium->attach(), shelf_config(kCap)).found.size(); }

    std::shared_ptr<SimMedium> medium = SimMedium::make(5);
    std::unique_ptr<Writer> owner = std::make_unique<Writer>(medium->attach(), shelf_config(kCap));
};

struct Claims : ShelfClaims {
    bool claim(SlotRef, const Key*) override {
        ++claimed;
        if (on_claim) on_claim();
        return true;
    }
    void done(SlotRef) override {}
    void retired(std::uint32_t) override {}
    bool over() const override { return ended; }
    std::function<void()> on_claim;
    std::uint32_t claimed = 0;
    bool ended = false;
};

}  // namespace

TEST_CASE("purge: one at a time: another is waited for only so long, and what it asks is left alone") {
    Owned owned;
    owned.owner.reset();
    const auto other = owned.medium->attach();
    int error = 0;
    const auto requests = File::open(other, PurgeRequest::kPath, OpenMode::create, error);
    REQUIRE(requests);
    const PurgeRequest asked{.id = 7, .order = {}};
    {
        const Directory::Hold hold(requests, milliseconds{0});
        REQUIRE(write_request(*requests, asked) == 0);
        const PurgeReport report = purge(owned.medium->attach(), {}, {}, {}, milliseconds{20});
        CHECK(report.failures == 1);
        CHECK(report.error == -EWOULDBLOCK);
        CHECK(report.where == PurgeRequest::kPath);
        CHECK(report.pages == 0);
        CHECK(read_request(owned.medium->attach()).id == asked.id);
    }
    CHECK(owned.left() == kPages);
    CHECK(purge(owned.medium->attach(), {}, {}, {}, milliseconds{20}).pages == kPages);
}

TEST_CASE("purge: an owner that ends before it answered: its shelf is purged by who asked") {
    Owned owned;
    const Progress leave = [&](std::uint64_t, std::uint64_t) {
        owned.owner.reset();
        return true;
    };
    const PurgeReport report = purge(owned.medium->attach(), {}, leave, {}, kLong);
    CHECK(report.pages == kPages);
    CHECK(report.used_shelves == 0);
    CHECK(report.failures == 0);
    CHECK(owned.left() == 0);
}

TEST_CASE("purge: by an owner that is closed meanwhile: it stops at the next slot, and nobody owns the shelf any more") {
    for (const bool told : {false, true}) {
        CAPTURE(told);
        Owned owned;
        Claims claims;
        claims.on_claim = [&] {
            if (claims.claimed == 2 && told) claims.ended = true;
            if (claims.claimed == 2 && !told) owned.owner->shelf->close();
        };
        PurgeReport report;
        owned.owner->shelf->purge({}, claims, report);
        CHECK(report.cancelled);
        CHECK(report.pages == 2);
        owned.owner->shelf->close();
        CHECK(owned.left() == kPages - 2);  // while the one who owned it is still there
    }
}

TEST_CASE("pool: an errand runs beside operations, one at a time; close leaves it behind, and drops the next") {
    const auto gate = std::make_shared<Gate>();
    const auto runs = std::make_shared<std::atomic<int>>(0);
    IoBench bench(SimMedium::make(1)->attach(), {.threads = 2}, kCap);
    const std::vector<SlotRef> slots = bench.grow();
    for (int i = 0; i < 2; ++i) {
        bench.pool->errand([gate, runs] {
            ++*runs;
            gate->pass();
        });
    }
    gate->await(1);
    const std::vector<FingerprintPage> pages = pages_from(0, slots.size());
    for (const OpStatus status : bench.move(OpKind::write, slots, pages)) CHECK(status == OpStatus::ok);
    bench.pool->errand([] { throw std::bad_alloc(); });
    CHECK(bench.pool->close(milliseconds{50}) == 1);
    gate->open();
    bench.pool.reset();
    CHECK(runs->load() == 1);
}

TEST_CASE("pool: an errand that throws costs nobody anything") {
    IoBench bench(SimMedium::make(1)->attach(), {.threads = 1}, kCap);
    std::promise<void> ran;
    bench.pool->errand([] { throw std::bad_alloc(); });
    bench.pool->errand([&] { ran.set_value(); });
    CHECK(ran.get_future().wait_for(kLong) == std::future_status::ready);
    CHECK(bench.pool->close(milliseconds{50}) == 0);
}
