// How pages come up from the slab and the disk, and how they go down.
#include "stage.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST_CASE("moves: a page goes all the way down, and comes back from every tier") {
    Stage stage({.gpu_rows = 2, .cpu_rows = 4, .disk = true});
    stage.serve({1, 2});
    CHECK(stage.has(Tier::gpu, {1, 2}));
    CHECK(stage.has(Tier::cpu, {1, 2}));
    CHECK(stage.has(Tier::disk, {1, 2}));

    stage.serve({3, 4});  // pushes them out of the device
    CHECK_FALSE(stage.has(Tier::gpu, {1}));
    const LeaseId warm = stage.lease({1, 2});
    CHECK(stage.at(warm).matched == 2);
    CHECK_FALSE(stage.at(warm).settled);
    CHECK(stage.copies.front().up);
    stage.finish_copy(true);
    CHECK(stage.at(warm).settled);
    CHECK(stage.at(warm).hit == 2);
    CHECK(stage.at(warm).source == std::vector<Tier>(2, Tier::cpu));
    stage.release(warm);

    for (std::int32_t page = 10; page < 18; page += 2) stage.serve({page, page + 1});  // out of the slab too
    CHECK_FALSE(stage.has(Tier::cpu, {1}));
    const LeaseId cold = stage.lease({1, 2});
    CHECK(stage.at(cold).source == std::vector<Tier>(2, Tier::disk));
    CHECK(stage.count(OpKind::read) == 2);
    stage.finish_all();
    CHECK(stage.at(cold).settled);
    CHECK(stage.at(cold).hit == 2);
    CHECK(stage.driver.counters().used[static_cast<int>(Tier::disk)] == 0);
    stage.publish(cold, 2);
    CHECK(stage.driver.counters().loaded[static_cast<int>(Tier::disk)] == 2);
    CHECK(stage.driver.counters().used[static_cast<int>(Tier::disk)] == 2);
}

TEST_CASE("moves: pages of an earlier run are found by their keys") {
    Stage stage({.disk = true});
    stage.find_on_disk({1, 2, 3});
    const LeaseId id = stage.lease({1, 2, 9});
    CHECK(stage.at(id).matched == 2);
    CHECK(stage.ops.front().page.key == stage.key({1}));
    CHECK(stage.ops.front().page.content.tokens.front() == 1);
    stage.finish_all();
    CHECK(stage.at(id).hit == 2);
    stage.publish(id, 3);
    stage.finish_all();
    CHECK(stage.driver.counters().writes == 1);  // only what was not there
}

TEST_CASE("moves: that a page on disk was used is noted once a minute, from whichever tier it came") {
    Stage stage({.gpu_rows = 2, .cpu_rows = 4, .disk = true});
    const auto noted = [&] {
        std::vector<std::pair<SlotRef, std::uint32_t>> uses;
        for (const SlotUse& use : stage.driver.take_uses()) uses.emplace_back(use.slot, use.time);
        return uses;
    };
    const auto slot = [&](const Tokens& tokens) { return stage.driver.ledger().index().at(stage.page(tokens)->entry).slot; };
    stage.serve({1, 2});
    stage.serve({1, 2});
    CHECK(noted().empty());                                                      // they were written just now
    for (const Tokens& others : {Tokens{}, Tokens{3, 4}, Tokens{5, 6, 7, 8}}) {  // from the device, the slab, the disk
        for (std::size_t at = 0; at < others.size(); at += 2) stage.serve({others[at], others[at + 1]});
        stage.pass(100);
        const auto now = static_cast<std::uint32_t>(stage.now);
        stage.serve({1, 2});
        stage.serve({1, 2});
        CHECK(noted() == std::vector{std::pair{slot({1}), now}, std::pair{slot({1, 2}), now}});
    }
    stage.find_on_disk({20, 21});  // when it was used in an earlier run its record tells; now it was
    stage.serve({20, 21});
    CHECK(noted().size() == 2);
    stage.driver.add_shared(stage.key({30}), stage.space, {90, 0}, false);
    stage.serve({30});
    CHECK(stage.has(Tier::disk, {30}));
    CHECK(noted().empty());  // that slot is another process's
}

