// What the driver does when the disk or the device is late, ill, full or wrong.
#include <cerrno>
#include <limits>

#include "stage.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("hardship: a read past its deadline cuts the hit; its row comes back with it, and so does the page") {
    Stage stage({.cpu_rows = 1, .disk = true});
    stage.find_on_disk({1});
    const LeaseId id = stage.lease({1});
    const Op read = stage.take(OpKind::read);
    CHECK(stage.driver.next_deadline() == stage.now + 5);
    stage.pass(5);
    CHECK(stage.at(id).settled);
    CHECK(stage.at(id).hit == 0);
    CHECK(stage.driver.counters().timeouts == 1);
    CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 0);  // the read may still write into it
    CHECK(stage.driver.next_deadline() == kNever);
    stage.pass(60);
    CHECK(stage.at(stage.lease({1})).matched == 0);  // a second read would only hang too
    stage.finish(read);
    CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 1);
    CHECK_FALSE(stage.has(Tier::cpu, {1}));
    const LeaseId again = stage.lease({1}, {.space = {}, .tokens = {}, .media = {}, .reserve = 0});
    CHECK(stage.at(again).matched == 1);
    stage.finish_all();
    CHECK(stage.at(again).hit == 1);
    stage.finish(read);  // and once more: nobody's
    CHECK(stage.driver.counters().late_completions == 2);
}

TEST_CASE("hardship: a late read finds its page stored anew, and harms nobody") {
    Stage stage({.gpu_rows = 2, .cpu_rows = 2, .disk = true});
    stage.find_on_disk({1});
    stage.release(stage.lease({1}));
    const Op read = stage.take(OpKind::read);
    stage.pass(5);
    stage.serve({1});
    CHECK(stage.has(Tier::cpu, {1}));
    const Row row = stage.page({1})->row[1];
    CHECK(row != read.row);
    stage.finish(read, OpStatus::corrupt);
    CHECK(stage.has(Tier::cpu, {1}));
    CHECK(stage.page({1})->row[1] == row);
}

TEST_CASE("hardship: when all reads hang nothing is promised from disk until one comes back") {
    Stage stage({.disk = true, .reads_at_once = 2});
    stage.find_on_disk({1, 2, 3});
    const LeaseId id = stage.lease({1, 2, 3});
    const Op first = stage.take(OpKind::read), second = stage.take(OpKind::read);
    stage.pass(5);
    CHECK(stage.at(id).settled);
    CHECK(stage.ops.empty());  // the third was not tried
    stage.release(id);
    stage.find_on_disk({7});
    stage.pass(1000);
    CHECK(stage.at(stage.lease({7})).matched == 0);
    stage.finish(first);
    CHECK(stage.at(stage.lease({7, 8})).matched == 1);
    CHECK(stage.count(OpKind::read) == 1);
    stage.finish(second);
    stage.finish_all();
}

TEST_CASE("hardship: three reads late in a row pause the tier for a while") {
    Stage stage({.disk = true});
    stage.find_on_disk({1, 2, 3});
    stage.find_on_disk({7});
    const LeaseId id = stage.lease({1, 2, 3});
    stage.pass(5);
    CHECK(stage.at(id).hit == 0);
    CHECK(stage.at(stage.lease({7})).matched == 0);
    stage.pass(5);
    CHECK(stage.at(stage.lease({7})).matched == 1);
}

TEST_CASE("hardship: a load that finds no row in the slab is given up in time, and says when") {
    Stage stage({.gpu_rows = 4, .cpu_rows = 1, .disk = true});
    stage.find_on_disk({1});
    stage.find_on_disk({2});
    stage.release(stage.lease({1}));
    const Op hangs = stage.take(OpKind::read);  // has the only row
    stage.pass(1);
    const LeaseId id = stage.lease({2});
    CHECK(stage.ops.empty());
    stage.pass(4);  // the first is past its deadline, its row stays lost
    CHECK_FALSE(stage.at(id).settled);
    CHECK(stage.driver.next_deadline() == stage.now + 1);
    stage.pass(1);
    CHECK(stage.at(id).settled);
    CHECK(stage.at(id).hit == 0);
    stage.finish(hangs);
    CHECK(stage.driver.idle());
}

