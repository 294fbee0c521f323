// Adjacent pages in one request, by threads and by io_uring: fewer requests, every page still by itself.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <set>

#include "../disk_posix.hpp"
#include "../disk_sim.hpp"
#include "../op_queue.hpp"
#include "../ring.hpp"
#include "../slot_run.hpp"
#include "folder.hpp"
#include "hooked_disk.hpp"
#include "io_bench.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kCap = 64ull << 20;  // segments of 1 MiB: 84 slots

std::size_t good(const std::vector<OpStatus>& statuses) { return std::size_t(std::ranges::count(statuses, OpStatus::ok)); }

std::shared_ptr<Disk> real_disk(const Folder& folder) {
    std::string error;
    auto disk = PosixDisk::open_root(folder.path, error);
    REQUIRE_MESSAGE(disk, error);
    return disk;
}

// Runs a test with threads, and with io_uring where this machine has it.
template <class Test>
void with_both(Test test) {
    for (const bool ring : {false, true}) {
        if (ring && !Ring::open()) {
            MESSAGE("no io_uring here");
            continue;
        }
        CAPTURE(ring);
        test(IoPoolConfig{.ring = ring});
    }
}

std::uint64_t offset_of(std::uint32_t slot) { return 16384 + slot * kSlotBytes; }  // in a segment of 84 slots

}  // namespace

TEST_CASE("queue: what is taken together adjoins, the first in line is always among it, nothing is lost") {
    std::mt19937 random(3);
    for (int round = 0; round < 200; ++round) {
        OpQueue queue;
        std::vector<Op> waiting;
        const std::size_t count = 1 + random() % 60;
        for (std::uint64_t id = 0; id < count; ++id) {
            Op op;
            op.id = id;
            op.kind = OpKind(random() % 4);
            op.slot = {std::uint32_t(random() % 2), std::uint32_t(random() % 30)};
            waiting.push_back(op);
            queue.push(Op(op));
        }
        std::set<std::uint64_t> seen;
        const std::size_t most = 1 + random() % 12;
        while (!queue.empty()) {
            const auto first = std::ranges::find_if(waiting, [&](const Op& op) { return !seen.contains(op.id); });
            const std::size_t before = queue.size();
            const std::vector<Op> taken = queue.take(most);
            CHECK(queue.size() == before - taken.size());
            REQUIRE(!taken.empty());
            CHECK(taken.size() <= most);
            CHECK(std::ranges::count(taken, first->id, &Op::id) == 1);
            for (std::size_t i = 0; i < taken.size(); ++i) {
                CHECK(seen.insert(taken[i].id).second);
                CHECK(taken[i].kind == first->kind);
                CHECK((taken.size() == 1 || first->kind == OpKind::read || first->kind == OpKind::write));
                CHECK(taken[i].slot == SlotRef{first->slot.segment, std::uint32_t(taken[0].slot.slot + i)});
                CHECK(waiting[taken[i].id].slot == taken[i].slot);
            }
        }
        CHECK(seen.size() == count);
    }
}

TEST_CASE("queue: a prefix in any order goes in one piece") {
    OpQueue queue;
    for (const std::uint32_t slot : {7, 5, 6, 9, 8, 20}) {
        Op op;
        op.slot = {0, slot};
        queue.push(std::move(op));
    }
    CHECK(queue.take(100).size() == 5);
    CHECK(queue.size() == 1);
}

TEST_CASE("E7: adjacent pages share large requests, straight from and to their rows") {
    with_both([](const IoPoolConfig& config) {
        const Folder folder;
        IoBench bench(real_disk(folder), config, kCap);
        const std::vector<SlotRef> slots = bench.grow();
        REQUIRE(slots.size() > 60);
        const auto pages = pages_from(0, 60);
        CHECK(good(bench.move(OpKind::write, std::span(slots).first(60), pages)) == 60);
        CHECK(good(bench.move(OpKind::read, std::span(slots).first(60), pages)) == 60);
        const IoStats stats = bench.pool->stats();
        CHECK(stats.ring == config.ring);
        for (const std::uint64_t pages_moved : {stats.read_pages, stats.write_pages}) CHECK(pages_moved == 60);
        for (const std::uint64_t bytes : {stats.read_bytes, stats.write_bytes}) CHECK(bytes == 60 * kSlotBytes);
        CHECK(stats.read_bytes / stats.read_requests >= 256 * 1024);
        CHECK(stats.write_bytes / stats.write_requests >= 256 * 1024);
        CHECK(bench.pool->close(milliseconds{5000}) == 0);
        bench.shelf->close();
        Writer heir(real_disk(folder), shelf_config(kCap));
        CHECK(served(heir, 0, 60) == 60);
    });
}

