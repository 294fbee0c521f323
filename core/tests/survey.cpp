// What the tools see: the survey of a directory, the verifier, the purge; beside living owners, on damaged files and failing disks.
#include "../survey.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "../checksum.hpp"
#include "../disk_sim.hpp"
#include "../purge.hpp"
#include "../verifier.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;
constexpr std::uint32_t kPages = 10;  // in three segments of four slots
constexpr std::size_t kSlotsAt = 8192;
using Bytes = std::vector<std::byte>;

// A directory with one shelf, whose owner lives until leave(); pages 0 ... 6 of one namespace, 7 ... 9 of another.
struct Directory3 {
    explicit Directory3(std::uint32_t pages = kPages)
        : medium(SimMedium::make(3)), owner(std::make_unique<Writer>(medium->attach(), shelf_config(kCap))) {
        for (int i = 0; i < 3; ++i) REQUIRE(owner->grow() == OpStatus::ok);
        for (std::uint32_t i = 0; i < pages; ++i) REQUIRE(owner->write(owner->empty[i], page(i)) == OpStatus::ok);
        for (const std::string& path : medium->files()) {
            if (path.ends_with(".kvs")) segments.push_back(path);
        }
    }
    static FingerprintPage page(std::uint32_t number) { return FingerprintPage(number, key_of(number < 7 ? 0x11 : 0x77)); }
    void leave() { owner.reset(); }
    void flip(std::size_t segment, std::size_t at) {
        medium->edit(segments[segment], [&](Bytes& data) { data[at] ^= std::byte{4}; });
    }
    // The pages that a new owner finds and can read.
    std::vector<std::uint32_t> served() const {
        Writer writer(medium->attach(), shelf_config(kCap));
        REQUIRE_MESSAGE(writer.shelf, writer.error);
        std::vector<std::uint32_t> good;
        for (std::uint32_t i = 0; i < kPages; ++i) {
            const FoundPage* found = writer.find(page(i));
            if (found && writer.read(found->slot, page(i)) == OpStatus::ok) good.push_back(i);
        }
        return good;
    }
    // In how many places of the files the tokens of a page lie.
    std::size_t traces(std::uint32_t number) const {
        const FingerprintPage wanted = page(number);
        const auto* tokens = reinterpret_cast<const std::byte*>(wanted.tokens.data());
        std::size_t places = 0;
        for (const std::string& path : medium->files()) {
            medium->edit(path, [&](Bytes& data) {
                for (auto at = data.begin();; ++at, ++places) {
                    at = std::search(at, data.end(), tokens, tokens + 4 * kPageSize);
                    if (at == data.end()) return;
                }
            });
        }
        return places;
    }

    std::shared_ptr<SimMedium> medium;
    std::unique_ptr<Writer> owner;
    std::vector<std::string> segments;
};

struct Sums {
    explicit Sums(const Verification& proof) {
        for (const ShelfProof& shelf : proof.shelves) {
            for (const SegmentProof& one : shelf.segments) {
                sound += one.sound, corrupt += one.corrupt, torn += one.torn, unreadable += one.unreadable;
                records += one.damaged_records, left += one.left(), recovered += one.recovered, dropped += one.dropped;
                changed += one.changed;
            }
        }
    }
    std::uint64_t sound = 0, corrupt = 0, torn = 0, unreadable = 0, records = 0, left = 0, recovered = 0, dropped = 0, changed = 0;
};

Sums check(const Directory3& directory, bool repair = false) { return Sums(verify(directory.medium->attach(), repair, {})); }

PurgeOrder order(PurgeOrder::Kind kind) {
    PurgeOrder made;
    made.kind = kind;
    return made;
}

}  // namespace