TEST_CASE("hardship: two guests that hold the slab against each other both get what there is") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 3, .disk = true});
    stage.find_on_disk({1, 2});
    stage.find_on_disk({7, 8});
    const LeaseId one = stage.lease({1, 2}), two = stage.lease({7, 8});
    for (int read = 0; read < 3; ++read) stage.finish(OpKind::read);
    CHECK(stage.at(one).settled);
    CHECK_FALSE(stage.at(two).settled);
    stage.pass(5);
    CHECK(stage.at(one).hit == 2);
    CHECK(stage.at(two).hit == 1);
}

TEST_CASE("hardship: damaged pages are dropped and their slots used again, unreadable ones kept") {
    Stage stage({.disk = true});
    stage.find_on_disk({1});
    stage.find_on_disk({2});
    stage.lease({1});
    stage.finish(OpKind::read, OpStatus::corrupt);
    CHECK(stage.driver.ledger().find_entry(stage.key({1})) == kNoEntry);
    stage.finish(OpKind::clear);
    CHECK(stage.driver.ledger().has_free_slot());
    stage.lease({2});
    stage.finish(OpKind::read, OpStatus::unreadable);
    CHECK(stage.driver.ledger().find_entry(stage.key({2})) != kNoEntry);
    CHECK(stage.at(stage.lease({2})).matched == 0);
    stage.pass(5);
    CHECK(stage.at(stage.lease({2})).matched == 1);
    CHECK(stage.driver.counters().corrupt == 1);
    CHECK(stage.driver.counters().unreadable == 1);
}

TEST_CASE("A1: a page whose key is another page's is computed, kept in memory, and never served from that other's slot") {
    Stage stage({.gpu_rows = 1, .cpu_rows = 1, .disk = true});
    // The disk holds some page under the key that {1} has.
    stage.driver.add_found(stage.key({1}), stage.space, {0, 0});
    const LeaseId id = stage.lease({1});
    CHECK(stage.at(id).matched == 1);
    stage.finish(OpKind::read, OpStatus::conflict);
    CHECK(stage.at(id).hit == 0);
    CHECK(stage.driver.ledger().find_entry(stage.key({1})) != kNoEntry);  // it is not ours to drop
    CHECK_FALSE(stage.has(Tier::disk, {1}));
    CHECK(stage.publish(id, 1) == 1);
    stage.finish_all();
    CHECK(stage.has(Tier::cpu, {1}));
    CHECK(stage.driver.counters().writes == 0);
    CHECK(stage.driver.counters().key_conflicts > 0);
}

TEST_CASE("hardship: a failed write pauses writing, and it resumes; what is in the slab stays") {
    Stage stage({.disk = true, .writes_at_once = 1});
    stage.publish(stage.lease({1, 2}), 2);
    stage.finish_copy(false);
    stage.finish(OpKind::grow);
    stage.finish(OpKind::write, OpStatus::full);
    CHECK(stage.ops.empty());  // the second waits for nothing
    CHECK(stage.has(Tier::cpu, {1, 2}));
    CHECK(stage.driver.counters().spills_dropped == 2);
    CHECK(stage.driver.idle());
    stage.publish(stage.lease({3}), 1);
    stage.finish_all();
    CHECK(stage.driver.counters().writes == 0);
    stage.pass(5);
    stage.publish(stage.lease({4}), 1);
    stage.finish_all();
    CHECK(stage.has(Tier::disk, {4}));
}

TEST_CASE("hardship: no room to grow overwrites what was used least") {
    Stage stage({.disk = true});
    stage.serve({1});
    stage.serve({2});
    stage.serve({3});
    stage.serve({4});  // four slots
    const LeaseId id = stage.lease({5});
    stage.publish(id, 1);
    stage.finish_copy(false);
    stage.finish(OpKind::grow, OpStatus::full);
    stage.finish_all();
    CHECK(stage.has(Tier::disk, {5}));
    CHECK_FALSE(stage.has(Tier::disk, {1}));
    CHECK(stage.has(Tier::disk, {2}));
}

