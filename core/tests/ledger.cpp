#include "../ledger.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "dice.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// A ledger with pages of one token, whose keys are their numbers.
struct Books {
    explicit Books(std::uint32_t gpu_rows, std::uint32_t cpu_rows = 0)
        : ledger({.page_size = 1, .gpu_rows = gpu_rows, .cpu_rows = cpu_rows, .event_capacity = 100}, make_lru()),
          root(ledger.root(key_of(0xFF))) {
        ledger.pin(root);  // as a lease would: a root without children is retired
    }
    ~Books() {
        std::string fault;
        CHECK_MESSAGE(ledger.check_integrity(fault), fault);
    }
    PageId add(PageId parent, std::int32_t number) {
        return ledger.add_page(parent, {{&number, 1}, {}}, key_of(static_cast<std::uint8_t>(number)));
    }
    PageId place(Tier tier, PageId parent, std::int32_t number) {
        const PageId page = add(parent, number);
        ledger.expect(tier, page, ledger.take_row(tier));
        ledger.arrive(tier, page, tier);
        return page;
    }
    bool has(Tier tier, PageId page) const {
        const PageRecord& record = ledger.forest().at(page);
        return record.alive && record.state[static_cast<int>(tier)] == Residency::resident;
    }
    bool known(PageId page) const { return ledger.forest().at(page).alive; }

    Ledger ledger;
    PageId root;
};

}  // namespace

TEST_CASE("ledger: rows come from those that are free, then from the page unused for longest") {
    Books books(3);
    const PageId one = books.place(Tier::gpu, books.root, 1), two = books.place(Tier::gpu, books.root, 2);
    books.ledger.used(one);
    CHECK(books.ledger.free_rows(Tier::gpu) == 1);
    const Row row = books.ledger.take_row(Tier::gpu);
    CHECK(row == 3);  // rows 1 to 3: row 0 is the scratch row
    CHECK(books.has(Tier::gpu, two));
    const Row second = books.ledger.take_row(Tier::gpu);
    CHECK_FALSE(books.known(two));  // no copy left: the record is retired
    CHECK(books.has(Tier::gpu, one));
    CHECK(books.ledger.counters(Tier::gpu).evicted == 1);
    books.ledger.give_row(Tier::gpu, row);
    books.ledger.give_row(Tier::gpu, second);
}

TEST_CASE("ledger: one pin on the deepest page protects the whole prefix") {
    Books books(3);
    const PageId one = books.place(Tier::gpu, books.root, 1);
    const PageId two = books.place(Tier::gpu, one, 2), side = books.place(Tier::gpu, one, 3);
    books.ledger.pin(two);
    const Row row = books.ledger.take_row(Tier::gpu);
    CHECK(row != kNoRow);
    CHECK_FALSE(books.known(side));
    CHECK(books.ledger.take_row(Tier::gpu) == kNoRow);
    books.ledger.unpin(two);
    const Row second = books.ledger.take_row(Tier::gpu), third = books.ledger.take_row(Tier::gpu);
    CHECK(second != kNoRow);
    CHECK(third != kNoRow);
    CHECK_FALSE(books.known(one));
    for (const Row taken : {row, second, third}) books.ledger.give_row(Tier::gpu, taken);
}

TEST_CASE("ledger: what is on its way protects what is above it, and what is read is not evicted") {
    Books books(2, 2);
    const PageId one = books.place(Tier::gpu, books.root, 1);
    const PageId two = books.add(one, 2);
    const Row row = books.ledger.take_row(Tier::gpu);
    books.ledger.expect(Tier::gpu, two, row);
    CHECK(books.ledger.take_row(Tier::gpu) == kNoRow);
    CHECK_FALSE(books.ledger.findable(two));  // publish after place
    CHECK(books.ledger.withdraw(Tier::gpu, two) == row);
    books.ledger.give_row(Tier::gpu, row);
    books.ledger.retire(two);
    CHECK_FALSE(books.known(two));

    books.ledger.hold(Tier::gpu, one);
    const Row free = books.ledger.take_row(Tier::gpu);
    CHECK(books.ledger.take_row(Tier::gpu) == kNoRow);
    books.ledger.unhold(Tier::gpu, one);
    const Row evicted = books.ledger.take_row(Tier::gpu);
    CHECK(evicted != kNoRow);
    books.ledger.give_row(Tier::gpu, free);
    books.ledger.give_row(Tier::gpu, evicted);
}

