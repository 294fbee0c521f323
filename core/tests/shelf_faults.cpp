// The shelf on a disk that fails: every N-th operation, in every way, and the power going at any of them.
//
// The rule: a page is served exactly or not at all, the cap holds, and once the disk is well again everything works, with nothing lost
// that was acknowledged and neither overwritten nor hit by the power loss.
#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <map>
#include <thread>

#include "../disk_sim.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 300 * 1024;  // five segments of four slots

using Claims = std::map<std::uint32_t, bool>;  // page number -> acknowledged, and nothing was done to its slot since

// A shelf's life: made, grown, filled, partly overwritten and cleared, reopened, read, filled again. Whatever fails is passed over.
void live(const std::shared_ptr<SimMedium>& medium, Claims& claims) {
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> at;  // slot -> page number
    const auto put = [&](Writer& writer, SlotRef slot, std::uint32_t number) {
        if (const auto before = at.find({slot.segment, slot.slot}); before != at.end()) claims[before->second] = false;
        const bool good = writer.write(slot, FingerprintPage(number)) == OpStatus::ok;
        claims[number] = good;
        at[{slot.segment, slot.slot}] = number;
    };
    const auto look = [&](Writer& writer, SlotRef slot, std::uint32_t number) {
        CHECK(writer.read(slot, FingerprintPage(number)) != OpStatus::failed);
    };
    {
        Writer writer(medium->attach(), shelf_config(kCap));
        if (writer.shelf) {
            writer.grow();
            writer.grow();
            std::uint32_t number = 0;
            for (const SlotRef slot : writer.empty) put(writer, slot, number++);
            if (writer.empty.size() >= 8) {
                put(writer, writer.empty[1], 100);
                put(writer, writer.empty[6], 101);
                claims[3] = false;
                writer.run(OpKind::clear, writer.empty[3]);
                put(writer, writer.empty[3], 102);
            }
            for (const auto& [slot, page] : at) look(writer, {slot.first, slot.second}, page);
        }
    }
    at.clear();
    Writer writer(medium->attach(), shelf_config(kCap));
    if (!writer.shelf) return;
    for (std::uint32_t number = 0; number < 103; ++number) {
        const FoundPage* found = writer.find(FingerprintPage(number));
        if (!found) continue;
        at[{found->slot.segment, found->slot.slot}] = number;
        look(writer, found->slot, number);
    }
    writer.grow();
    std::uint32_t number = 200;
    for (const SlotRef slot : writer.empty) put(writer, slot, number++);
}

// After the trouble: all that was acknowledged is there, all that is there is exact, and new pages can be written.
void check_well(const std::shared_ptr<SimMedium>& medium, const Claims& claims, bool all_kept) {
    medium->set_faults({});
    Writer writer(medium->attach(), shelf_config(kCap));
    REQUIRE_MESSAGE(writer.shelf, writer.error);
    for (const auto& claim : claims) {  // clang 14 captures no structured bindings
        const std::uint32_t number = claim.first;
        const bool claimed = claim.second;
        const FingerprintPage page(number);
        const FoundPage* found = writer.find(page);
        if (claimed && all_kept) {
            CAPTURE(number);
            REQUIRE(found);
            CHECK(writer.read(found->slot, page) == OpStatus::ok);
        } else if (found) {
            const OpStatus status = writer.read(found->slot, page);
            CHECK(status != OpStatus::failed);
            if (all_kept) CHECK(status == OpStatus::ok);  // a record never names a page that is not all there
        }
    }
    while (writer.empty.empty() && writer.grow() == OpStatus::ok) {
    }
    const SlotRef slot = writer.empty.empty() ? writer.found.at(0).slot : writer.empty[0];
    CHECK(writer.write(slot, FingerprintPage(999)) == OpStatus::ok);
    CHECK(writer.read(slot, FingerprintPage(999)) == OpStatus::ok);
    CHECK(medium->peak_bytes() <= kCap);
}

std::uint64_t operations_of_a_life() {
    const auto medium = SimMedium::make(1);
    medium->set_faults({});
    Claims claims;
    live(medium, claims);
    const std::uint64_t operations = medium->operations();
    check_well(medium, claims, true);
    CHECK(claims.size() >= 15);
    return operations;
}

}  // namespace

TEST_CASE("fault sweep: each operation fails once, or from there on, with EIO, ENOSPC or a short transfer") {
    const std::uint64_t operations = operations_of_a_life();
    CHECK(operations > 100);
    for (const int error : {EIO, ENOSPC, EROFS, EACCES}) {
        for (const bool and_after : {false, true}) {
            for (const bool shorten : {false, true}) {
                if (shorten && error != EIO) continue;
                for (std::uint64_t n = 1; n <= operations; ++n) {
                    CAPTURE(n);
                    CAPTURE(error);
                    CAPTURE(and_after);
                    CAPTURE(shorten);
                    const auto medium = SimMedium::make(n);
                    medium->set_faults({.fail_at = n, .and_after = and_after, .error = error, .shorten = shorten});
                    Claims claims;
                    live(medium, claims);
                    check_well(medium, claims, true);
                }
            }
        }
    }
}

