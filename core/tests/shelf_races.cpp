// What may happen between two operations of a shelf: closes, purges, rebuilds, other processes, just then.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "../directory.hpp"
#include "../disk_sim.hpp"
#include "../driver.hpp"
#include "../io_pool.hpp"
#include "../purge.hpp"
#include "../slot_run.hpp"
#include "fingerprint.hpp"
#include "hooked_disk.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

struct Yes : ShelfClaims {
    bool claim(SlotRef, const Key*) override { return true; }
    void done(SlotRef) override {}
    void retired(std::uint32_t) override {}
};

Op write_of(SlotRef slot, const FingerprintPage& page) {
    Op op;
    op.id = 99;
    op.kind = OpKind::write;
    op.slot = slot;
    op.row = 0;
    op.page = page.image();
    return op;
}

void give_all_back(Shelf& shelf) {
    Yes claims;
    PurgeReport report;
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::to_size;
    shelf.purge(order, claims, report);
    REQUIRE(report.segments > 0);
}

}  // namespace

// An I/O thread has found the segment and not opened its file yet (it computes checksums). Meanwhile the segment is given back, and a new one is
// made, with the smallest number that is free.
TEST_CASE("races: a late write does not end in another segment of its segment's name") {
    const auto medium = SimMedium::make(1);
    {
        Writer writer(medium->attach(), shelf_config(kCap));
        REQUIRE(writer.grow() == OpStatus::ok);
        const FingerprintPage late(4), page(2);
        AlignedBuffer row(kRowStride);
        late.fill(row.data());
        const auto run = writer.shelf->begin({write_of(writer.empty[0], late)}, {row.data()});
        REQUIRE(run);
        give_all_back(*writer.shelf);
        writer.empty.clear();
        REQUIRE(writer.grow() == OpStatus::ok);
        REQUIRE(writer.write(writer.empty[0], page) == OpStatus::ok);  // acknowledged
        const int late_file = run->prepare();                          // its file is gone, and its name is nobody else's
        CHECK(late_file == -ENOENT);
        CHECK(writer.shelf->finish(*run, late_file, false)[0].status == OpStatus::failed);
        CHECK(writer.read(writer.empty[0], page) == OpStatus::ok);
    }
    Writer heir(medium->attach(), shelf_config(kCap));
    CHECK(heir.find(FingerprintPage(2)) != nullptr);
    CHECK(served(heir, 2, 1) == 1);
}

// Somebody opens the file just before it is unlinked: that handle is of a file without a name.
TEST_CASE("races: a new segment is not written through a handle of the removed file of its name") {
    const auto medium = SimMedium::make(1);
    {
        const auto hooks = std::make_shared<HookedCalls>(medium->attach());
        Writer writer(hooks, shelf_config(kCap));
        REQUIRE(writer.grow() == OpStatus::ok);
        const FingerprintPage late(4), page(2);
        AlignedBuffer row(kRowStride);
        late.fill(row.data());
        const auto run = writer.shelf->begin({write_of(writer.empty[0], late)}, {row.data()});
        hooks->on_remove = [&](const std::string&) { CHECK(run->prepare() == 0); };
        give_all_back(*writer.shelf);
        writer.shelf->finish(*run, run->transfer().run(), false);
        writer.empty.clear();
        REQUIRE(writer.grow() == OpStatus::ok);
        REQUIRE(writer.write(writer.empty[0], page) == OpStatus::ok);  // acknowledged
        std::uint64_t in_file = 0;
        for (const std::string& path : medium->files())
            if (path.ends_with(".kvs")) medium->edit(path, [&](auto& bytes) { in_file = bytes.size(); });
        CHECK(in_file == writer.shelf->allocated_bytes());
    }
    Writer heir(medium->attach(), shelf_config(kCap));
    CHECK(served(heir, 2, 1) == 1);
}

// The background rebuild adds to the list that a grow takes from. (AddressSanitizer.)
TEST_CASE("races: a rebuild while a grow makes room") {
    const auto medium = SimMedium::make(1);
    ShelfConfig other = shelf_config(kCap);
    other.row_bytes = 3000;
    other.row_stride = 4096;
    other.planes = {{0, 3000}};
    {
        Writer before(medium->attach(), other);
        while (before.grow() == OpStatus::ok) {
        }
    }
    int number = 0;
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs") && number++ % 2 == 0)
            medium->edit(path, [](auto& bytes) { std::fill_n(bytes.begin(), 4096, std::byte{0}); });
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer writer(hooks, shelf_config(kCap));
    REQUIRE(writer.shelf->has_news());
    const std::size_t others = writer.shelf->stats().other_segments;
    REQUIRE(others > 0);
    hooks->on_remove = [&](const std::string&) {  // what the chore thread does just then
        while (writer.shelf->has_news()) writer.shelf->next_news();
    };
    writer.grow();
    CHECK(writer.shelf->stats().other_segments > 0);
}