TEST_CASE("survey: namespaces, shelves and owners") {
    Directory3 directory;
    directory.medium->edit("shelves/notes", [](Bytes& data) { data.resize(5000); });
    directory.medium->edit("core.1234", [](Bytes& data) { data.resize(1); });
    for (const bool alive : {true, false}) {
        if (!alive) directory.leave();
        const Survey all = survey(directory.medium->attach());
        CHECK(all.error == 0);
        CHECK(all.allocated == directory.medium->allocated_bytes());
        REQUIRE(all.shelves.size() == 1);
        CHECK(all.shelves[0].alive == alive);
        REQUIRE(all.shelves[0].segments.size() == 3);
        CHECK(all.shelves[0].segments[0].pages == 4);
        CHECK(all.shelves[0].segments[2].pages == 2);
        CHECK(all.shelves[0].segments[2].slots == 4);
        CHECK(all.shelves[0].segments[2].shape.row_bytes == kRowBytes);
        REQUIRE(all.spaces.size() == 2);
        const SpaceSurvey& first = all.spaces.at(key_of(0x11));
        CHECK(first.pages == 7);
        CHECK(first.bytes == 7 * kSlotBytes);
        CHECK(first.uses == 7);
        CHECK(first.first_use == 1);
        CHECK(first.last_use == 7);
        CHECK(all.spaces.at(key_of(0x77)).pages == 3);
        CHECK(all.descriptions == std::vector{hex(key_of(0x11))});
        REQUIRE(all.unknown.size() == 2);
        CHECK(all.unknown[1].path == "shelves/notes");
        CHECK(all.unknown[1].bytes == 8192);
    }
    CHECK(directory.served().size() == kPages);  // the survey's look at the owner's lock left nothing behind
}

TEST_CASE("survey: every operation of the disk failing") {
    Directory3 directory;
    directory.leave();
    const auto disk = directory.medium->attach();
    directory.medium->set_faults({});
    survey(disk);
    const std::uint64_t operations = directory.medium->operations();
    for (std::uint64_t n = 1; n <= operations; ++n) {
        for (const bool shorten : {false, true}) {
            directory.medium->set_faults({.fail_at = n, .shorten = shorten});
            const Survey all = survey(directory.medium->attach());
            std::uint64_t pages = 0;
            for (const auto& [key, space] : all.spaces) pages += space.pages;
            CHECK(pages <= kPages);
        }
    }
    directory.medium->set_faults({});
    CHECK(directory.served().size() == kPages);
}

TEST_CASE("verify: a sound directory, with and without its owner") {
    Directory3 directory;
    CHECK(check(directory).sound == kPages);
    CHECK(check(directory, true).sound == kPages);  // its owner lives: nothing to repair, and nothing touched
    directory.leave();
    std::vector<std::pair<std::uint64_t, std::uint64_t>> told;
    const Verification proof = verify(directory.medium->attach(), true, [&](std::uint64_t done, std::uint64_t total) {
        told.emplace_back(done, total);
        return true;
    });
    CHECK(Sums(proof).sound == kPages);
    CHECK(Sums(proof).left == 0);
    REQUIRE(told.size() == kPages);
    CHECK(told.front() == std::pair{kSlotBytes, kPages * kSlotBytes});
    CHECK(told.back() == std::pair{kPages * kSlotBytes, kPages * kSlotBytes});
    CHECK(directory.served().size() == kPages);
}

TEST_CASE("verify: cancelled") {
    Directory3 directory;
    const Verification proof = verify(directory.medium->attach(), false, [](std::uint64_t, std::uint64_t) { return false; });
    CHECK(proof.cancelled);
    CHECK(Sums(proof).sound == 1);
}

