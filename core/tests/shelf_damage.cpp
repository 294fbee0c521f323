// Files that time, bad memory or people have changed: nothing is served wrong, nothing crashes, nothing huge is allocated.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "../checksum.hpp"
#include "../disk_sim.hpp"
#include "../segment.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;
constexpr std::uint32_t kPages = 12;  // three segments of four slots
using Bytes = std::vector<std::byte>;
using Files = std::map<std::string, Bytes>;

struct Damaged {
    Damaged() : medium(SimMedium::make(5)) {
        Writer writer(medium->attach(), shelf_config(kCap));
        for (int i = 0; i < 3; ++i) REQUIRE(writer.grow() == OpStatus::ok);
        REQUIRE(writer.empty.size() == kPages);
        for (std::uint32_t i = 0; i < kPages; ++i) REQUIRE(writer.write(writer.empty[i], FingerprintPage(i)) == OpStatus::ok);
        writer.shelf.reset();
        for (const std::string& path : medium->files()) {
            medium->edit(path, [&](Bytes& data) { files[path] = data; });
            if (path.ends_with(".kvs")) segments.push_back(path);
        }
    }

    // Everything that was ever there, rebuilt where it was damaged; the pages served. A wrong byte fails the test.
    std::size_t reopen(std::size_t* reported = nullptr, ShelfStats* stats = nullptr) {
        Writer writer(medium->attach(), shelf_config(kCap));
        REQUIRE_MESSAGE(writer.shelf, writer.error);
        writer.settle();
        std::size_t served = 0;
        for (std::uint32_t i = 0; i < kPages; ++i) {
            for (const FoundPage& found : writer.found) {
                if (found.key != FingerprintPage(i).key) continue;
                const OpStatus status = writer.read(found.slot, FingerprintPage(i));
                CHECK(status != OpStatus::failed);
                served += status == OpStatus::ok;
            }
        }
        if (reported) *reported = writer.found.size();
        if (stats) *stats = writer.shelf->stats();
        CHECK(medium->peak_bytes() <= kCap);
        return served;
    }
    void restore() {
        for (const std::string& path : medium->files()) {
            if (!files.contains(path)) medium->attach()->remove(path);
        }
        for (const auto& file : files) medium->edit(file.first, [&](Bytes& now) { now = file.second; });
    }

    std::shared_ptr<SimMedium> medium;
    Files files;
    std::vector<std::string> segments;
};

Bytes text(const std::string& content) {
    Bytes bytes(content.size());
    std::memcpy(bytes.data(), content.data(), content.size());
    return bytes;
}

}  // namespace

TEST_CASE("damage: bit flips anywhere") {
    Damaged disk;
    std::mt19937_64 random(11);
    std::size_t served = 0;
    constexpr int kRounds = 1500;
    for (int round = 0; round < kRounds; ++round) {
        CAPTURE(round);
        disk.restore();
        for (int flip = 0; flip < 8; ++flip) {
            disk.medium->edit(disk.segments[random() % 3], [&](Bytes& data) {
                // Half of the flips hit the parts that are parsed.
                const std::size_t at = random() % 2 == 0 ? random() % 8192 : random() % data.size();
                data[at] ^= std::byte(1u << random() % 8);
            });
        }
        served += disk.reopen();
    }
    CHECK(served > kRounds);
    CHECK(served < kRounds * kPages);
}

TEST_CASE("damage: one flip in one plane loses that page and no other") {
    Damaged disk;
    disk.medium->edit(disk.segments[1], [&](Bytes& data) { data[data.size() - kRowStride + 5999] ^= std::byte{1}; });
    CHECK(disk.reopen() == kPages - 1);
    // A flipped token is damage, not a collision of keys.
    disk.restore();
    disk.medium->edit(disk.segments[0], [&](Bytes& data) { data[8192 + 192 + 3 * 16 + 5] ^= std::byte{1}; });
    Writer writer(disk.medium->attach(), shelf_config(kCap));
    REQUIRE(writer.find(FingerprintPage(0)));
    CHECK(writer.read(writer.find(FingerprintPage(0))->slot, FingerprintPage(0)) == OpStatus::corrupt);
}

