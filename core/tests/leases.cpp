// What a lease gets, keeps and gives back.
#include <set>

#include "stage.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST_CASE("lease: a prefix that was published is found, by whoever asks for it in the same namespace") {
    Stage stage({});
    stage.serve({1, 2, 3});
    const LeaseId longer = stage.lease({1, 2, 3, 4, 5});
    CHECK(stage.at(longer).settled);
    CHECK(stage.at(longer).hit == 3);
    const LeaseId branch = stage.lease({1, 2, 9});
    CHECK(stage.at(branch).hit == 2);
    CHECK(stage.at(branch).rows[1] == stage.at(longer).rows[1]);  // shared
    CHECK(stage.at(branch).rows[2] != stage.at(longer).rows[2]);
    stage.space = key_of(0x22);
    CHECK(stage.at(stage.lease({1})).hit == 0);
}

TEST_CASE("lease: leave, read and write mean what they say") {
    Stage stage({.gpu_rows = 16});
    stage.serve({1, 2, 3});
    LeaseRequest request{.space = stage.space, .tokens = {}, .media = {}};
    const Tokens tokens{1, 2, 3};
    request.tokens = tokens;
    request.leave = 1;
    CHECK(stage.at(stage.driver.lease(stage.now, request).id).hit == 2);
    request.leave = 4;
    CHECK(stage.at(stage.driver.lease(stage.now, request).id).hit == 0);
    CHECK(stage.at(stage.lease(tokens, {.space = {}, .tokens = {}, .media = {}, .read = false})).hit == 0);
    const LeaseId silent = stage.lease({7, 8}, {.space = {}, .tokens = {}, .media = {}, .write = false});
    CHECK(stage.publish(silent, 2) == 0);
    CHECK(stage.page({7}) == nullptr);
}

TEST_CASE("lease: a hit is a multiple of what the engine computes at once") {
    Stage stage({});
    stage.serve({1, 2, 3});
    const LeaseId pairs = stage.lease({1, 2, 3, 4}, {.space = {}, .tokens = {}, .media = {}, .multiple = 2});
    CHECK(stage.at(pairs).hit == 2);
    CHECK(stage.at(pairs).own == std::vector<std::uint8_t>{0, 0, 1, 1});
}

TEST_CASE("lease: media are part of what is found") {
    Stage stage({.gpu_rows = 16});
    const MediaSpan cat{.offset = 1, .length = 2, .digest = key_of(0xCA)}, dog{.offset = 1, .length = 2, .digest = key_of(0xD0)};
    const auto with = [](const std::span<const MediaSpan> media) {
        return LeaseRequest{.space = {}, .tokens = {}, .media = media};
    };
    const LeaseId first = stage.lease({5, 0, 0, 6}, with({&cat, 1}));
    stage.publish(first, 4);
    CHECK(stage.at(stage.lease({5, 0, 0, 6}, with({&cat, 1}))).hit == 4);
    CHECK(stage.at(stage.lease({5, 0, 0, 6}, with({&dog, 1}))).hit == 1);
    CHECK(stage.at(stage.lease({5, 0, 0, 6})).hit == 1);
}

TEST_CASE("lease: generated tokens are published page by page, and rows grow") {
    Stage stage({.gpu_rows = 4});
    const LeaseId id = stage.lease({1, 2});
    CHECK(stage.publish(id, 1) == 1);
    CHECK_FALSE(stage.has(Tier::gpu, {1, 2}));
    CHECK(stage.publish(id, 5) == 2);  // no more than its tokens
    stage.driver.append(id, Tokens{3, 4, 5});
    CHECK(stage.publish(id, 5) == 2);  // no more than its rows
    CHECK(stage.driver.grow(stage.now, id, 2));
    CHECK_FALSE(stage.driver.grow(stage.now, id, 1));
    CHECK(stage.at(id).rows.size() == 4);
    CHECK(stage.publish(id, 5) == 4);
    stage.release(id);
    CHECK(stage.at(stage.lease({1, 2, 3, 4})).hit == 4);
}