TEST_CASE("verify: every kind of damage is told, and repaired") {
    struct Damage {
        const char* what;
        std::size_t at;
        std::uint64_t corrupt, torn, records, recovered;
        std::size_t served;
    };
    constexpr std::size_t kSlot = kSlotsAt + kSlotBytes;  // the second
    const Damage cases[] = {
        {"a plane", kSlot + 4096 + 1001, 1, 0, 0, 0, 9},
        {"the last byte of the row", kSlot + 4096 + kRowBytes - 1, 1, 0, 0, 0, 9},
        {"padding behind the row", kSlot + 4096 + kRowBytes, 0, 0, 0, 0, 10},
        {"a token", kSlot + 192 + 3 * 16, 1, 0, 0, 0, 9},
        {"a plane's size", kSlot + 192, 1, 0, 0, 0, 9},
        {"the header's checksum", kSlot + 4088, 1, 0, 0, 0, 9},
        {"a record", 4096 + 128 + 50, 0, 0, 1, 1, 10},
        {"an empty slot's record", 4096 + 3 * 128 + 50, 0, 0, 1, 0, 10},
        {"the header block", 30, 0, 0, 0, 4, 10},
    };
    for (const Damage& damage : cases) {
        CAPTURE(damage.what);
        Directory3 directory;
        directory.leave();
        const std::size_t segment = damage.what == std::string("an empty slot's record") ? 2 : 0;
        directory.flip(segment, damage.at);
        const bool any = damage.corrupt + damage.torn + damage.records + damage.recovered > 0;
        Sums found = check(directory);
        CHECK(found.corrupt == damage.corrupt);
        CHECK(found.torn == damage.torn);
        CHECK(found.records == damage.records);
        CHECK((found.left > 0) == any);
        found = check(directory, true);
        CHECK(found.left == 0);
        CHECK(found.recovered == damage.recovered);
        CHECK(found.dropped == damage.corrupt);
        found = check(directory);
        CHECK(found.left == 0);
        CHECK(found.sound == damage.served);
        CHECK(directory.served().size() == damage.served);
    }
}

TEST_CASE("verify: swapped slots, a cut file, a medium that fails") {
    Directory3 directory;
    directory.leave();
    directory.medium->edit(directory.segments[0], [&](Bytes& data) {
        std::swap_ranges(data.begin() + kSlotsAt, data.begin() + kSlotsAt + kSlotBytes, data.begin() + kSlotsAt + kSlotBytes);
    });
    directory.medium->edit(directory.segments[1], [&](Bytes& data) { data.resize(kSlotsAt + 2 * kSlotBytes + 100); });
    Sums found = check(directory);
    CHECK(found.corrupt == 2);
    CHECK(found.torn == 2);
    CHECK(found.sound == 6);
    directory.medium->set_faults({.chance = 1});
    CHECK(verify(directory.medium->attach(), false, {}).error == -EIO);
    directory.medium->set_faults({});
    found = check(directory, true);
    CHECK(found.dropped == 4);
    CHECK(found.left == 0);
    CHECK(check(directory).left == 0);
    CHECK(directory.served().size() == 6);
}

TEST_CASE("verify: damage beside a living owner is told and left to it") {
    Directory3 directory;
    directory.flip(0, kSlotsAt + 4096);
    Sums found = check(directory, true);
    CHECK(found.corrupt == 1);
    CHECK(found.left == 1);
    CHECK(found.dropped == 0);
    CHECK(check(directory).left == 1);
    // While it reads, the owner uses slots again: no damage.
    std::mt19937_64 random(4);
    const Verification proof = verify(directory.medium->attach(), false, [&](std::uint64_t, std::uint64_t) {
        const auto slot = std::uint32_t(1 + random() % 9);
        return directory.owner->write(directory.owner->empty[slot], FingerprintPage(100 + std::uint32_t(random() % 50))) ==
               OpStatus::ok;
    });
    CHECK(Sums(proof).left == 1);
}