TEST_CASE("moves: whoever wants a page on its way joins") {
    Stage stage({.disk = true});
    stage.find_on_disk({1, 2});
    const LeaseId one = stage.lease({1, 2, 3}), two = stage.lease({1, 2, 4});
    CHECK(stage.count(OpKind::read) == 2);
    CHECK(stage.at(two).rows[0] == stage.at(one).rows[0]);
    stage.finish(OpKind::read);
    const LeaseId three = stage.lease({1, 2});  // one page is being copied up, one is still read
    CHECK(stage.count(OpKind::read) == 1);
    stage.finish_all();
    for (const LeaseId id : {one, two, three}) CHECK(stage.at(id).hit == 2);
    CHECK(stage.driver.counters().reads == 2);
    CHECK(stage.driver.counters().ups == 2);
}

TEST_CASE("moves: a load goes on when the lease that started it is cancelled, for those that joined") {
    Stage stage({.disk = true});
    stage.find_on_disk({1});
    const LeaseId one = stage.lease({1, 2}), two = stage.lease({1, 3});
    stage.release(one);
    stage.finish_all();
    CHECK(stage.at(two).hit == 1);
    CHECK(stage.driver.counters().reads == 1);
}

TEST_CASE("moves: a lease can be cancelled at every point of its load, and nothing is left") {
    for (int point = 0; point < 5; ++point) {
        CAPTURE(point);
        Stage stage({.gpu_rows = 2, .cpu_rows = 2, .disk = true, .reads_at_once = 1});
        stage.find_on_disk({1, 2});
        const LeaseId id = stage.lease({1, 2});
        if (point > 0) stage.finish(OpKind::read);
        if (point > 1) stage.finish_copy(true);
        if (point > 2) stage.finish(OpKind::read);
        if (point > 3) stage.finish_copy(true);
        stage.release(id);
        stage.finish_all();
        CHECK(stage.driver.idle());
        CHECK(stage.driver.leases() == 0);
        const LeaseId all = stage.lease({8, 9});  // every row can be had
        CHECK(stage.at(all).rows.size() == 2);
    }
}

TEST_CASE("moves: a hit is cut where a page fails, for all who wait for it, and each has rows to compute the rest") {
    Stage stage({.gpu_rows = 8, .disk = true});
    stage.find_on_disk({1, 2, 3});
    const LeaseId longer = stage.lease({1, 2, 3}), shorter = stage.lease({1, 2});
    stage.finish(OpKind::read);
    stage.finish(OpKind::read, OpStatus::unreadable);
    stage.finish_all();
    for (const LeaseId id : {longer, shorter}) {
        CHECK(stage.at(id).settled);
        CHECK(stage.at(id).hit == 1);
        CHECK_FALSE(stage.at(id).rows_lost);
        CHECK(stage.at(id).own[0] == 0);
        CHECK(stage.at(id).own[1] == 1);
    }
    CHECK(stage.at(longer).rows[0] == stage.at(shorter).rows[0]);
    CHECK(stage.at(longer).rows[1] != stage.at(shorter).rows[1]);
    CHECK(stage.publish(longer, 3) == 3);
    CHECK(stage.publish(shorter, 2) == 2);
}

TEST_CASE("moves: a hit that is cut stays a multiple") {
    Stage stage({.disk = true});
    stage.find_on_disk({1, 2, 3, 4});
    const LeaseId id = stage.lease({1, 2, 3, 4}, {.space = {}, .tokens = {}, .media = {}, .multiple = 2});
    CHECK(stage.at(id).matched == 4);
    for (int page = 1; page <= 3; ++page) stage.finish(OpKind::read);
    stage.finish(OpKind::read, OpStatus::unreadable);
    stage.finish_all();
    CHECK(stage.at(id).hit == 2);
}

