// What file systems lack, refuse or lose under a live shelf; what a power loss leaves.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>

#include "../disk_posix.hpp"
#include "../disk_sim.hpp"
#include "fingerprint.hpp"
#include "folder.hpp"
#include "hooked_disk.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 1 << 20;

// A file system without O_DIRECT, or without preallocation.
class PoorDisk final : public PosixDisk {
   public:
    PoorDisk(const std::string& path, bool direct, bool preallocates)
        : PosixDisk(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), path), direct_(direct), preallocates_(preallocates) {
        allow_direct();  // as somebody would who only looked at the kernel's version
    }

   protected:
    int open_at(int directory, const char* name, int flags) const override {
        if (direct_ || (flags & O_DIRECT) == 0) return PosixDisk::open_at(directory, name, flags);
        errno = EINVAL;
        return -1;
    }
    int preallocate(int file, std::uint64_t bytes) const override {
        if (preallocates_) return PosixDisk::preallocate(file, bytes);
        errno = EOPNOTSUPP;
        return -1;
    }

   private:
    bool direct_, preallocates_;
};

std::vector<std::string> segments_of(const SimMedium& medium) {
    std::vector<std::string> paths;
    for (const std::string& path : medium.files()) {
        if (path.ends_with(".kvs")) paths.push_back(path);
    }
    return paths;
}

}  // namespace

TEST_CASE("B14: without O_DIRECT, without preallocation, without both: buffered, every byte right, space really taken") {
    for (const bool direct : {false, true}) {
        for (const bool preallocates : {false, true}) {
            CAPTURE(direct);
            CAPTURE(preallocates);
            const Folder folder;
            std::uint32_t count = 0;
            {
                Writer writer(std::make_shared<PoorDisk>(folder.path, direct, preallocates), shelf_config(kCap));
                REQUIRE_MESSAGE(writer.shelf, writer.error);
                count = fill(writer, 0);
                CHECK(count > 60);
                CHECK(writer.shelf->stats().direct == direct);
                std::vector<DirEntry> files;
                PoorDisk(folder.path, direct, preallocates).list("shelves", files);
                REQUIRE(files.size() == 1);
                for (const auto& file : std::filesystem::directory_iterator(folder.path + "/shelves/" + files[0].name)) {
                    struct stat info {};
                    REQUIRE(stat(file.path().c_str(), &info) == 0);
                    CHECK(info.st_blocks * 512 >= info.st_size);
                }
            }
            Writer heir(std::make_shared<PoorDisk>(folder.path, direct, preallocates), shelf_config(kCap));
            CHECK(served(heir, 0, count) == count);
        }
    }
}

TEST_CASE("trouble: a refused write says whether room or something else was missing; reads go on") {
    const auto medium = SimMedium::make(1);
    std::atomic<int> error{0};
    const auto hook = [&](bool write, auto, std::uint64_t) { return write ? -error.load() : 0; };
    Writer writer(std::make_shared<HookedDisk>(medium->attach(), hook), shelf_config(kCap));
    REQUIRE(writer.grow() == OpStatus::ok);
    REQUIRE(writer.write(writer.empty[0], FingerprintPage(0)) == OpStatus::ok);
    for (const auto& [number, status] : {std::pair{ENOSPC, OpStatus::full},
                                         {EDQUOT, OpStatus::full},
                                         {EROFS, OpStatus::failed},
                                         {EIO, OpStatus::failed},
                                         {EACCES, OpStatus::failed}}) {
        error = number;
        for (int i = 0; i < 5; ++i) {
            CHECK(writer.write(writer.empty[1], FingerprintPage(1)) == status);
            CHECK(writer.grow() == status);
        }
        CHECK(writer.read(writer.empty[0], FingerprintPage(0)) == OpStatus::ok);
    }
    error = 0;
    CHECK(writer.write(writer.empty[1], FingerprintPage(1)) == OpStatus::ok);
    CHECK(writer.grow() == OpStatus::ok);
    CHECK_FALSE(writer.shelf->has_news());
}

