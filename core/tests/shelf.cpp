// The shelf on a healthy disk: round trips, refusals, reopening.
#include "../shelf.hpp"

#include <doctest/doctest.h>

#include <cerrno>

#include "../disk_posix.hpp"
#include "../disk_sim.hpp"
#include "../handles.hpp"
#include "fingerprint.hpp"
#include "folder.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

}  // namespace

TEST_CASE("shelf: a page comes back exactly, and only as itself") {
    const auto medium = SimMedium::make(1);
    Writer writer(medium->attach(), shelf_config(kCap));
    REQUIRE_MESSAGE(writer.shelf, writer.error);
    CHECK(writer.found.empty());
    CHECK(writer.empty.empty());
    REQUIRE(writer.grow() == OpStatus::ok);
    REQUIRE(writer.empty.size() >= 4);
    const SlotRef slot = writer.empty[1];
    const FingerprintPage page(3), other(4);              // 3 carries a media item
    CHECK(writer.read(slot, page) == OpStatus::corrupt);  // nothing was ever there
    CHECK(writer.write(slot, page) == OpStatus::ok);
    CHECK(writer.read(slot, page) == OpStatus::ok);
    CHECK(writer.read(slot, other) == OpStatus::stale);

    FingerprintPage twin(4);
    twin.key = page.key;  // a collision: same name, other content
    CHECK(writer.read(slot, twin) == OpStatus::conflict);
    twin = page;
    twin.tokens[5] ^= 1;
    CHECK(writer.read(slot, twin) == OpStatus::conflict);
    twin = page;
    twin.media[0].digest = key_of(77);
    CHECK(writer.read(slot, twin) == OpStatus::conflict);
    twin = page;
    twin.media.clear();
    CHECK(writer.read(slot, twin) == OpStatus::conflict);
    twin = page;
    twin.space = key_of(0x12);  // another namespace under this key cannot be
    CHECK(writer.read(slot, twin) == OpStatus::corrupt);
    CHECK(writer.read(slot, page) == OpStatus::ok);

    CHECK(writer.write(slot, other) == OpStatus::ok);
    CHECK(writer.read(slot, page) == OpStatus::stale);
    CHECK(writer.read(slot, other) == OpStatus::ok);
    CHECK(writer.run(OpKind::clear, slot).status == OpStatus::ok);
}

TEST_CASE("shelf: what cannot be stored or does not exist is refused") {
    const auto medium = SimMedium::make(1);
    Writer writer(medium->attach(), shelf_config(kCap));
    REQUIRE(writer.grow() == OpStatus::ok);
    FingerprintPage page(1);
    CHECK(writer.read({5, 0}, page) == OpStatus::unreadable);
    CHECK(writer.read({0, 1000000}, page) == OpStatus::unreadable);
    CHECK(writer.write({0, 0xffffffff}, page) == OpStatus::failed);
    FingerprintPage crowded(1);
    crowded.media.resize(1000, {0, key_of(1)});
    CHECK(writer.write(writer.empty[0], crowded) == OpStatus::failed);
    FingerprintPage half(1);
    half.tokens.pop_back();
    CHECK(writer.write(writer.empty[0], half) == OpStatus::failed);
    writer.shelf->close();
    CHECK(writer.write(writer.empty[0], page) == OpStatus::failed);
    CHECK(writer.grow() == OpStatus::failed);
}

TEST_CASE("shelf: a layout that leaves bytes without a checksum, or a cap too small, stops with a sentence") {
    const auto medium = SimMedium::make(1);
    std::string error;
    ShelfConfig config = shelf_config(kCap);
    config.planes.pop_back();
    CHECK_FALSE(Shelf::open(medium->attach(), config, error));
    CHECK(error.find("planes") != std::string::npos);
    CHECK_FALSE(Shelf::open(medium->attach(), shelf_config(30000), error));
    CHECK(error.find("disk_size_GB") != std::string::npos);
}