TEST_CASE("damage: truncation at any length") {
    Damaged disk;
    std::mt19937_64 random(12);
    const std::size_t size = disk.files[disk.segments[0]].size();
    for (const std::size_t length :
         {std::size_t{0}, std::size_t{1}, std::size_t{79}, std::size_t{4095}, std::size_t{4096}, std::size_t{8191},
          std::size_t{8192}, size - 1, size - kRowStride, size - kRowStride + kRowBytes}) {
        disk.restore();
        disk.medium->edit(disk.segments[0], [&](Bytes& data) { data.resize(length); });
        CAPTURE(length);
        CHECK(disk.reopen() >= kPages - 4);
    }
    for (int round = 0; round < 200; ++round) {
        disk.restore();
        disk.medium->edit(disk.segments[round % 3], [&](Bytes& data) { data.resize(random() % size); });
        CHECK(disk.reopen() >= kPages - 4);
    }
}

TEST_CASE("damage: zeroed blocks") {
    Damaged disk;
    const std::size_t size = disk.files[disk.segments[0]].size();
    for (std::size_t at = 0; at < size; at += 4096) {
        disk.restore();
        disk.medium->edit(disk.segments[2],
                          [&](Bytes& data) { std::fill_n(data.begin() + std::ptrdiff_t(at), 4096, std::byte{0}); });
        CAPTURE(at);
        CHECK(disk.reopen() == (at < 8192 ? kPages : kPages - 1));  // header block and table are made again
    }
}

TEST_CASE("damage: parts in each other's place") {
    Damaged disk;
    std::size_t reported = 0;
    // Two slots of a segment: sound headers, other keys.
    disk.medium->edit(disk.segments[0], [&](Bytes& data) {
        std::swap_ranges(data.begin() + 8192, data.begin() + 8192 + kSlotBytes, data.begin() + 8192 + 2 * kSlotBytes);
    });
    CHECK(disk.reopen() == kPages - 2);
    // Two records: each is bound to its slot.
    disk.restore();
    disk.medium->edit(disk.segments[0], [&](Bytes& data) {
        std::swap_ranges(data.begin() + 4096, data.begin() + 4096 + 128, data.begin() + 4096 + 256);
    });
    ShelfStats stats;
    CHECK(disk.reopen(&reported, &stats) == kPages);
    CHECK(reported == kPages);
    CHECK(stats.damaged_records == 2);
    CHECK(stats.rebuilt_pages == 2);
    // The table of another segment: each is bound to its segment's epoch.
    disk.restore();
    disk.medium->edit(disk.segments[0], [&](Bytes& data) {
        const Bytes& other = disk.files[disk.segments[1]];
        std::copy(other.begin() + 4096, other.begin() + 8192, data.begin() + 4096);
    });
    CHECK(disk.reopen(&reported, &stats) == kPages);
    CHECK(reported == kPages);
    CHECK(stats.rebuilt_pages == 4);
    // Whole files: nothing depends on their names.
    disk.restore();
    disk.medium->edit(disk.segments[0], [&](Bytes& data) { data = disk.files[disk.segments[1]]; });
    disk.medium->edit(disk.segments[1], [&](Bytes& data) { data = disk.files[disk.segments[0]]; });
    CHECK(disk.reopen() == kPages);
}

TEST_CASE("damage: sound checksums over impossible sizes") {
    Damaged disk;
    std::mt19937_64 random(13);
    for (int round = 0; round < 400; ++round) {
        CAPTURE(round);
        disk.restore();
        disk.medium->edit(disk.segments[0], [&](Bytes& data) {
            // A 4 GB (or worse) number somewhere in the segment header, and its checksum made good.
            const std::uint32_t huge = round % 3 == 0   ? 0xffffffffu
                                       : round % 3 == 1 ? std::uint32_t(random())
                                                        : std::uint32_t(random() % 70);
            const std::size_t field = 12 + std::size_t(round) % 17 * 4;
            std::memcpy(data.data() + field, &huge, sizeof huge);
            const std::uint64_t sum = checksum(data.data(), 4088);
            std::memcpy(data.data() + 4088, &sum, sizeof sum);
        });
        CHECK(disk.reopen() >= kPages - 4);
    }
    for (int round = 0; round < 400; ++round) {
        CAPTURE(round);
        disk.restore();
        disk.medium->edit(disk.segments[0], [&](Bytes& data) {
            // The same in a slot header.
            std::byte* header = data.data() + 8192 + kSlotBytes;
            const std::uint32_t huge = round % 2 == 0 ? 0xffffffffu : std::uint32_t(random());
            std::memcpy(header + 8 + std::size_t(round) % 12 * 4, &huge, sizeof huge);
            const std::uint64_t sum = checksum(header, 4088);
            std::memcpy(header + 4088, &sum, sizeof sum);
        });
        CHECK(disk.reopen() >= kPages - 1);
    }
}