TEST_CASE("fault sweep: operations fail at random, life after life") {
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
        CAPTURE(seed);
        const auto medium = SimMedium::make(seed);
        for (int life = 0; life < 3; ++life) {
            medium->set_faults({.chance = 0.03 * double(life), .error = seed % 2 == 0 ? EIO : ENOSPC});
            Claims claims;
            live(medium, claims);
            check_well(medium, claims, life == 0);  // later lives write the same pages again, and both copies are found
        }
    }
}

TEST_CASE("power loss at any operation: what is found is exact or a miss, and the shelf works again") {
    const std::uint64_t operations = operations_of_a_life();
    std::size_t kept = 0;
    for (std::uint64_t n = 1; n <= operations; ++n) {
        for (std::uint64_t seed = 0; seed < 6; ++seed) {
            CAPTURE(n);
            CAPTURE(seed);
            const auto medium = SimMedium::make(n);
            medium->set_faults({.fail_at = n, .and_after = true});  // the machine is gone: nothing reaches the disk any more
            Claims claims;
            live(medium, claims);
            medium->crash(n * 1000 + seed);
            medium->set_faults({});
            Writer writer(medium->attach(), shelf_config(kCap));
            REQUIRE_MESSAGE(writer.shelf, writer.error);
            for (std::uint32_t number = 0; number < 220; ++number) {
                const FoundPage* found = writer.find(FingerprintPage(number));
                if (!found) continue;
                const OpStatus status = writer.read(found->slot, FingerprintPage(number));
                CHECK(status != OpStatus::failed);
                kept += status == OpStatus::ok;
            }
            writer.shelf.reset();
            check_well(medium, claims, false);
        }
    }
    CHECK(kept > 1000);
}

TEST_CASE("kill -9 at any operation: all that was acknowledged is found") {
    const std::uint64_t operations = operations_of_a_life();
    for (std::uint64_t n = 1; n <= operations; ++n) {
        CAPTURE(n);
        const auto medium = SimMedium::make(n);
        medium->set_faults({.fail_at = n, .and_after = true});  // a write under way may have reached some of its sectors
        Claims claims;
        live(medium, claims);
        check_well(medium, claims, true);
    }
}

TEST_CASE("C1: the cap holds over restarts, kills and power losses while ten times as much is offered") {
    const auto medium = SimMedium::make(3);
    std::uint32_t number = 0;
    for (std::uint64_t round = 0; round < 30; ++round) {
        const auto disk = medium->attach();
        ShelfConfig config = shelf_config(kCap);
        config.seed = 100 + round;
        if (round % 5 == 4) {  // another model for a while
            config.row_bytes = 3000;
            config.row_stride = 4096;
            config.planes = {{0, 3000}};
        }
        medium->set_faults({.chance = round % 3 == 1 ? 0.02 : 0});
        {
            Writer writer(disk, config);
            while (writer.shelf && writer.grow() == OpStatus::ok) {
            }
            for (const SlotRef slot : writer.empty) writer.write(slot, FingerprintPage(number++ % 500));
            for (const FoundPage& page : writer.found) writer.write(page.slot, FingerprintPage(number++ % 500));
            if (round % 2 == 0) disk->kill();
        }
        CHECK(medium->peak_bytes() <= kCap);
        if (round % 4 == 3) medium->crash(round);
        // A power loss may bring removed files back; the next open has to cope.
        medium->set_faults({});
        Writer heir(medium->attach(), shelf_config(kCap));
        REQUIRE_MESSAGE(heir.shelf, heir.error);
        CHECK(medium->allocated_bytes() <= kCap);
    }
}

TEST_CASE("B11: a disk that stops answering does not hang the start, and gives its shelf back when it wakes up") {
    const auto medium = SimMedium::make(1);
    {
        Writer writer(medium->attach(), shelf_config(kCap));
        REQUIRE(writer.grow() == OpStatus::ok);
        REQUIRE(writer.write(writer.empty[0], FingerprintPage(1)) == OpStatus::ok);
    }
    medium->set_faults({});
    std::string error;
    REQUIRE(Shelf::open(medium->attach(), shelf_config(kCap), error));
    const std::uint64_t operations = medium->operations();
    CHECK(operations > 10);
    for (std::uint64_t n = 1; n <= operations; ++n) {
        CAPTURE(n);
        medium->set_faults({.stall_at = n});
        CHECK_FALSE(Shelf::open(medium->attach(), shelf_config(kCap), error, std::chrono::milliseconds{20}));
        CHECK(error.find("in time") != std::string::npos);
        medium->set_faults({});
        medium->release();
        for (;;) {  // the late opener lets go by itself
            Writer heir(medium->attach(), shelf_config(kCap));
            if (heir.found.size() == 1) break;
            std::this_thread::yield();
        }
    }
}