TEST_CASE("verify and repair: every operation of the disk failing; nothing sound is lost") {
    Directory3 clean;
    clean.leave();
    clean.flip(0, 30);                           // a header block
    clean.flip(1, 4096 + 50);                    // a record
    clean.flip(2, kSlotsAt + kSlotBytes + 200);  // a page: number 9
    std::map<std::string, Bytes> files;
    for (const std::string& path : clean.medium->files()) clean.medium->edit(path, [&](Bytes& data) { files[path] = data; });
    clean.medium->set_faults({});
    check(clean, true);
    const std::uint64_t operations = clean.medium->operations();
    CHECK(operations > 40);
    for (std::uint64_t n = 1; n <= operations; ++n) {
        CAPTURE(n);
        for (const bool shorten : {false, true}) {
            for (const auto& file : files) clean.medium->edit(file.first, [&](Bytes& data) { data = file.second; });
            clean.medium->set_faults({.fail_at = n, .shorten = shorten});
            check(clean, true);
            clean.medium->set_faults({});
            CHECK(check(clean, true).left == 0);
            const std::uint64_t sound = check(clean).sound;
            // A read that ends early looks like a file cut short.
            CHECK((sound == kPages - 1 || (shorten && sound == kPages - 2)));
        }
    }
}

TEST_CASE("purge: everything") {
    Directory3 directory;
    // Page 3 was evicted, page 6's record is lost.
    REQUIRE(directory.owner->run(OpKind::clear, directory.owner->empty[3]).status == OpStatus::ok);
    directory.leave();
    directory.flip(1, 4096 + 2 * 128);
    CHECK(directory.traces(3) == 1);
    directory.medium->edit("shelves/notes", [](Bytes& data) { data.resize(5000); });
    const PurgeReport report = purge(directory.medium->attach(), order(PurgeOrder::Kind::all), {});
    CHECK(report.pages == kPages - 1);
    CHECK(report.leftovers == 1);
    CHECK(report.segments == 3);
    CHECK(report.namespaces == 1);
    CHECK(report.failures == 0);
    CHECK(report.used_shelves == 0);
    CHECK(directory.medium->files() == std::vector<std::string>{"lock", "requests", "shelves/notes"});
    CHECK(report.allocated == directory.medium->allocated_bytes());
    CHECK(directory.served().empty());
}

TEST_CASE("purge: one namespace; tokens are gone from the files, others' pages stay") {
    Directory3 directory;
    REQUIRE(directory.owner->run(OpKind::clear, directory.owner->empty[3]).status == OpStatus::ok);
    directory.leave();
    PurgeOrder wanted = order(PurgeOrder::Kind::spaces);
    wanted.keys = {key_of(0x11)};
    const PurgeReport report = purge(directory.medium->attach(), wanted, {});
    CHECK(report.pages == 6);
    CHECK(report.leftovers == 1);
    CHECK(report.segments == 1);  // the first: pages 7 ... 9 lie in the others
    CHECK(report.namespaces == 1);
    for (std::uint32_t i = 0; i < kPages; ++i) {
        CAPTURE(i);
        CHECK(directory.traces(i) == (i < 7 ? 0 : 1));
    }
    CHECK(check(directory).left == 0);
    CHECK(directory.served() == std::vector<std::uint32_t>{7, 8, 9});
    CHECK(purge(directory.medium->attach(), wanted, {}).pages == 0);
}

TEST_CASE("purge: by age, which counts from the last use") {
    Directory3 directory;
    directory.owner->shelf->note_uses(
        {{directory.owner->empty[8], 50}, {directory.owner->empty[2], 40}, {directory.owner->empty[2], 30}});
    directory.owner->shelf->check_files();
    REQUIRE(directory.owner->write(directory.owner->empty[8], FingerprintPage(60)) ==
            OpStatus::ok);  // used at 61; the other is gone
    directory.owner->shelf->note_uses({{directory.owner->empty[4], 70}});
    REQUIRE(directory.owner->shelf->sync() == 0);
    directory.leave();
    {
        Writer heir(directory.medium->attach(), shelf_config(kCap));
        const auto used = [&](const FingerprintPage& page) { return heir.find(page)->last_use; };
        CHECK(used(Directory3::page(1)) == 2);
        CHECK(used(Directory3::page(2)) == 40);
        CHECK(used(FingerprintPage(60)) == 61);
        CHECK(heir.find(Directory3::page(2))->uses == 2 + Directory3::page(2).image().uses);
    }
    CHECK(survey(directory.medium->attach()).spaces.at(key_of(0x11)).last_use == 70);
    PurgeOrder wanted = order(PurgeOrder::Kind::unused);
    wanted.before = 40;
    CHECK(purge(directory.medium->attach(), wanted, {}).pages == kPages - 3);
    for (const std::uint32_t kept : {2, 4}) CHECK(directory.traces(kept) == 1);
}