TEST_CASE("G1: files that are not ours are left alone and counted") {
    Damaged disk;
    const std::string shelf = disk.segments[0].substr(0, disk.segments[0].rfind('/') + 1);
    const Files strangers{{shelf + "seg-000004.kvs", text("cos\nsystem\n(S'echo pickled > /tmp/pwned'\ntR.")},
                          {shelf + "seg-000005.kvs", text(std::string("PK\3\4") + std::string(5000, 'z'))},
                          {shelf + "index.pkl", text("\x80\x04\x95")},
                          {shelf + "seg-1.kvs", text("short name")},
                          {"shelves/README", text("hello")},
                          {"notes.txt", text("mine")}};
    for (const auto& stranger : strangers) disk.medium->edit(stranger.first, [&](Bytes& now) { now = stranger.second; });
    ShelfStats stats;
    CHECK(disk.reopen(nullptr, &stats) == kPages);
    CHECK(stats.unknown_files == 4);
    {
        Writer writer(disk.medium->attach(), shelf_config(kCap));
        while (writer.grow() == OpStatus::ok) {  // before anybody knows what they are
        }
        writer.settle();
        while (writer.grow() == OpStatus::ok) {
        }
    }
    CHECK(disk.medium->allocated_bytes() <= kCap);
    for (const auto& stranger : strangers) {
        CAPTURE(stranger.first);
        disk.medium->edit(stranger.first, [&](Bytes& now) { CHECK(now == stranger.second); });
    }
}

TEST_CASE("damage: a format version that is not known is left alone") {
    Damaged disk;
    Bytes newer;
    disk.medium->edit(disk.segments[0], [&](Bytes& data) {
        data[8] = std::byte{2};
        const std::uint64_t sum = checksum(data.data(), 4088);
        std::memcpy(data.data() + 4088, &sum, sizeof sum);
        newer = data;
    });
    ShelfStats stats;
    CHECK(disk.reopen(nullptr, &stats) == kPages - 4);
    CHECK(stats.unknown_files == 1);
    CHECK(stats.damaged_segments == 0);
    Writer writer(disk.medium->attach(), shelf_config(kCap));
    while (writer.grow() == OpStatus::ok) {
    }
    disk.medium->edit(disk.segments[0], [&](Bytes& data) { CHECK(data == newer); });
}

TEST_CASE("B5: files that go away, shrink or turn into directories under a live shelf") {
    Damaged disk;
    Writer writer(disk.medium->attach(), shelf_config(kCap));
    REQUIRE(writer.found.size() == kPages);
    const auto hand = disk.medium->attach();
    hand->remove(disk.segments[0]);
    hand->remove(disk.segments[1]);
    hand->make_directory(disk.segments[1]);
    disk.medium->edit(disk.segments[2], [](Bytes& data) { data.resize(10000); });
    for (std::uint32_t i = 0; i < kPages; ++i) {
        const FoundPage* found = writer.find(FingerprintPage(i));
        REQUIRE(found);
        const OpStatus status = writer.read(found->slot, FingerprintPage(i));
        CHECK((status == OpStatus::ok || status == OpStatus::unreadable || status == OpStatus::corrupt));
        writer.run(OpKind::clear, found->slot);
    }
    CHECK(writer.grow() == OpStatus::ok);
    CHECK(writer.write(writer.empty.back(), FingerprintPage(3)) == OpStatus::ok);
    CHECK(writer.read(writer.empty.back(), FingerprintPage(3)) == OpStatus::ok);
}