TEST_CASE("moves: rows that a cut hit cannot have are lost, and the lease says so") {
    Stage stage({.gpu_rows = 2, .disk = true});
    stage.find_on_disk({1, 2});
    const LeaseId one = stage.lease({1, 2}), two = stage.lease({1, 2});  // two rows for both
    stage.finish(OpKind::read, OpStatus::unreadable);
    stage.finish_all();
    CHECK(stage.at(one).hit == 0);
    CHECK(stage.at(two).hit == 0);
    CHECK(stage.at(one).rows_lost != stage.at(two).rows_lost);
    stage.release(one);
    stage.release(two);
    CHECK(stage.driver.ledger().free_rows(Tier::gpu) == 2);
}

TEST_CASE("moves: a row that only the cut pages kept is used for the pages to compute") {
    Stage stage({.gpu_rows = 2, .disk = true});
    stage.find_on_disk({1, 2});
    const LeaseId id = stage.lease({1, 2});
    const Op first = stage.take(OpKind::read);
    stage.finish(OpKind::read);
    stage.finish_copy(true);
    CHECK(stage.has(Tier::gpu, {1, 2}));
    stage.finish(first, OpStatus::corrupt);
    CHECK(stage.at(id).settled);
    CHECK(stage.at(id).hit == 0);
    CHECK_FALSE(stage.at(id).rows_lost);  // the row of 2 was free for it
    CHECK(stage.at(id).own == std::vector<std::uint8_t>{1, 1});
}

TEST_CASE("moves: settling gives up what is not on its way to the device") {
    Stage stage({.gpu_rows = 4, .disk = true});
    stage.find_on_disk({1, 2, 3});
    const LeaseId id = stage.lease({1, 2, 3});
    stage.finish(OpKind::read);  // the copy up is under way
    stage.settle(id);
    CHECK_FALSE(stage.at(id).settled);
    CHECK(stage.at(id).hit == 1);
    stage.finish_copy(true);
    CHECK(stage.at(id).settled);
    CHECK(stage.at(id).hit == 1);
    stage.finish_all();
    CHECK(stage.has(Tier::cpu, {1, 2, 3}));  // the reads were not for nothing
}

TEST_CASE("moves: nothing is published below a page that is on its way for somebody else") {
    Stage stage({.disk = true});
    stage.find_on_disk({1});
    const LeaseId reader = stage.lease({1, 5});
    const LeaseId writer = stage.lease({1, 2}, {.space = {}, .tokens = {}, .media = {}, .read = false});
    CHECK(stage.publish(writer, 2) == 0);
    stage.finish(OpKind::read, OpStatus::corrupt);
    CHECK(stage.at(reader).hit == 0);
    CHECK(stage.publish(writer, 2) == 2);  // now it is the first
    CHECK(stage.page({1})->row[0] == stage.at(writer).rows[0]);
}

TEST_CASE("moves: a page published while its load is under way is saved when that fails") {
    Stage stage({.disk = true});
    stage.find_on_disk({1});
    const LeaseId reader = stage.lease({1});
    stage.release(reader);
    stage.serve({1});
    CHECK(stage.has(Tier::cpu, {1}));
    Stage again({.disk = true});
    again.find_on_disk({1});
    again.release(again.lease({1}));
    const Op read = again.take(OpKind::read);
    const LeaseId writer = again.lease({1}, {.space = {}, .tokens = {}, .media = {}, .read = false});
    again.publish(writer, 1, 6);
    CHECK(again.copies.empty());  // the slab will have it from the disk
    again.finish(read, OpStatus::corrupt);
    REQUIRE(again.copies.size() == 1);
    CHECK(again.copies.front().fence == 6);
    again.finish_all();
    CHECK(again.has(Tier::cpu, {1}));
    CHECK(again.has(Tier::disk, {1}));
}