TEST_CASE("B1: everything written is found after a restart, and after kill -9") {
    for (const bool killed : {false, true}) {
        const auto medium = SimMedium::make(1);
        const auto first_disk = medium->attach();
        Writer first(first_disk, shelf_config(kCap));
        REQUIRE(first.shelf);
        const std::uint32_t count = fill(first, 0);
        CHECK(count > 60);
        CHECK(first.run(OpKind::clear, {0, 2}).status == OpStatus::ok);
        if (killed) {
            first_disk->kill();
        } else {
            first.shelf->close();
        }
        Writer second(medium->attach(), shelf_config(kCap));
        REQUIRE_MESSAGE(second.shelf, second.error);
        CHECK(second.found.size() == count - 1);
        CHECK(second.empty == std::vector<SlotRef>{{0, 2}});
        CHECK(served(second, 0, count) == count - 1);
        CHECK(second.shelf->stats().adopted_shelves == 1);
        CHECK(medium->peak_bytes() <= kCap);
    }
}

TEST_CASE("B1: the same on a real file system, direct and private") {
    const Folder folder;
    std::string error;
    std::uint32_t count = 0;
    for (int round = 0; round < 3; ++round) {
        const auto disk = PosixDisk::open_root(folder.path + "/cache", error);
        REQUIRE_MESSAGE(disk, error);
        Writer writer(disk, shelf_config(kCap));
        REQUIRE_MESSAGE(writer.shelf, writer.error);
        if (round == 0)
            count = fill(writer, 0);
        else
            CHECK(served(writer, 0, count) == count);
        CHECK(writer.grow() == OpStatus::full);
    }
    std::uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path)) {
        const auto open_to_others = std::filesystem::perms::group_all | std::filesystem::perms::others_all;
        CHECK((entry.status().permissions() & open_to_others) == std::filesystem::perms::none);
        if (entry.is_regular_file()) bytes += entry.file_size();
    }
    CHECK(bytes <= kCap);
    CHECK(std::filesystem::exists(folder.path + "/cache/namespaces/" + std::string(64, '1') + ".json"));
}

TEST_CASE("shelf: namespaces of one shape share segments; each page keeps its own") {
    const auto medium = SimMedium::make(1);
    const Key other_space = key_of(0x44);
    {
        Writer writer(medium->attach(), shelf_config(kCap));
        REQUIRE(writer.grow() == OpStatus::ok);
        CHECK(writer.write(writer.empty[0], FingerprintPage(2)) == OpStatus::ok);
        CHECK(writer.write(writer.empty[1], FingerprintPage(2, other_space)) == OpStatus::ok);
    }
    Writer writer(medium->attach(), shelf_config(kCap));
    REQUIRE(writer.found.size() == 2);
    CHECK(writer.find(FingerprintPage(2))->space == key_of(0x11));
    CHECK(writer.find(FingerprintPage(2, other_space))->space == other_space);
    CHECK(writer.read(writer.find(FingerprintPage(2))->slot, FingerprintPage(2, other_space)) == OpStatus::stale);
}

TEST_CASE("handles: a bounded number stays open, whoever holds one keeps it") {
    const auto medium = SimMedium::make(1);
    for (const char* path : {"a", "b", "c"}) medium->edit(path, [&](auto& data) { data.assign(4096, std::byte(path[0])); });
    Handles handles(medium->attach(), 2);
    int error = 0;
    const auto a = handles.get("a", OpenMode::update, error);
    CHECK(handles.get("a", OpenMode::update, error) == a);
    CHECK(handles.get("a", OpenMode::update_direct, error) != a);
    handles.get("b", OpenMode::update, error);
    handles.get("c", OpenMode::update, error);
    const auto again = handles.get("a", OpenMode::update, error);
    CHECK(again != a);  // it had been pushed out, and yet:
    char first = 0;
    CHECK(a->read(&first, 1, 0) == 1);
    CHECK(first == 'a');
    handles.forget("a");
    CHECK(handles.get("a", OpenMode::update, error) != again);
    CHECK_FALSE(handles.get("missing", OpenMode::update, error));
    CHECK(error == -ENOENT);
}