TEST_CASE("ledger: pins count in the tier that serves leases only") {
    Books own(1, 1);
    const PageId page = own.place(Tier::gpu, own.root, 1);
    own.ledger.expect(Tier::cpu, page, own.ledger.take_row(Tier::cpu));
    own.ledger.arrive(Tier::cpu, page, Tier::gpu);
    own.ledger.pin(page);
    CHECK(own.ledger.take_row(Tier::gpu) == kNoRow);
    const Row row = own.ledger.take_row(Tier::cpu);
    CHECK(row != kNoRow);
    own.ledger.give_row(Tier::cpu, row);
    own.ledger.unpin(page);

    Books guest(0, 1);
    const PageId in_slab = guest.place(Tier::cpu, guest.root, 1);
    guest.ledger.pin(in_slab);
    CHECK(guest.ledger.home() == Tier::cpu);
    CHECK(guest.ledger.take_row(Tier::cpu) == kNoRow);
    guest.ledger.unpin(in_slab);
}

TEST_CASE("ledger: a record lives as long as anything needs it") {
    Books books(2, 2);
    const PageId one = books.place(Tier::gpu, books.root, 1);
    const PageId two = books.add(one, 2);
    books.ledger.hold(Tier::cpu, two);  // a move uses its content
    books.ledger.drop(Tier::gpu, one);
    CHECK(books.known(one));  // the parent of a record that is needed
    books.ledger.unhold(Tier::cpu, two);
    CHECK_FALSE(books.known(two));
    CHECK_FALSE(books.known(one));
    CHECK(books.known(books.root));
    books.ledger.unpin(books.root);
    CHECK_FALSE(books.known(books.root));
    CHECK(books.ledger.counters(Tier::gpu).dropped == 1);
}

TEST_CASE("ledger: what could be evicted is known exactly, without evicting it") {
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
        CAPTURE(seed);
        Dice dice(seed);
        const std::uint32_t rows = dice.between(1, 24);
        Books books(rows);
        Ledger& ledger = books.ledger;
        std::vector<PageId> pages{books.root}, in_use, held, incoming;
        for (std::int32_t number = 0; number < static_cast<std::int32_t>(dice.between(0, rows)); ++number) {
            const PageId parent = dice.pick(pages);
            const bool below_incoming = std::find(incoming.begin(), incoming.end(), parent) != incoming.end();
            if (dice.chance(0.85) && !below_incoming) {
                pages.push_back(books.place(Tier::gpu, parent, number));
            } else {
                const PageId page = books.add(parent, number);
                ledger.expect(Tier::gpu, page, ledger.take_row(Tier::gpu));
                incoming.push_back(page);
                pages.push_back(page);
            }
        }
        for (const PageId page : incoming) in_use.push_back(page);  // somebody waits for each
        for (const PageId page : pages) {
            if (page == books.root) continue;
            if (dice.chance(0.1)) ledger.pin(page), in_use.push_back(page);
            if (books.has(Tier::gpu, page) && dice.chance(0.1)) {
                ledger.hold(Tier::gpu, page);
                in_use.push_back(page);
                held.push_back(page);
            }
        }
        const std::uint32_t evictable = ledger.evictable(in_use, ~std::uint32_t{0});
        for (std::uint32_t enough = 0; enough <= evictable + 2; ++enough)
            CHECK((ledger.evictable(in_use, enough) >= enough) == (evictable >= enough));
        std::uint32_t expected = ledger.free_rows(Tier::gpu) + evictable;
        std::vector<Row> taken;
        for (Row row = ledger.take_row(Tier::gpu); row != kNoRow; row = ledger.take_row(Tier::gpu)) taken.push_back(row);
        CHECK(taken.size() == expected);
        for (const Row row : taken) ledger.give_row(Tier::gpu, row);
    }
}