TEST_CASE("moves: copies wait for the batches that write or may still read their rows") {
    Stage stage({.gpu_rows = 1, .cpu_rows = 4});
    const LeaseId id = stage.lease({1});
    stage.publish(id, 1, 3);
    CHECK(stage.copies.front().fence == 3);
    stage.finish_all();
    stage.release(id, 5);
    stage.serve({2});
    stage.finish_all();
    stage.lease({1});  // into the row that batch 5 may still read
    CHECK(stage.copies.front().up);
    CHECK(stage.copies.front().fence == 5);
}

TEST_CASE("moves: large batches of copies are cut") {
    Stage stage({.gpu_rows = 8, .copy_rows = 3});
    const LeaseId id = stage.lease({1, 2, 3, 4, 5, 6, 7});
    stage.publish(id, 7);
    REQUIRE(stage.copies.size() == 3);
    CHECK(stage.copies[0].slab.size() == 3);
    CHECK(stage.copies[2].slab.size() == 1);
}

TEST_CASE("moves: no more pages are on their way down than keeps the device busy, so that the others may go") {
    Stage stage({.gpu_rows = 6, .cpu_rows = 8, .copy_rows = 1, .saves_at_once = 2});
    const LeaseId id = stage.lease({1, 2, 3, 4, 5, 6});
    stage.publish(id, 6);
    stage.release(id);
    CHECK(stage.copies.size() == 2);
    CHECK(stage.lease({10, 11, 12, 13}, {.space = {}, .tokens = {}, .media = {}, .read = false}) != 0);  // 3 to 6 went for it
    for (int saved = 0; saved < 2; ++saved) stage.finish_copy(false);
    CHECK(stage.copies.empty());
    CHECK(stage.has(Tier::cpu, {1, 2}));
    CHECK(stage.driver.counters().saves_dropped == 4);
}

TEST_CASE("moves: a failed copy down is forgotten, a failed copy up cuts the hit") {
    Stage stage({.gpu_rows = 2, .cpu_rows = 4});
    const LeaseId id = stage.lease({1});
    stage.publish(id, 1);
    stage.finish_copy(false, false);
    CHECK_FALSE(stage.has(Tier::cpu, {1}));
    CHECK(stage.has(Tier::gpu, {1}));
    stage.release(id);
    stage.serve({2});
    stage.serve({3, 4});
    const LeaseId warm = stage.lease({2});
    stage.finish_copy(true, false);
    CHECK(stage.at(warm).settled);
    CHECK(stage.at(warm).hit == 0);
    CHECK(stage.at(warm).own[0] == 1);
    CHECK(stage.has(Tier::cpu, {2}));  // its bytes there are as good as before
    CHECK(stage.driver.counters().copy_failures == 2);
}

TEST_CASE("moves: half the slab may wait for the disk, whatever is published") {
    Stage stage({.gpu_rows = 8, .cpu_rows = 4, .disk = true});
    const LeaseId id = stage.lease({1, 2, 3, 4, 5, 6});
    stage.publish(id, 6);
    std::size_t rows = 0;
    for (const CopyBatch& copy : stage.copies) rows += copy.slab.size();
    CHECK(rows == 2);
    stage.finish_all();
    for (std::size_t pages = 1; pages <= 6; ++pages) {
        const Tokens all{1, 2, 3, 4, 5, 6};
        CHECK(stage.has(Tier::disk, Tokens(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(pages))));
    }
}

TEST_CASE("moves: a slab of one row is enough") {
    Stage stage({.gpu_rows = 3, .cpu_rows = 1, .disk = true});
    stage.serve({1, 2, 3});
    CHECK(stage.has(Tier::disk, {1, 2, 3}));
    stage.serve({7, 8, 9});
    const LeaseId id = stage.lease({1, 2, 3});
    stage.finish_all();
    CHECK(stage.at(id).hit == 3);
}
