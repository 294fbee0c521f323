// Purges that meet others: another purge, an owner that ends meanwhile, a close.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cerrno>
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
        return grants;
    }
    void done(SlotRef) override { ++given_back; }
    void retired(std::uint32_t segment) override { gone.push_back(segment); }
    bool over() const override { return ended; }
    std::function<void()> on_claim;
    std::uint32_t claimed = 0, given_back = 0;
    std::vector<std::uint32_t> gone;
    bool ended = false, grants = true;
};

// What a process does when it is asked, as its runtime would. False: it heard of nothing.
bool carry_out(Writer& owner) {
    PurgeRequest asked;
    for (int i = 0; i < 4 && asked.id == 0; ++i) asked = owner.shelf->poll().purge;
    if (asked.id == 0) return false;
    Claims claims;
    PurgeReport report;
    owner.shelf->purge(asked.order, claims, report);
    owner.shelf->answer({.request = asked.id, .pages = report.pages, .bytes = report.bytes, .leftovers = report.leftovers});
    return true;
}

ShelfConfig config_with(std::uint64_t seed) {
    ShelfConfig config = shelf_config(kCap);
    config.seed = seed;
    return config;
}

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

TEST_CASE("purge: a shelf that an owner takes over after it has answered is purged and counted too") {
    Owned owned;
    auto heir = std::make_unique<Writer>(owned.medium->attach(), config_with(8));
    REQUIRE(heir->grow() == OpStatus::ok);
    for (std::uint32_t i = 0; i < 3; ++i) REQUIRE(heir->write(heir->empty[i], FingerprintPage(10 + i)) == OpStatus::ok);
    int round = 0;
    const Progress meanwhile = [&](std::uint64_t, std::uint64_t) {  // asked before each look at the answers
        if (++round == 1) CHECK(carry_out(*heir));
        if (round == 2) {
            owned.owner.reset();
            CHECK(carry_out(*heir));
        }
        return true;
    };
    const PurgeReport report = purge(owned.medium->attach(), {}, meanwhile, {}, kLong);
    CHECK(round == 2);
    CHECK(report.pages == kPages + 3);
    CHECK(report.used_shelves == 0);
    CHECK(report.unanswered == 0);
    heir.reset();
    CHECK(owned.left() == 0);
}

TEST_CASE("purge: a prefix that two continued by turns goes whole, though there is no room to name all its pages") {
    constexpr std::uint64_t cap = 4 << 20;
    constexpr std::uint32_t pages = 200;  // their keys take two blocks
    const auto medium = SimMedium::make(5);
    std::array<std::unique_ptr<Writer>, 2> owners;
    for (std::uint64_t i = 0; i < 2; ++i) {
        ShelfConfig config = shelf_config(cap);
        config.seed = 7 + i;
        owners[i] = std::make_unique<Writer>(medium->attach(), config);
    }
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::prefix;
    Key above = key_of(0x11);
    for (std::uint32_t i = 0; i < pages; ++i) {
        FingerprintPage page(i);
        page.parent = above;
        above = page.key = page_key(page.space, above, page.content());
        if (i == 0) order.keys.insert(page.key);
        Writer& owner = *owners[i % 2];
        if (owner.empty.empty()) REQUIRE(owner.grow() == OpStatus::ok);
        REQUIRE(owner.write(owner.empty.back(), page) == OpStatus::ok);
        owner.empty.pop_back();
    }
    const std::uint64_t free = cap - medium->allocated_bytes();
    medium->edit("filler", [&](auto& bytes) { bytes.resize(free - 4096); });  // one block is left
    int round = 0;
    const Progress by_turns = [&](std::uint64_t, std::uint64_t) {  // the second looks when the first has dropped its part
        if (round < 10) carry_out(*owners[std::size_t(round++) % 2]);
        return true;
    };
    const PurgeReport report = purge(medium->attach(), order, by_turns, {}, kLong);
    CHECK(report.pages == pages);
    CHECK(report.used_pages == 0);
    CHECK(report.unanswered == 0);
    CHECK(pages_among(medium->attach(), survey(medium->attach()), order.keys).empty());
    CHECK(medium->peak_bytes() <= cap);
}