TEST_CASE("races: nothing is taken while a neighbour, whose cap may be lower, cannot be read") {
    const std::uint64_t small = 700 << 10;
    for (const int error : {-EMFILE, -EIO}) {
        CAPTURE(error);
        const auto medium = SimMedium::make(1);
        Writer first(medium->attach(), shelf_config(small));
        ShelfConfig wide = shelf_config(4 << 20);
        wide.seed = 9;
        const auto hooks = std::make_shared<HookedCalls>(medium->attach());
        Writer second(hooks, wide);
        while (second.grow() == OpStatus::ok) {
        }
        REQUIRE(medium->allocated_bytes() <= small);
        hooks->on_open = [&](const std::string& path, OpenMode) { return path.ends_with("/owner") ? error : 0; };
        for (int i = 0; i < 4; ++i) second.grow();
        CHECK(medium->allocated_bytes() <= small);
    }
}

TEST_CASE("purge: what a killed purge asked is not asked by the next one") {
    const auto medium = SimMedium::make(1);
    Writer owner(medium->attach(), shelf_config(kCap));
    REQUIRE(owner.grow() == OpStatus::ok);
    {
        int error = 0;
        const auto killed = medium->attach();
        const auto requests = File::open(killed, PurgeRequest::kPath, OpenMode::create, error);
        REQUIRE(write_request(*requests, {.id = 7, .order = {}}) == 0);  // purge --all
    }
    CHECK(owner.shelf->poll().purge.id == 0);
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    std::uint64_t heard = 0;
    hooks->on_list = [&] {                                      // purge(): begin_asking() is done, survey() begins
        Writer newcomer(medium->attach(), shelf_config(kCap));  // any reason for the owner to look
        for (int i = 0; i < 4; ++i) heard |= owner.shelf->poll().purge.id;
    };
    PurgeOrder old;
    old.kind = PurgeOrder::Kind::unused;
    old.before = 1;
    purge(hooks, old, {}, {}, milliseconds{0});
    CHECK(heard != 7);  // it would drop everything
}

// The file takes 32 bytes a page.
TEST_CASE("purge: asking keeps to the cap") {
    const auto medium = SimMedium::make(1);
    std::uint64_t cap = 32 << 20;
    {
        Writer writer(medium->attach(), shelf_config(cap));
        fill(writer, 0);
        writer.shelf->close();
    }
    cap = medium->allocated_bytes() + Directory::kSlackBytes;
    Writer owner(medium->attach(), shelf_config(cap));
    REQUIRE_MESSAGE(owner.shelf, owner.error);
    const std::size_t pages = owner.found.size();
    REQUIRE(pages > 2000);
    PurgeOrder order;
    order.kind = PurgeOrder::Kind::prefix;
    for (const FoundPage& page : owner.found) order.keys.insert(page.key);
    REQUIRE(medium->allocated_bytes() <= cap);
    purge(medium->attach(), order, {}, {}, milliseconds{0});
    const std::int64_t over = std::int64_t(medium->peak_bytes()) - std::int64_t(cap);
    CHECK(over <= 0);
}

TEST_CASE("pool: an errand runs while reads keep coming, without io_uring too") {
    std::string error;
    std::shared_ptr<Slab> slab = Slab::make({.rows = 16, .row_stride = kRowStride}, error);
    std::shared_ptr<Shelf> shelf = Shelf::open(SimMedium::make(1)->attach(), shelf_config(kCap), error);
    REQUIRE(shelf);
    std::vector<Op> ops;
    std::vector<FingerprintPage> pages;
    for (std::uint32_t i = 0; i < 8; ++i) pages.emplace_back(i);
    for (std::uint32_t i = 0; i < 8; ++i) {
        Op grow;
        grow.kind = OpKind::grow;
        const Completion made = shelf->execute(grow, nullptr);
        REQUIRE(made.status == OpStatus::ok);
        Op op = write_of(made.slots[0], pages[i]);
        op.row = Row(i);
        op.id = i;
        pages[i].fill(slab->row(Row(i)));
        REQUIRE(shelf->execute(op, slab->row(Row(i))).status == OpStatus::ok);
        op.kind = OpKind::read;
        ops.push_back(op);
    }
    std::atomic<bool> stop{false}, ran{false};
    std::atomic<std::uint64_t> reads{0};
    IoPool* pool = nullptr;
    const auto sink = [&](std::span<Completion> done) {  // a disk that is busy with reads: eight at once, in eight segments
        std::vector<Op> again;
        for (const Completion& one : done) again.push_back(ops[one.id]);
        reads += done.size();
        if (!stop) pool->submit(std::move(again));
    };
    IoPool made(shelf, slab, {.threads = 4, .ring = false}, sink);
    pool = &made;
    made.submit(std::vector<Op>(ops));
    made.errand([&] { ran = true; });
    for (int i = 0; i < 3000 && !ran; ++i) std::this_thread::sleep_for(milliseconds{10});
    CHECK(ran);
    stop = true;
    made.close(milliseconds{1000});
}