TEST_CASE("B5: a segment whose file is gone is given up after a few tries, and its room is used again") {
    const auto medium = SimMedium::make(1);
    std::uint32_t count = 0;
    {
        Writer writer(medium->attach(), shelf_config(kCap));
        count = fill(writer, 0);
    }
    Writer writer(medium->attach(), shelf_config(kCap));
    REQUIRE(writer.found.size() == count);
    medium->attach()->remove(segments_of(*medium)[2]);
    std::vector<SlotRef> slots;
    for (const FoundPage& page : writer.found) {
        if (page.slot.segment == 2) slots.push_back(page.slot);
    }
    REQUIRE(slots.size() == 4);
    for (std::uint32_t i = 0; i < 4; ++i) CHECK(writer.read(slots[i], FingerprintPage(8 + i)) == OpStatus::unreadable);
    writer.settle();
    CHECK(writer.vanished == std::vector<std::uint32_t>{2});
    CHECK(writer.shelf->stats().vanished_segments == 1);
    CHECK(writer.read(slots[0], FingerprintPage(8)) == OpStatus::unreadable);
    CHECK(writer.write(slots[0], FingerprintPage(8)) == OpStatus::failed);
    CHECK(writer.grow() == OpStatus::ok);
    CHECK(writer.write(writer.empty[0], FingerprintPage(8)) == OpStatus::ok);
    CHECK(medium->peak_bytes() <= kCap);
    writer.settle();
    CHECK(writer.vanished.size() == 1);
}

TEST_CASE("B5: open files that were removed are noticed by looking; a removed directory is made again") {
    const auto medium = SimMedium::make(1);
    Writer writer(medium->attach(), shelf_config(kCap));
    const std::uint32_t count = fill(writer, 0);
    writer.shelf->check_files();
    writer.settle();
    CHECK(writer.vanished.empty());
    const auto hand = medium->attach();
    const std::string first = segments_of(*medium)[0];
    hand->remove(first);
    CHECK(writer.read({0, 1}, FingerprintPage(1)) == OpStatus::ok);  // still open
    medium->set_faults({.fail_at = 1});
    writer.shelf->check_files();  // a directory that cannot be listed says nothing
    CHECK_FALSE(writer.shelf->has_news());
    medium->set_faults({});
    writer.shelf->check_files();
    writer.settle();
    CHECK(writer.vanished == std::vector<std::uint32_t>{0});
    CHECK(writer.read({0, 1}, FingerprintPage(1)) == OpStatus::unreadable);

    for (const std::string& path : medium->files()) hand->remove(path);
    hand->remove(first.substr(0, first.rfind('/')));
    hand->remove("shelves");
    writer.shelf->check_files();
    writer.settle();
    CHECK(writer.vanished.size() == count / 4);
    CHECK(writer.shelf->stats().segments == 0);
    CHECK(writer.shelf->allocated_bytes() == 0);
    CHECK(fill(writer, 500) == count);
    CHECK(medium->allocated_bytes() <= kCap);
}

TEST_CASE("durability: after sync a power loss takes nothing; without it what is found is exact") {
    std::size_t kept = 0;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        for (const bool synced : {true, false}) {
            CAPTURE(seed);
            CAPTURE(synced);
            const auto medium = SimMedium::make(seed);
            Writer writer(medium->attach(), shelf_config(300 * 1024));
            REQUIRE(writer.grow() == OpStatus::ok);
            REQUIRE(writer.grow() == OpStatus::ok);
            for (std::uint32_t i = 0; i < 7; ++i) REQUIRE(writer.write(writer.empty[i], FingerprintPage(i)) == OpStatus::ok);
            REQUIRE(writer.run(OpKind::clear, writer.empty[2]).status == OpStatus::ok);
            if (synced) CHECK(writer.shelf->sync() == 0);
            if (synced) {
                medium->set_faults({});
                CHECK(writer.shelf->sync() == 0);
                CHECK(medium->operations() == 0);  // nothing was written since
            }
            medium->crash(seed);
            Writer heir(medium->attach(), shelf_config(300 * 1024));
            REQUIRE_MESSAGE(heir.shelf, heir.error);
            if (synced) CHECK_FALSE(heir.shelf->has_news());
            heir.settle();
            std::size_t good = 0;
            for (std::uint32_t i = 0; i < 7; ++i) {
                const FoundPage* found = heir.find(FingerprintPage(i));
                if (!found) continue;
                const OpStatus status = heir.read(found->slot, FingerprintPage(i));
                CHECK(status != OpStatus::failed);
                good += status == OpStatus::ok;
            }
            if (synced) CHECK(good == 6);
            if (!synced) kept += good;
        }
    }
    CHECK(kept > 40);  // of 280
}

TEST_CASE("durability: a sync that fails is tried again") {
    const auto medium = SimMedium::make(1);
    Writer writer(medium->attach(), shelf_config(kCap));
    REQUIRE(writer.grow() == OpStatus::ok);
    REQUIRE(writer.write(writer.empty[0], FingerprintPage(0)) == OpStatus::ok);
    medium->set_faults({.fail_at = 1});
    CHECK(writer.shelf->sync() == -EIO);
    CHECK(writer.shelf->sync() == 0);
    medium->crash(3);
    Writer heir(medium->attach(), shelf_config(kCap));
    CHECK(served(heir, 0, 1) == 1);
}