TEST_CASE("purge: a process that starts and takes over a shelf whose owner was asked carries it out") {
    Owned owned;
    std::unique_ptr<Writer> heir;
    const Progress meanwhile = [&](std::uint64_t, std::uint64_t) {
        if (heir) return true;
        owned.owner.reset();
        heir = std::make_unique<Writer>(owned.medium->attach(), config_with(8));
        CHECK(carry_out(*heir));
        return true;
    };
    const PurgeReport report = purge(owned.medium->attach(), {}, meanwhile, {}, milliseconds{2000});
    CHECK(report.pages == kPages);
    CHECK(report.unanswered == 0);
}

TEST_CASE("purge: a process that finds room for a shelf only after it was asked carries it out") {
    Owned owned;
    bool full = true;
    const auto hooks = std::make_shared<HookedCalls>(owned.medium->attach());
    hooks->on_open = [&](const std::string&, OpenMode mode) { return full && mode == OpenMode::create_new ? -ENOSPC : 0; };
    Writer other(hooks, config_with(8));
    REQUIRE_MESSAGE(other.shelf, other.error);
    REQUIRE(other.shelf->own_shelves().empty());
    full = false;
    bool heard = false;
    const Progress meanwhile = [&](std::uint64_t, std::uint64_t) {
        for (int i = 0; i < 4 && !heard; ++i) heard = other.shelf->poll().purge.id != 0;
        return carry_out(*owned.owner);
    };
    purge(owned.medium->attach(), {}, meanwhile, {}, kLong);
    CHECK(heard);
    CHECK(other.shelf->own_shelves().size() == 1);
}

TEST_CASE("purge: one that throws leaves no slot claimed, and no segment that can never be given back") {
    Owned owned;
    Claims claims;
    claims.on_claim = [] { throw std::bad_alloc(); };
    PurgeReport report;
    CHECK_THROWS_AS(owned.owner->shelf->purge({}, claims, report), std::bad_alloc);
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::to_size;
    claims.on_claim = {};
    owned.owner->shelf->purge(order, claims, report);
    CHECK(report.segments == 2);
    CHECK(owned.owner->shelf->allocated_bytes() == 0);
}

TEST_CASE("purge: a segment whose file cannot be removed keeps its pages") {
    Owned owned;
    owned.owner.reset();
    const auto hooks = std::make_shared<HookedCalls>(owned.medium->attach());
    Writer owner(hooks, shelf_config(kCap));
    REQUIRE(owner.found.size() == kPages);
    hooks->remove_error = -EIO;
    Claims claims;
    PurgeReport report;
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::to_size;
    owner.shelf->purge(order, claims, report);
    CHECK(report.segments == 0);
    CHECK(report.pages == 0);
    CHECK(claims.gone.empty());
    CHECK(served(owner, 0, kPages) == kPages);
    hooks->remove_error = 0;
    owner.shelf->purge(order, claims, report);
    CHECK(report.segments == 2);
    CHECK(report.pages == kPages);
    CHECK(report.bytes == kPages * kSlotBytes);
    CHECK(claims.gone.size() == 2);
    CHECK(owner.shelf->allocated_bytes() == 0);
}

TEST_CASE("purge: a slot that another page came into meanwhile does not count as in use") {
    for (const bool named : {false, true}) {
        CAPTURE(named);
        Owned owned;
        Claims claims;
        claims.grants = false;
        claims.on_claim = [&] {
            if (claims.claimed > 1) return;
            const FingerprintPage other(50, named ? key_of(0x11) : key_of(0x12));
            REQUIRE(owned.owner->write(owned.owner->empty[0], other) == OpStatus::ok);
        };
        PurgeOrder order;
        order.kind = PurgeOrder::Kind::spaces;
        order.keys.insert(key_of(0x11));
        PurgeReport report;
        owned.owner->shelf->purge(order, claims, report);
        CHECK(report.used_pages == (named ? kPages : kPages - 1));
        CHECK(report.used_bytes == report.used_pages * kSlotBytes);
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