// Closing does not wait for what takes long (a large table, a disk that stalls). (AddressSanitizer.)
TEST_CASE("races: closed while it takes another shelf over") {
    const auto medium = SimMedium::make(1);
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer owner(hooks, shelf_config(kCap));
    {
        ShelfConfig config = shelf_config(kCap);
        config.seed = 9;
        Writer other(medium->attach(), config);
        REQUIRE(other.grow() == OpStatus::ok);
        REQUIRE(other.write(other.empty[0], FingerprintPage(2)) == OpStatus::ok);
        for (int i = 0; i < 8; ++i) owner.shelf->poll();
        owner.settle();
        REQUIRE(owner.shelf->stats().owners == 2);
    }
    bool closed = false;
    hooks->on_open = [&](const std::string& path, OpenMode) {
        if (!closed && path.ends_with(".kvs")) {
            closed = true;
            std::thread([&] { owner.shelf->close(); }).join();  // Runtime::close(), when the I/O threads were not idle in time
        }
        return 0;
    };
    for (int i = 0; i < 8; ++i) owner.shelf->poll();
    CHECK(closed);
}

TEST_CASE("races: closed while it finds another's shelf gone") {
    const auto medium = SimMedium::make(1);
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer owner(hooks, shelf_config(kCap));
    {
        ShelfConfig config = shelf_config(kCap);
        config.seed = 9;
        Writer other(medium->attach(), config);
        REQUIRE(other.grow() == OpStatus::ok);
        REQUIRE(other.write(other.empty[0], FingerprintPage(2)) == OpStatus::ok);
        for (int i = 0; i < 8; ++i) owner.shelf->poll();
        owner.settle();
    }
    purge(medium->attach(), {}, {});  // takes its shelf, and removes it
    bool closed = false;
    hooks->on_open = [&](const std::string& path, OpenMode) {
        if (!closed && path.ends_with("/owner")) closed = true;
        return 0;
    };
    const auto list = [&] { std::thread([&] { owner.shelf->close(); }).join(); };
    hooks->on_shelves = list;
    for (int i = 0; i < 8; ++i) owner.shelf->poll();
}

TEST_CASE("races: closed while it grows") {
    const auto medium = SimMedium::make(1);
    ShelfConfig other = shelf_config(kCap);
    other.row_bytes = 3000;
    other.row_stride = 4096;
    other.planes = {{0, 3000}};
    {
        Writer before(medium->attach(), other);
        while (before.grow() == OpStatus::ok) {
        }
    }
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer writer(hooks, shelf_config(kCap));
    REQUIRE(writer.shelf->stats().other_segments > 0);
    hooks->on_remove = [&](const std::string&) { std::thread([&] { writer.shelf->close(); }).join(); };
    writer.grow();
}

TEST_CASE("purge: pages that are still to be rebuilt go too, or are told") {
    const auto medium = SimMedium::make(1);
    {
        Writer before(medium->attach(), shelf_config(kCap));
        REQUIRE(before.grow() == OpStatus::ok);
        for (std::uint32_t i = 0; i < 4; ++i) REQUIRE(before.write(before.empty[i], FingerprintPage(i)) == OpStatus::ok);
    }
    for (const std::string& path : medium->files())
        if (path.ends_with(".kvs")) medium->edit(path, [](auto& bytes) { std::fill_n(bytes.begin() + 4096, 4096, std::byte{0}); });
    Driver driver({.ledger = {.page_size = kPageSize, .gpu_rows = 0, .cpu_rows = 4}, .disk = true}, make_lru());
    Writer writer(medium->attach(), shelf_config(kCap));
    struct Claims : ShelfClaims {  // as Runtime::purge_now has it
        explicit Claims(Driver& the_driver) : driver(the_driver) {}
        bool claim(SlotRef slot, const Key* page) override { return driver.claim_slot(1, slot, page); }
        void done(SlotRef slot) override { driver.add_slot(slot); }
        void retired(std::uint32_t) override {}
        Driver& driver;
    } claims(driver);
    REQUIRE(writer.found.empty());
    PurgeReport report;
    writer.shelf->purge({}, claims, report);
    writer.settle();
    CHECK(writer.found.size() <= report.used_pages);  // `done` is true
}