TEST_CASE("E7: no staging: the kernel reads into the slab's rows and writes from them") {
    const auto medium = SimMedium::make(1);
    std::set<const void*> bases;
    std::mutex mutex;
    const auto hook = [&](bool, std::span<const iovec> parts, std::uint64_t) {
        const std::lock_guard lock(mutex);
        for (const iovec& part : parts) bases.insert(part.iov_base);
        return 0;
    };
    IoBench bench(std::make_shared<HookedDisk>(medium->attach(), hook), {}, kCap);
    const std::vector<SlotRef> slots = bench.grow();
    const auto pages = pages_from(0, 20);
    for (const OpKind kind : {OpKind::write, OpKind::read}) {
        bases.clear();
        CHECK(good(bench.move(kind, std::span(slots).first(20), pages)) == 20);
        for (Row row = 0; row < 20; ++row) CHECK(bases.contains(bench.slab->row(row)));
    }
}

TEST_CASE("runs: pages that do not adjoin, other segments and single pages work as before") {
    with_both([](const IoPoolConfig& config) {
        const Folder folder;
        IoBench bench(real_disk(folder), config, 1 << 20);
        for (int i = 0; i < 10; ++i) bench.grow();
        std::vector<SlotRef> slots = bench.slots;
        std::shuffle(slots.begin(), slots.end(), std::mt19937(4));
        const auto pages = pages_from(100, slots.size());
        CHECK(good(bench.move(OpKind::write, slots, pages)) == slots.size());
        CHECK(good(bench.move(OpKind::read, slots, pages)) == slots.size());
        const std::vector<SlotRef> one{slots[3]};
        CHECK(bench.move(OpKind::read, one, pages_from(999, 1))[0] == OpStatus::stale);
        CHECK(bench.move(OpKind::read, std::vector<SlotRef>{{50, 0}}, pages)[0] == OpStatus::unreadable);
        CHECK(bench.move(OpKind::write, std::vector<SlotRef>{{50, 0}}, pages)[0] == OpStatus::failed);
        CHECK(bench.pool->close(milliseconds{5000}) == 0);
    });
}

TEST_CASE("runs: one bad page among adjacent ones is found, and only that one") {
    with_both([](const IoPoolConfig& config) {
        const Folder folder;
        const auto disk = real_disk(folder);
        IoBench bench(disk, config, kCap);
        const std::vector<SlotRef> slots = bench.grow();
        const auto pages = pages_from(0, 20);
        CHECK(good(bench.move(OpKind::write, std::span(slots).first(20), pages)) == 20);
        std::vector<DirEntry> shelves;
        disk->list("shelves", shelves);
        const int file = disk->open("shelves/" + shelves.at(0).name + "/seg-000001.kvs", OpenMode::update);
        std::byte wrong{0x5A};
        const iovec part{&wrong, 1};
        REQUIRE(disk->pwritev(file, {&part, 1}, offset_of(7) + 4096 + 1000) == 1);
        disk->close(file);
        const auto statuses = bench.move(OpKind::read, std::span(slots).first(20), pages);
        CHECK(good(statuses) == 19);
        CHECK(statuses[7] == OpStatus::corrupt);
        CHECK(bench.pool->stats().read_requests <= 2);
    });
}

TEST_CASE("runs: a page that cannot be read or written fails alone") {
    const auto medium = SimMedium::make(1);
    std::atomic<std::uint64_t> bad{0};
    std::atomic<int> error{EIO};
    const auto hook = [&](bool, std::span<const iovec> parts, std::uint64_t offset) {
        const std::uint64_t at = bad.load();
        return at >= 16384 && offset <= at && at < offset + bytes_of(parts) ? -error.load() : 0;
    };
    IoBench bench(std::make_shared<HookedDisk>(medium->attach(), hook), {}, kCap);
    const std::vector<SlotRef> slots = bench.grow();
    const auto all = std::span(slots).first(10);
    const auto pages = pages_from(0, 10);
    bad = offset_of(4) + 8192;
    for (const auto& [number, status] : {std::pair{EIO, OpStatus::failed}, {EROFS, OpStatus::failed}, {ENOSPC, OpStatus::full}}) {
        error = number;
        const auto written = bench.move(OpKind::write, all, pages);
        CHECK(good(written) == 9);
        CHECK(written[4] == status);
    }
    bad = 0;
    CHECK(good(bench.move(OpKind::write, all, pages)) == 10);
    bad = offset_of(9) + 100;
    const auto read = bench.move(OpKind::read, all, pages);
    CHECK(good(read) == 9);
    CHECK(read[9] == OpStatus::unreadable);
}