TEST_CASE("purge: by age, and damaged pages that prove nothing") {
    Directory3 directory;
    directory.leave();
    directory.flip(0, kSlotsAt + 200);  // page 0: old anyway
    directory.flip(2, kSlotsAt + 200);  // page 8: not old, but its header proves nothing
    directory.flip(2, 4096 + 128 + 8);  // page 9: only its record is lost
    directory.flip(1, 4096 + 8);        // page 4: likewise, and old
    PurgeOrder wanted = order(PurgeOrder::Kind::unused);
    wanted.before = 7;  // page i was used at i + 1
    const PurgeReport report = purge(directory.medium->attach(), wanted, {});
    CHECK(report.pages == 6);
    CHECK(report.leftovers == 1);
    for (std::uint32_t i = 0; i < kPages; ++i) CHECK(directory.traces(i) == (i < 6 || i == 8 ? 0 : 1));
    CHECK(check(directory, true).recovered == 1);
    CHECK(directory.served() == std::vector<std::uint32_t>{6, 7, 9});
}

TEST_CASE("purge: to a size, the least recently used segment first") {
    Directory3 directory;
    directory.leave();
    const std::uint64_t before = directory.medium->allocated_bytes();
    PurgeOrder wanted = order(PurgeOrder::Kind::to_size);
    wanted.bytes = before;
    CHECK(purge(directory.medium->attach(), wanted, {}).segments == 0);
    wanted.bytes = before - 1;
    const PurgeReport report = purge(directory.medium->attach(), wanted, {});
    CHECK(report.segments == 1);
    CHECK(report.freed >= kSlotsAt + 4 * kSlotBytes);
    CHECK(report.allocated == before - report.freed);
    CHECK(directory.served() == std::vector<std::uint32_t>{4, 5, 6, 7, 8, 9});
    wanted.bytes = 0;
    CHECK(purge(directory.medium->attach(), wanted, {}).segments == 2);
    CHECK(directory.served().empty());
}

TEST_CASE("purge: shelves of living owners that do not answer are left to them and counted") {
    Directory3 directory;
    const PurgeReport report =
        purge(directory.medium->attach(), order(PurgeOrder::Kind::all), {}, {}, std::chrono::milliseconds{30});
    CHECK(report.pages == 0);
    CHECK(report.used_shelves == 1);
    CHECK(report.used_pages == kPages);
    CHECK(report.used_bytes == kPages * kSlotBytes);
    CHECK(report.namespaces == 0);
    for (std::uint32_t i = 0; i < kPages; ++i)
        CHECK(directory.owner->read(directory.owner->empty[i], Directory3::page(i)) == OpStatus::ok);
}