TEST_CASE("races: a lowered limit is acknowledged while a purge goes on") {
    const auto medium = SimMedium::make(1);
    Writer owner(medium->attach(), shelf_config(kCap));
    fill(owner, 0);
    std::uint64_t unacknowledged = 99;
    struct Claims : ShelfClaims {
        bool claim(SlotRef, const Key*) override {
            if (first) std::exchange(first, {})();
            return true;
        }
        void done(SlotRef) override {}
        void retired(std::uint32_t) override {}
        std::function<void()> first;
    } claims;
    claims.first = [&] {
        std::atomic<bool> over{false};
        std::thread poller([&] {
            while (!over) {
                owner.shelf->poll();
                std::this_thread::sleep_for(milliseconds{50});
            }
        });
        ShelfConfig lower = shelf_config(kCap / 2);
        lower.seed = 9;
        lower.await_others = std::chrono::seconds{30};
        Writer second(medium->attach(), lower);
        REQUIRE_MESSAGE(second.shelf, second.error);
        unacknowledged = second.shelf->stats().unacknowledged;
        over = true;
        poller.join();
    };
    PurgeReport report;
    owner.shelf->purge({}, claims, report);
    CHECK(unacknowledged == 0);
}

TEST_CASE("pool: a long errand is no thread that hangs") {
    std::string error;
    std::shared_ptr<Slab> slab = Slab::make({.rows = 16, .row_stride = kRowStride}, error);
    std::shared_ptr<Shelf> shelf = Shelf::open(SimMedium::make(1)->attach(), shelf_config(kCap), error);
    IoPool pool(shelf, slab, {.threads = 2, .hangs_after = milliseconds{100}}, [](std::span<Completion>) {});
    std::atomic<bool> over{false};
    pool.errand([&] {
        while (!over) std::this_thread::sleep_for(milliseconds{5});
    });
    std::this_thread::sleep_for(milliseconds{300});
    const IoStats stats = pool.stats();
    over = true;
    CHECK(stats.hanging == 0);
    CHECK(stats.replaced == 0);
    pool.close(milliseconds{1000});
}

// While the object is still referred to.
TEST_CASE("races: a grow that ends after close gives the shelf up") {
    const auto medium = SimMedium::make(1);
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer writer(hooks, shelf_config(kCap));
    REQUIRE(writer.grow() == OpStatus::ok);
    REQUIRE(writer.write(writer.empty[0], FingerprintPage(2)) == OpStatus::ok);
    bool closed = false;
    hooks->on_open = [&](const std::string& path, OpenMode mode) {
        if (!closed && mode == OpenMode::create_new && path.ends_with(".kvs")) {
            closed = true;
            std::thread([&] { writer.shelf->close(); }).join();
        }
        return 0;
    };
    writer.grow();
    REQUIRE(closed);
    ShelfConfig config = shelf_config(kCap);
    config.seed = 9;
    Writer heir(medium->attach(), config);  // while the closed one is still referred to
    CHECK(served(heir, 2, 1) == 1);
}

TEST_CASE("races: a grow that hangs holds up nobody who asks for the shelves' names") {
    const auto medium = SimMedium::make(1);
    const auto hooks = std::make_shared<HookedCalls>(medium->attach());
    Writer writer(hooks, shelf_config(kCap));
    std::atomic<bool> go_on{false}, there{false};
    hooks->on_open = [&](const std::string& path, OpenMode mode) {
        if (mode == OpenMode::create_new && path.ends_with(".kvs")) {
            there = true;
            while (!go_on) std::this_thread::sleep_for(milliseconds{5});
        }
        return 0;
    };
    std::thread grower([&] { writer.grow(); });
    while (!there) std::this_thread::sleep_for(milliseconds{1});
    std::atomic<bool> answered{false};
    std::thread asker([&] {
        writer.shelf->own_shelves();
        answered = true;
    });
    for (int i = 0; i < 3000 && !answered; ++i) std::this_thread::sleep_for(milliseconds{10});
    CHECK(answered);
    go_on = true;
    grower.join();
    asker.join();
}