TEST_CASE("hardship: no room at all is asked for again later") {
    Stage stage({.disk = true});
    stage.publish(stage.lease({1}), 1);
    stage.finish_copy(false);
    stage.finish(OpKind::grow, OpStatus::full);
    CHECK(stage.driver.idle());
    stage.publish(stage.lease({2}), 1);
    stage.finish_all();
    CHECK(stage.segments == 1);  // not asked again yet
    stage.pass(5);
    stage.publish(stage.lease({3}), 1);
    stage.finish_all();
    CHECK(stage.has(Tier::disk, {3}));
}

TEST_CASE("hardship: a growing that never ends does not stop what can go on") {
    Stage stage({.disk = true});
    stage.serve({1, 2, 3, 4});
    stage.publish(stage.lease({5}), 1);
    stage.finish_copy(false);
    const Op grow = stage.take(OpKind::grow);
    CHECK_FALSE(stage.driver.idle());
    stage.pass(30);
    CHECK(stage.count(OpKind::write) == 1);  // over the least used page
    stage.finish_all();
    CHECK(stage.has(Tier::disk, {5}));
    stage.pass(100);
    stage.serve({6});
    CHECK(stage.segments == 1);  // it is not asked twice
    stage.finish(grow);
    stage.serve({7});
    CHECK(stage.has(Tier::disk, {7}));
    CHECK(stage.driver.counters().late_completions == 1);
}

TEST_CASE("hardship: writes that hang hold their rows and nothing else") {
    Stage stage({.gpu_rows = 8, .cpu_rows = 4, .disk = true, .writes_at_once = 2});
    const LeaseId id = stage.lease({1, 2, 3, 4});
    stage.publish(id, 4);
    stage.finish_copy(false);
    stage.finish(OpKind::grow);
    const Op first = stage.take(OpKind::write), second = stage.take(OpKind::write);
    stage.pass(30);
    stage.finish_all();  // the others are saved to the slab, and not written
    CHECK(stage.has(Tier::cpu, {1, 2, 3, 4}));
    CHECK(stage.count(OpKind::write) == 0);
    stage.pass(1000);
    stage.serve({5, 6});
    CHECK(stage.has(Tier::cpu, {5, 6}));  // in the two rows that are left
    CHECK(stage.driver.counters().writes == 0);
    CHECK(stage.driver.idle());
    stage.finish(first);
    CHECK(stage.has(Tier::disk, {1}));
    stage.pass(5);
    stage.serve({7});
    CHECK(stage.has(Tier::disk, {7}));
    stage.finish(second, OpStatus::failed);
    CHECK_FALSE(stage.has(Tier::disk, {1, 2}));
}

TEST_CASE("hardship: a copy past its deadline is given up; its rows come back with it") {
    Stage stage({.gpu_rows = 2, .cpu_rows = 3});
    stage.serve({1});
    stage.serve({2, 3});
    const LeaseId id = stage.lease({1});
    const CopyBatch up = stage.take_copy(true);
    stage.pass(30);
    CHECK(stage.at(id).settled);
    CHECK(stage.at(id).hit == 0);
    CHECK(stage.at(id).rows[0] != up.device[0]);  // that one may still be written
    CHECK(stage.ask({8, 9}).available == 0);
    stage.finish_copy(up);
    CHECK(stage.driver.ledger().free_rows(Tier::gpu) == 1);
    stage.release(id);

    const LeaseId writer = stage.lease({5});
    stage.publish(writer, 1);
    const CopyBatch down = stage.take_copy(false);
    stage.pass(30);
    stage.release(writer);
    stage.finish_all();
    CHECK_FALSE(stage.has(Tier::cpu, {5}));
    CHECK(stage.has(Tier::gpu, {5}));
    const LeaseAnswer both = stage.ask({8, 9});  // the late copy still reads the row of 5
    CHECK(both.id == 0);
    stage.finish_copy(down);
    CHECK(stage.ask({8, 9}).id != 0);
}

TEST_CASE("hardship: a segment that is gone takes its pages and its slots with it; others stay") {
    Stage stage({.disk = true});
    stage.find_on_disk({1, 2});
    stage.find_on_disk({7});
    stage.driver.add_slot({0, 9});
    stage.driver.add_slot({1, 9});
    stage.driver.retire_segment(0);
    stage.check();
    CHECK(stage.driver.ledger().free_slots() == 1);
    CHECK(stage.driver.ledger().resident(Tier::disk) == 1);
    CHECK(stage.driver.ledger().counters(Tier::disk).dropped == 2);
    CHECK(stage.at(stage.lease({1, 2})).matched == 0);
    CHECK(stage.at(stage.lease({7})).matched == 1);
    stage.driver.add_slot({0, 3});  // told late
    stage.driver.add_found(stage.key({5}), stage.space, {0, 4});
    stage.check();
    CHECK(stage.driver.ledger().free_slots() == 1);
    CHECK(stage.driver.ledger().find_entry(stage.key({5})) == kNoEntry);
}

