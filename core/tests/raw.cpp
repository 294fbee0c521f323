// Pages that a caller puts into the slab and takes out of it himself.
#include "stage.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

RawRows put(Stage& stage, const Tokens& tokens, std::uint32_t first = 0, bool ok = true) {
    const RawRows rows = stage.driver.put(stage.now, stage.space, tokens, first);
    stage.step();
    if (rows.ticket != 0) stage.driver.copied(stage.now, rows.ticket, ok);
    stage.step();
    return rows;
}

std::uint32_t cold(Stage& stage, const Tokens& tokens) { return stage.driver.cold_pages(stage.now, stage.space, tokens); }

std::uint64_t fetch(Stage& stage, const Tokens& tokens, std::uint32_t first = 0, std::uint32_t most = 8) {
    const std::uint64_t id = stage.driver.fetch(stage.now, stage.space, tokens, first, most);
    stage.step();
    return id;
}

void end(Stage& stage, std::uint64_t id) {
    stage.driver.end_fetch(stage.now, id);
    stage.step();
}

}  // namespace

TEST_CASE("raw: what is put is found once it is written, takes no device row, and goes to disk") {
    for (const std::uint32_t gpu_rows : {0u, 4u}) {
        CAPTURE(gpu_rows);
        Stage stage({.gpu_rows = gpu_rows, .disk = true});
        const RawRows rows = stage.driver.put(stage.now, stage.space, Tokens{1, 2, 3}, 0);
        stage.step();
        CHECK(rows.pages == std::vector<Row>{0, 1, 2});
        CHECK(rows.next == 3);
        CHECK(stage.copies.empty());  // nobody else is asked to copy
        CHECK_FALSE(stage.driver.idle());
        const LeaseId early = stage.lease({1, 2, 3});
        CHECK(stage.at(early).hit == 0);
        stage.release(early);
        stage.driver.copied(stage.now, rows.ticket, true);
        stage.step();
        CHECK(stage.driver.ledger().free_rows(Tier::gpu) == gpu_rows);
        CHECK(cold(stage, {1, 2, 3, 4}) == 3);
        stage.finish_all();
        CHECK(stage.has(Tier::disk, {1, 2, 3}));
        const LeaseId id = stage.lease({1, 2, 3, 4});
        stage.finish_all();
        CHECK(stage.at(id).hit == 3);
        stage.release(id);
    }
}

TEST_CASE("raw: what is there is not put again, and what failed is not there") {
    Stage stage({.disk = true});
    CHECK(put(stage, {1, 2}, 0, false).ticket != 0);
    CHECK(stage.page({1}) == nullptr);
    CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 8);
    CHECK(put(stage, {1, 2}).pages.size() == 2);
    const RawRows rest = put(stage, {1, 2, 3});
    CHECK(rest.pages == std::vector<Row>{2});
    CHECK(put(stage, {1, 2, 3}).ticket == 0);
    stage.find_on_disk({8, 9});
    CHECK(put(stage, {8, 9, 10}).pages == std::vector<Row>{2});
    stage.finish_all();
}

TEST_CASE("raw: a page that only the device has is put, and then not saved a second time") {
    Stage stage({});
    const LeaseId id = stage.lease({1});
    stage.publish(id, 1);
    stage.finish_copy(false, false);  // its copy to the slab fails
    CHECK(stage.has(Tier::gpu, {1}));
    CHECK(put(stage, {1}).pages.size() == 1);
    CHECK(stage.has(Tier::cpu, {1}));
    stage.release(id);
    CHECK(stage.copies.empty());
}

TEST_CASE("raw: more than there is room for comes in parts as it is written down") {
    Stage stage({.cpu_rows = 4, .disk = true});
    const Tokens tokens{1, 2, 3, 4, 5, 6, 7};
    std::uint32_t next = 0, parts = 0;
    while (next < tokens.size()) {
        const RawRows rows = put(stage, tokens, next);
        if (rows.ticket == 0) {
            CHECK_FALSE(stage.driver.room_to_put());
            stage.finish(stage.count(OpKind::grow) > 0 ? OpKind::grow : OpKind::write);
            continue;
        }
        next = rows.next;
        parts++;
    }
    CHECK(parts > 2);
    stage.finish_all();
    CHECK(cold(stage, tokens) == 7);
    CHECK(stage.has(Tier::disk, tokens));
}

TEST_CASE("raw: without a disk a prompt that is too long keeps its beginning") {
    Stage stage({.cpu_rows = 3});
    CHECK(put(stage, {8, 9}).pages.size() == 2);
    CHECK(put(stage, {1, 2, 3, 4, 5}).pages.size() == 3);
    CHECK(put(stage, {1, 2, 3, 4, 5}, 3).ticket == 0);
    CHECK(cold(stage, {1, 2, 3, 4, 5}) == 3);
    CHECK(cold(stage, {8}) == 0);
}

