// Guest mode: the engine owns the device; pages are copied from the slab into its blocks and back.
#include "stage.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// Saves the pages of `tokens` from `first` on, well. Returns whether there was anything to save.
bool save(Stage& stage, const Tokens& tokens, std::uint32_t first = 0) {
    const LeaseId id = stage.lease(tokens);
    const std::vector<Row> blocks(tokens.size() - first, 5);
    const std::uint64_t ticket = stage.driver.save(stage.now, id, first, blocks, 0);
    stage.step();
    stage.release(id);
    stage.finish_all();
    return ticket != 0;
}

}  // namespace

TEST_CASE("guest: pages are saved from the engine's blocks, found, and loaded into others") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 8});
    const LeaseId writer = stage.lease({1, 2, 3});
    CHECK(stage.at(writer).settled);
    CHECK(stage.at(writer).rows.empty());
    const Row from[] = {11, 12, 13};
    CHECK(stage.driver.save(stage.now, writer, 0, from, 4) != 0);
    stage.step();
    REQUIRE(stage.copies.size() == 1);
    CHECK(stage.copies[0].device == std::vector<Row>{11, 12, 13});
    CHECK(stage.copies[0].fence == 4);
    CHECK(stage.at(stage.lease({1, 2, 3})).hit == 0);  // not before the bytes are there
    stage.finish_all();

    const LeaseId reader = stage.lease({1, 2, 3, 4});
    CHECK(stage.at(reader).hit == 3);
    const Row to[] = {21, 22};
    const std::uint64_t ticket = stage.driver.load(stage.now, reader, 1, to);  // the engine holds the first page itself
    stage.step();
    CHECK(stage.driver.copying(ticket));
    CHECK(stage.copies[0].up);
    CHECK(stage.copies[0].device == std::vector<Row>{21, 22});
    CHECK(stage.copies[0].slab[0] == stage.page({1, 2})->row[1]);
    stage.release(reader);  // the copy keeps what it reads
    const LeaseId pressure = stage.lease({7, 8, 9, 10, 11, 12, 13, 14});
    CHECK(stage.driver.save(stage.now, pressure, 0, std::vector<Row>(8, 1), 0) != 0);
    stage.step();
    CHECK(stage.has(Tier::cpu, {1, 2, 3}));
    stage.finish_copy(true);
    CHECK_FALSE(stage.driver.copying(ticket));
}

TEST_CASE("guest: a lease that loads nothing gets what is in the slab, and nothing is read for it") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 8, .disk = true});
    stage.find_on_disk({1, 2, 3, 4});
    const LeaseRequest near{.space = {}, .tokens = {}, .media = {}, .load = false};
    CHECK(stage.at(stage.lease({1, 2, 3, 4}, near)).matched == 0);
    CHECK(stage.count(OpKind::read) == 0);
    const LeaseId two = stage.lease({1, 2});
    CHECK(stage.count(OpKind::read) == 2);
    CHECK(stage.at(stage.lease({1, 2, 3, 4}, near)).matched == 0);  // on their way is not there
    stage.finish_all();
    CHECK(stage.at(two).hit == 2);
    const LeaseId rest = stage.lease({1, 2, 3, 4}, near);
    CHECK(stage.at(rest).settled);
    CHECK(stage.at(rest).hit == 2);
    CHECK(stage.count(OpKind::read) == 0);
    CHECK(stage.at(stage.lease({1, 2, 3, 4})).matched == 4);
    stage.finish_all();
}

TEST_CASE("guest: a save takes only what is missing, and what there is room for") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 3});
    CHECK(save(stage, {1, 2}));
    CHECK_FALSE(save(stage, {1, 2}));
    const LeaseId holder = stage.lease({1, 2});
    CHECK(save(stage, {1, 2, 3, 4}));
    CHECK(stage.has(Tier::cpu, {1, 2, 3}));
    CHECK_FALSE(stage.has(Tier::cpu, {1, 2, 3, 4}));  // deeper than the slab is large
    CHECK(save(stage, {8}));                          // 3 may go, what the lease holds may not
    CHECK(stage.has(Tier::cpu, {1, 2}));
    stage.release(holder);
}

TEST_CASE("guest: a save above what is there may evict below itself") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 1});
    CHECK_FALSE(save(stage, {1, 2}, 1));  // deeper than the slab is large
    Stage two({.gpu_rows = 0, .cpu_rows = 2});
    CHECK(save(two, {1, 2}, 1));  // the page above has a record and no copy
    CHECK(save(two, {7}));
    CHECK(save(two, {1}));
    CHECK(two.has(Tier::cpu, {1}));
    Stage full({.gpu_rows = 0, .cpu_rows = 2});
    CHECK(save(full, {1, 2}, 1));
    CHECK(save(full, {1, 3}, 1));
    CHECK(save(full, {1}));  // its row can only come from a page below it
    CHECK(full.has(Tier::cpu, {1}));
}

TEST_CASE("guest: whoever joined a save that fails takes the page from disk") {
    for (const bool late : {false, true}) {
        CAPTURE(late);
        Stage stage({.gpu_rows = 0, .cpu_rows = 4, .disk = true});
        stage.find_on_disk({1});
        const LeaseId writer = stage.lease({1}, {.space = {}, .tokens = {}, .media = {}, .read = false});
        CHECK(stage.driver.save(stage.now, writer, 0, std::vector<Row>{3}, 0) != 0);
        stage.step();
        const LeaseId reader = stage.lease({1});
        CHECK(stage.at(reader).matched == 1);
        CHECK(stage.ops.empty());
        const CopyBatch copy = stage.take_copy(false);
        if (late)
            stage.pass(600);
        else
            stage.finish_copy(copy, false);
        CHECK(stage.count(OpKind::read) == 1);
        stage.finish_all();
        CHECK(stage.at(reader).hit == 1);
        if (late) stage.finish_copy(copy);
        stage.release(writer);
        stage.release(reader);
        CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 3);
    }
}

TEST_CASE("guest: a save is waited for as long as an engine's step may take") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 4});
    const LeaseId writer = stage.lease({1, 2}, {.space = {}, .tokens = {}, .media = {}, .read = false});
    CHECK(stage.driver.save(stage.now, writer, 0, std::vector<Row>{3, 4}, 0) != 0);
    stage.step();
    stage.pass(300);
    stage.finish_all();
    CHECK(stage.at(stage.lease({1, 2, 3})).hit == 2);
    CHECK(stage.driver.counters().timeouts == 0);
}

TEST_CASE("guest: pages come from disk into the slab, no more than it holds, and stay while the lease does") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 2, .disk = true});
    stage.find_on_disk({1, 2, 3});
    const LeaseId id = stage.lease({1, 2, 3});
    CHECK(stage.at(id).matched == 2);
    stage.finish_all();
    CHECK(stage.at(id).hit == 2);
    CHECK_FALSE(save(stage, {7}));
    CHECK(stage.has(Tier::cpu, {1, 2}));
    stage.release(id);
    CHECK(save(stage, {7}));
    CHECK(stage.has(Tier::cpu, {7}));
}

TEST_CASE("guest: a cancelled load leaves the queue, and its pages can be asked for again") {
    Stage stage({.gpu_rows = 0, .cpu_rows = 4, .disk = true, .reads_at_once = 1});
    stage.find_on_disk({1, 2, 3});
    const LeaseId one = stage.lease({1, 2, 3});
    stage.release(one);
    const LeaseId two = stage.lease({1, 2, 3});
    CHECK(stage.at(two).matched == 3);
    stage.finish_all();
    CHECK(stage.at(two).hit == 3);
    CHECK(stage.driver.counters().reads == 3);
}