TEST_CASE("lease: the first writer wins, and both go on") {
    Stage stage({});
    const LeaseId one = stage.lease({1, 2, 3}), two = stage.lease({1, 2, 4});
    CHECK(stage.publish(one, 3) == 3);
    CHECK(stage.publish(two, 3) == 3);
    CHECK(stage.driver.counters().duplicates == 2);
    std::set<Row> rows(stage.at(one).rows.begin(), stage.at(one).rows.end());
    rows.insert(stage.at(two).rows.begin(), stage.at(two).rows.end());
    CHECK(rows.size() == 6);
    CHECK(stage.page({1, 2})->row[0] == stage.at(one).rows[1]);
    stage.release(two);
    CHECK(stage.driver.ledger().free_rows(Tier::gpu) == 4);  // its copies of 1 and 2 came back
    CHECK(stage.at(stage.lease({1, 2, 4})).hit == 3);
}

TEST_CASE("lease: all in use is an answer, with numbers; so is never") {
    Stage stage({.gpu_rows = 4});
    stage.serve({7});
    const LeaseId holder = stage.lease({1, 2, 3});
    CHECK(stage.publish(holder, 3) == 3);
    const LeaseAnswer full = stage.ask({1, 8, 9});
    CHECK(full.id == 0);
    CHECK_FALSE(full.never);
    CHECK(full.needed == 2);
    CHECK(full.available == 1);
    CHECK(stage.has(Tier::gpu, {7}));  // nothing was evicted for a lease that was not given
    const LeaseAnswer never = stage.ask({1, 2, 3, 4, 5});
    CHECK(never.id == 0);
    CHECK(never.never);
    stage.finish_all();
    stage.release(holder);
    CHECK(stage.ask({1, 8, 9}).id != 0);
}

TEST_CASE("lease: taking rows spares what was just found, and the namespace itself") {
    Stage stage({.gpu_rows = 2, .cpu_rows = 0});
    stage.serve({1});
    stage.serve({2});
    const LeaseId id = stage.lease({1, 3});  // needs a row: 2 goes, though 1 is as little in use
    CHECK(stage.at(id).hit == 1);
    CHECK_FALSE(stage.has(Tier::gpu, {2}));
    stage.release(id);
    const LeaseId other = stage.lease({8, 9});  // all pages of the namespace go; its root is this lease's
    CHECK(stage.publish(other, 2) == 2);
    stage.release(other);
    CHECK(stage.at(stage.lease({8, 9})).hit == 2);
}

TEST_CASE("lease: taking rows spares a page above a gap on the device") {
    Stage stage({.gpu_rows = 3, .cpu_rows = 3});
    stage.serve({1, 2, 3});
    Ledger& ledger = stage.driver.ledger();
    const PageId one = ledger.child(ledger.root(stage.space), {Tokens{1}, {}});
    ledger.drop(Tier::gpu, ledger.child(one, {Tokens{2}, {}}));
    REQUIRE(stage.has(Tier::gpu, {1, 2, 3}));
    const LeaseId id = stage.lease({1, 2, 3});
    const std::vector<Row>& rows = stage.at(id).rows;
    CHECK(std::set<Row>(rows.begin(), rows.end()).size() == 3);
    CHECK(stage.has(Tier::gpu, {1}));
}

TEST_CASE("lease: release gives everything back, twice does no harm, and unknown leases are nobody's") {
    Stage stage({.gpu_rows = 4, .cpu_rows = 0});
    const LeaseId id = stage.lease({1, 2}, {.space = {}, .tokens = {}, .media = {}, .reserve = 2});
    CHECK(stage.driver.ledger().free_rows(Tier::gpu) == 0);
    stage.publish(id, 1);
    stage.release(id);
    stage.release(id);
    CHECK(stage.driver.ledger().free_rows(Tier::gpu) == 3);
    CHECK(stage.driver.leases() == 0);
    CHECK(stage.driver.find(id) == nullptr);
    CHECK(stage.publish(id, 2) == 0);
    CHECK_FALSE(stage.driver.grow(stage.now, 4711, 1));
    stage.settle(4711);
    stage.driver.append(4711, Tokens{1});
    stage.driver.copied(stage.now, 4711, true);
    CHECK(stage.driver.load(stage.now, 4711, 0, {}) == 0);
    CHECK(stage.driver.save(stage.now, 4711, 0, {}, 0) == 0);
}