TEST_CASE("raw: with a disk that takes nothing a prompt that is too long keeps its beginning, and is written once it takes it") {
    Stage stage({.cpu_rows = 4, .disk = true});
    const Tokens tokens{1, 2, 3, 4, 5, 6, 7};
    std::uint32_t next = put(stage, tokens).next;
    stage.finish(OpKind::grow);
    while (stage.count(OpKind::write) > 0) stage.finish(OpKind::write, OpStatus::failed);
    for (RawRows rows = put(stage, tokens, next); rows.ticket != 0; rows = put(stage, tokens, next)) next = rows.next;
    CHECK(stage.driver.writes_paused());
    CHECK_FALSE(stage.driver.room_to_put());
    CHECK(next == 4);
    CHECK(cold(stage, tokens) == 4);
    stage.pass(6);
    CHECK(put(stage, tokens, next).ticket == 0);  // what is there is written first
    stage.finish_all();
    CHECK(stage.has(Tier::disk, {1, 2}));
    for (int more = 0; more < 8; ++more) {
        next = put(stage, tokens, next).next;
        stage.finish_all();
    }
    CHECK(stage.has(Tier::disk, tokens));
}

TEST_CASE("raw: a caller that never says how it ended") {
    Stage stage({.cpu_rows = 4});
    const RawRows rows = stage.driver.put(stage.now, stage.space, Tokens{1, 2}, 0);
    stage.step();
    stage.pass(31);
    CHECK(stage.page({1}) == nullptr);
    CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 2);  // it may still be writing there
    stage.driver.copied(stage.now, rows.ticket, true);
    stage.step();
    CHECK(stage.page({1}) == nullptr);
    CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 4);
}

TEST_CASE("raw: pages are fetched from slab and disk, without a device row, and stay until they were read") {
    for (const std::uint32_t gpu_rows : {0u, 4u}) {
        CAPTURE(gpu_rows);
        Stage stage({.gpu_rows = gpu_rows, .cpu_rows = 3, .disk = true});
        stage.find_on_disk({1, 2, 3});
        const std::uint64_t id = fetch(stage, {1, 2, 3, 4}, 1);
        CHECK(stage.count(OpKind::read) == 2);
        CHECK_FALSE(stage.driver.fetched(id));
        CHECK(stage.driver.fetched_rows(id).empty());
        stage.finish_all();
        CHECK(stage.driver.fetched(id));
        CHECK(stage.driver.fetched_rows(id).size() == 2);
        CHECK(stage.driver.ledger().free_rows(Tier::gpu) == gpu_rows);
        CHECK(put(stage, {7, 8}).pages.size() == 1);  // the other two rows are being read
        stage.finish_all();
        CHECK(put(stage, {9}).pages.size() == 1);
        CHECK(stage.has(Tier::cpu, {1, 2, 3}));
        end(stage, id);
        stage.finish_all();
        CHECK(put(stage, {10, 11}).pages.size() > 0);
        CHECK_FALSE(stage.has(Tier::cpu, {1, 2, 3}));
        stage.finish_all();
        CHECK(fetch(stage, {5}) == 0);
    }
}

TEST_CASE("raw: a fetch ends before what does not come") {
    Stage stage({.disk = true});
    stage.find_on_disk({1, 2, 3});
    const std::uint64_t id = fetch(stage, {1, 2, 3});
    stage.finish(OpKind::read);
    stage.finish(OpKind::read, OpStatus::corrupt);
    stage.finish_all();
    CHECK(stage.driver.fetched(id));
    CHECK(stage.driver.fetched_rows(id).size() == 1);
    end(stage, id);
    const std::uint64_t hanging = fetch(stage, {1});
    CHECK(stage.driver.fetched(hanging));  // it is in the slab
    end(stage, hanging);
}

TEST_CASE("raw: a read that hangs, and one that is given up while it waits") {
    Stage stage({.disk = true, .reads_at_once = 1});
    stage.find_on_disk({1, 2});
    const std::uint64_t id = fetch(stage, {1, 2});
    const Op read = stage.take(OpKind::read);
    CHECK_FALSE(stage.driver.fetched(id));
    end(stage, id);  // page 2 is still in the queue
    stage.pass(6);
    CHECK(stage.count(OpKind::read) == 0);
    stage.finish(read);
    CHECK(stage.driver.ledger().free_rows(Tier::cpu) == 8);
}

TEST_CASE("raw: a lease and a fetch that want the same page share one read, whoever gives up") {
    for (const std::uint32_t gpu_rows : {0u, 4u})
        for (const bool lease_goes : {false, true}) {
            CAPTURE(gpu_rows);
            CAPTURE(lease_goes);
            Stage stage({.gpu_rows = gpu_rows, .disk = true, .reads_at_once = 1});
            stage.find_on_disk({1, 2});
            const LeaseId lease = stage.lease({1, 2});
            const std::uint64_t id = fetch(stage, {1, 2});
            CHECK(stage.count(OpKind::read) == 1);
            if (lease_goes)
                stage.release(lease);
            else
                end(stage, id);
            stage.finish_all();
            CHECK(stage.driver.counters().reads == 2);
            if (lease_goes) {
                CHECK(stage.driver.fetched_rows(id).size() == 2);
                end(stage, id);
            } else {
                CHECK(stage.at(lease).hit == 2);
                stage.release(lease);
            }
        }
}