TEST_CASE("runs: any operation fails, or all from there on: acknowledged pages are found, found pages are exact") {
    constexpr std::uint64_t kSmall = 300 * 1024;
    std::uint64_t operations = 0;
    for (std::uint64_t n = 0; n <= operations; ++n) {
        for (const int how : {0, 1, 2, 3}) {
            CAPTURE(n);
            CAPTURE(how);
            const auto medium = SimMedium::make(n + 1);
            std::set<std::uint32_t> claimed;
            {
                Writer writer(medium->attach(), shelf_config(kSmall));
                REQUIRE(writer.grow() == OpStatus::ok);
                const AlignedBuffer rows(4 * kRowStride);
                const auto run = [&](OpKind kind, const std::vector<FingerprintPage>& pages) {
                    std::vector<Op> ops(4);
                    std::vector<std::byte*> its_rows;
                    for (std::size_t i = 0; i < 4; ++i) {
                        ops[i].kind = kind;
                        ops[i].id = i;
                        ops[i].slot = {0, std::uint32_t(i)};
                        ops[i].page = pages[i].image();
                        its_rows.push_back(rows.data() + i * kRowStride);
                        if (kind == OpKind::write) pages[i].fill(its_rows[i]);
                    }
                    const auto slots = writer.shelf->begin(ops, its_rows);
                    const int result = slots->prepare();
                    return writer.shelf->finish(*slots, result == 0 ? slots->transfer().run() : result, false);
                };
                const auto old_pages = pages_from(0, 4), new_pages = pages_from(10, 4);
                for (const Completion& done : run(OpKind::write, old_pages)) REQUIRE(done.status == OpStatus::ok);
                medium->set_faults({.fail_at = n, .and_after = how == 1, .shorten = how == 2});
                for (const Completion& done : run(OpKind::write, new_pages)) {
                    if (done.status == OpStatus::ok) claimed.insert(std::uint32_t(10 + done.id));
                }
                if (how == 3) medium->set_faults({.fail_at = 1});
                const auto read = run(OpKind::read, new_pages);
                for (std::size_t i = 0; i < 4; ++i) {
                    if (read[i].status == OpStatus::ok) CHECK(new_pages[i].matches(rows.data() + i * kRowStride));
                }
                if (n == 0 && how == 0) operations = medium->operations();
                if (how == 0 || how == 2 || how == 3) CHECK(claimed.size() == 4);  // what failed once worked the second time
                medium->set_faults({});
            }
            Writer heir(medium->attach(), shelf_config(kSmall));
            for (const std::uint32_t number : claimed) CHECK(heir.find(FingerprintPage(number)));
            for (const FoundPage& found : heir.found) {
                const FingerprintPage page(found.last_use - 1);
                CHECK(found.key == page.key);
                CHECK(heir.read(found.slot, page) == OpStatus::ok);
            }
        }
    }
    CHECK(operations == 5);  // free records, slots, set records, tell others; slots
}

TEST_CASE("ring: a request that the kernel does not answer keeps nobody waiting, and close leaves it behind") {
    if (!Ring::open()) return;
    // A file whose reads the kernel answers only when we write into a pipe.
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const Folder folder;
    const auto disk = std::make_shared<HookedDisk>(real_disk(folder), [](auto&&...) { return 0; });
    disk->through = true;
    IoBench bench(disk, {.threads = 1, .requests = 2, .hangs_after = milliseconds{20}}, 1 << 20);
    bench.grow();
    bench.grow();
    const auto pages = pages_from(0, 8);
    CHECK(good(bench.move(OpKind::write, bench.slots, pages)) == 8);
    disk->instead = ends[0];
    const std::uint64_t before = bench.last_id;
    for (const std::size_t i : {0, 2}) {  // not adjacent: two requests, all there may be at once
        bench.pool->submit({bench.op(OpKind::read, bench.slots[i], Row(20 + i), &pages[i])});
        while (bench.pool->stats().hanging < i / 2 + 1) std::this_thread::yield();
    }
    disk->instead = -1;
    bench.pool->submit({bench.op(OpKind::read, bench.slots[5], 30, &pages[5])});
    REQUIRE(bench.inbox->wait(before + 1));
    CHECK(pages[5].matches(bench.slab->row(30)));
    CHECK(bench.inbox->order().back() == bench.last_id);
    CHECK(bench.pool->close(milliseconds{20}) == 2);
    const std::weak_ptr<Slab> slab = bench.slab;
    bench.pool.reset();
    bench.slab.reset();
    CHECK_FALSE(slab.expired());  // the kernel may still write into it
    close(ends[1]);               // the reads end
    while (!slab.expired()) std::this_thread::yield();
    CHECK(bench.inbox->size() == before + 1);
    close(ends[0]);
}