TEST_CASE("hardship: what is read or written when its segment goes ends first, and is then forgotten") {
    for (const OpStatus status : {OpStatus::ok, OpStatus::unreadable, OpStatus::stale, OpStatus::corrupt}) {
        Stage stage({.disk = true});
        stage.find_on_disk({1, 2});
        const LeaseId id = stage.lease({1, 2});
        const Op first = stage.take(OpKind::read), second = stage.take(OpKind::read);
        stage.driver.retire_segment(0);
        stage.check();
        CHECK(stage.driver.ledger().index().size() == 2);
        stage.finish(first);
        stage.finish(second, status);
        stage.finish_all();
        CHECK(stage.driver.ledger().index().size() == 0);
        CHECK(stage.at(id).hit == (status == OpStatus::ok ? 2 : 1));
        CHECK(stage.driver.health().sentence() == "ok");  // the file is gone, the disk is not ill
    }
    for (const OpStatus status : {OpStatus::ok, OpStatus::failed}) {
        Stage stage({.disk = true});
        stage.publish(stage.lease({1}), 1);
        stage.finish_copy(false);
        stage.finish(OpKind::grow);
        const Op write = stage.take(OpKind::write);
        stage.driver.retire_segment(write.slot.segment);
        stage.finish(write, status);
        CHECK(stage.driver.ledger().index().size() == 0);
        CHECK(stage.driver.ledger().free_slots() == 0);
        CHECK(stage.driver.health().sentence() == "ok");
        stage.serve({1});  // used again, it is written again
        CHECK(stage.has(Tier::disk, {1}));
    }
}

TEST_CASE("hardship: a page that was not written when the disk was full is written when it is used after that") {
    Stage stage({.disk = true});
    stage.publish(stage.lease({1}), 1);
    stage.finish_copy(false);
    stage.finish(OpKind::grow, OpStatus::full);
    CHECK_FALSE(stage.has(Tier::disk, {1}));
    stage.serve({1});  // too early
    CHECK(stage.driver.counters().spills_dropped == 1);
    stage.pass(5);
    stage.serve({1});
    CHECK(stage.has(Tier::disk, {1}));
    CHECK(stage.driver.counters().writes == 1);
    stage.serve({1});
    CHECK(stage.driver.counters().writes == 1);
}

TEST_CASE("health: one sentence while the disk is ill, from the first failure to the first success") {
    Stage stage({.disk = true, .writes_at_once = 1});
    const DiskHealth& health = stage.driver.health();
    CHECK(health.sentence() == "ok");
    CHECK(health.since() == 0);
    stage.publish(stage.lease({1}), 1);
    stage.finish_copy(false);
    stage.finish(OpKind::grow);
    Completion done{.id = stage.take(OpKind::write).id, .status = OpStatus::failed, .error = EIO, .slots = {}, .lost = {}};
    stage.step({done});
    CHECK(health.sentence() == "no new pages: Input/output error");
    CHECK(health.since() == stage.now);
    CHECK(health.changes() == 1);
    stage.pass(5);
    stage.publish(stage.lease({2}), 1);
    stage.finish_copy(false);
    stage.take(OpKind::write);
    stage.pass(30);
    CHECK(health.sentence() == "no new pages: writes do not come back");
    CHECK(health.since() == 100);  // still the same trouble
    CHECK(health.changes() == 2);
    stage.find_on_disk({7});
    stage.lease({7});
    stage.finish(OpKind::read, OpStatus::unreadable);
    CHECK(health.sentence() == "no new pages: writes do not come back; pages are not read: reads fail");
    stage.pass(5);
    stage.lease({7});
    stage.finish(OpKind::read);
    CHECK(health.sentence() == "no new pages: writes do not come back");
    CHECK(health.changes() == 4);
}