TEST_CASE("purge: by the owner itself, around slots in use") {
    Directory3 directory;
    struct Claims final : SlotClaims {
        bool claim(const std::string&, std::uint32_t slot, const Key* page) override {
            if (page && *page == in_use) return false;
            held.push_back(slot);
            return true;
        }
        void done(const std::string&, std::uint32_t slot) override {
            CHECK(held.back() == slot);
            held.pop_back();
            ++emptied;
        }
        Key in_use = Directory3::page(2).key;
        std::vector<std::uint32_t> held;
        int emptied = 0;
    } claims;
    const auto disk = directory.medium->attach();
    PurgeReport report;
    const OwnedShelf shelf{.path = directory.segments[0].substr(0, directory.segments[0].rfind('/')), .owner = nullptr};
    purge_shelf(disk, shelf, order(PurgeOrder::Kind::all), &claims, report, [] { return true; });
    CHECK(report.pages == kPages - 1);
    CHECK(report.used_pages == 1);
    CHECK(report.segments == 0);  // they are the owner's, who uses them
    CHECK(claims.emptied == int(kPages) - 1);
    CHECK(claims.held.empty());
    for (std::uint32_t i = 0; i < kPages; ++i) CHECK(directory.traces(i) == (i == 2));
    // The owner goes on: the slots are good for new pages.
    CHECK(directory.owner->write(directory.owner->empty[0], FingerprintPage(50)) == OpStatus::ok);
    CHECK(directory.owner->read(directory.owner->empty[0], FingerprintPage(50)) == OpStatus::ok);
    CHECK(directory.owner->read(directory.owner->empty[2], Directory3::page(2)) == OpStatus::ok);
}

TEST_CASE("purge: every operation of the disk failing, then once more: nothing is left") {
    std::uint64_t operations = 1;
    for (std::uint64_t n = 0; n <= operations; ++n) {
        CAPTURE(n);
        Directory3 directory;
        directory.leave();
        PurgeOrder wanted = order(n % 2 == 0 ? PurgeOrder::Kind::spaces : PurgeOrder::Kind::all);
        wanted.keys = {key_of(0x11)};
        directory.medium->set_faults({.fail_at = n});
        const PurgeReport report = purge(directory.medium->attach(), wanted, {});
        if (n == 0) operations = directory.medium->operations() + 20;  // more than any order needs
        std::size_t left = 0;
        for (std::uint32_t i = 0; i < 7; ++i) left += directory.traces(i);
        CHECK((report.failures > 0 || left == 0));
        directory.medium->set_faults({});
        CHECK(purge(directory.medium->attach(), wanted, {}).failures == 0);
        for (std::uint32_t i = 0; i < 7; ++i) CHECK(directory.traces(i) == 0);
        CHECK(check(directory).left == 0);
        CHECK(directory.served().size() == (wanted.kind == PurgeOrder::Kind::all ? 0 : 3));
    }
}

TEST_CASE("tools: random damage is never believed") {
    Directory3 directory;
    directory.leave();
    std::map<std::string, Bytes> files;
    for (const std::string& path : directory.medium->files())
        directory.medium->edit(path, [&](Bytes& data) { files[path] = data; });
    std::mt19937_64 random(9);
    for (int round = 0; round < 300; ++round) {
        CAPTURE(round);
        const auto hand = directory.medium->attach();
        for (const auto& file : files) directory.medium->edit(file.first, [&](Bytes& data) { data = file.second; });
        for (int i = 0; i < 6; ++i) {
            const std::string& segment = directory.segments[random() % 3];
            directory.medium->edit(segment, [&](Bytes& data) {
                const std::size_t at = random() % 2 == 0 ? random() % kSlotsAt : random() % data.size();
                if (round % 3 == 0 && at + 4 <= 4088 && at % 4 == 0) {  // a huge number under a good checksum
                    std::fill_n(data.begin() + std::ptrdiff_t(at), 4, std::byte{0xff});
                    const std::uint64_t sum = checksum(data.data(), 4088);
                    std::memcpy(data.data() + 4088, &sum, sizeof sum);
                }
                data[at] ^= std::byte(1u << random() % 8);
                if (random() % 20 == 0) data.resize(random() % data.size() + 1);
            });
        }
        const Sums found = check(directory);
        CHECK(found.sound <= kPages);
        if (random() % 2 == 0) {
            const std::uint64_t sound = check(directory, true).sound;
            CHECK(sound >= found.sound);
            const Sums again = check(directory);
            CHECK(again.left == 0);
            CHECK(again.sound == sound);
        } else {
            purge(directory.medium->attach(), order(PurgeOrder::Kind::all), {});
            CHECK(check(directory).sound == 0);
        }
    }
}