TEST_CASE("ledger: a copy on disk is findable once it is stored, and not while it is left alone") {
    Books books(1, 1);
    const PageId page = books.place(Tier::cpu, books.root, 1);
    books.ledger.add_slot({3, 7});
    SlotRef slot;
    REQUIRE(books.ledger.take_slot(slot));
    const EntryId entry = books.ledger.add_entry(page, slot);
    books.ledger.drop(Tier::cpu, page);
    CHECK(books.known(page));
    CHECK_FALSE(books.ledger.findable(page));
    CHECK_FALSE(books.ledger.take_slot(slot));  // being written: no victim
    books.ledger.stored(entry);
    CHECK(books.ledger.findable(page));
    books.ledger.set_time(10);
    books.ledger.back_off(entry, 12);
    CHECK_FALSE(books.ledger.findable(page));
    books.ledger.set_time(12);
    CHECK(books.ledger.findable(page));
    books.ledger.pause_disk_reads(20);
    CHECK_FALSE(books.ledger.findable(page));
    books.ledger.set_time(20);
    CHECK(books.ledger.findable(page));
    books.ledger.hold_entry(entry);
    CHECK_FALSE(books.ledger.take_slot(slot));
    books.ledger.unhold_entry(entry);
    REQUIRE(books.ledger.take_slot(slot));
    CHECK(slot == SlotRef{3, 7});
    CHECK_FALSE(books.known(page));
    CHECK(books.ledger.resident(Tier::disk) == 0);
}

TEST_CASE("ledger: pages of an earlier run go leaf first, in the order of their last use") {
    Books books(1, 1);
    // Found in this order: a child before its parent.
    for (std::uint8_t number : {2, 1, 3, 4}) {
        const Key parent = number == 2 ? key_of(1) : key_of(0xFF);
        CHECK(books.ledger.add_found(key_of(number), parent, {0, number}) != kNoEntry);
    }
    CHECK(books.ledger.add_found(key_of(3), key_of(0xFF), {0, 9}) == kNoEntry);  // a second copy
    books.ledger.link_found(books.ledger.find_entry(key_of(2)), key_of(1));
    books.ledger.used_again(books.ledger.find_entry(key_of(2)));  // with it, its parent
    std::vector<std::uint32_t> order;
    SlotRef slot;
    while (books.ledger.take_slot(slot)) order.push_back(slot.slot);
    CHECK(order == std::vector<std::uint32_t>{3, 4, 2, 1});
}

TEST_CASE("ledger: events tell what became findable where, and what ceased to be") {
    Books books(1, 1);
    const PageId page = books.place(Tier::gpu, books.root, 1);
    books.ledger.expect(Tier::cpu, page, books.ledger.take_row(Tier::cpu));
    books.ledger.arrive(Tier::cpu, page, Tier::gpu);
    const EntryId entry = books.ledger.add_entry(page, {0, 0});
    books.ledger.stored(entry);
    books.ledger.drop(Tier::gpu, page);
    books.ledger.forget(entry, EventKind::damaged);
    const std::vector<Event> events = books.ledger.drain_events();
    REQUIRE(events.size() == 5);
    const EventKind kinds[] = {EventKind::stored, EventKind::stored, EventKind::stored, EventKind::removed, EventKind::damaged};
    const Tier tiers[] = {Tier::gpu, Tier::cpu, Tier::disk, Tier::gpu, Tier::disk};
    const Tier sources[] = {Tier::gpu, Tier::gpu, Tier::cpu, Tier::gpu, Tier::disk};
    for (std::size_t i = 0; i < events.size(); ++i) {
        CHECK(events[i].sequence == i);
        CHECK(events[i].kind == kinds[i]);
        CHECK(events[i].tier == tiers[i]);
        CHECK(events[i].source == sources[i]);
        CHECK(events[i].depth == 1);
        CHECK(events[i].key == key_of(1));
    }
}

TEST_CASE("events: what nobody fetched in time is counted, the rest keeps its order") {
    EventRing ring(3);
    std::uint64_t lost = 0;
    for (std::uint32_t depth = 0; depth < 5; ++depth) ring.add({.depth = depth, .key = {}});
    std::vector<Event> events = ring.drain(lost);
    CHECK(lost == 2);
    REQUIRE(events.size() == 3);
    CHECK(events[0].depth == 2);
    CHECK(events[2].sequence == 4);
    CHECK(ring.drain(lost).empty());
    ring.add({.depth = 9, .key = {}});
    events = ring.drain(lost);
    REQUIRE(events.size() == 1);
    CHECK(events[0].depth == 9);
    CHECK(lost == 2);
}
