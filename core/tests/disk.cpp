// The real disk: what it makes, what it refuses, what it says.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "../directory.hpp"
#include "../disk_posix.hpp"
#include "../slot.hpp"
#include "folder.hpp"

using namespace kvstrata;
using kvstrata::testing::Folder;

namespace {

mode_t mode_of(const std::string& path) {
    struct stat info {};
    return lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

std::shared_ptr<Disk> open_root(const std::string& path) {
    std::string error;
    auto disk = PosixDisk::open_root(path, error);
    CAPTURE(error);
    REQUIRE(disk);
    return disk;
}

std::string refusal(const std::string& path) {
    std::string error;
    const auto before = std::chrono::steady_clock::now();
    CHECK_FALSE(PosixDisk::open_root(path, error));
    CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(10));
    return error;
}

}  // namespace

TEST_CASE("disk: bytes come back, short reads only at the end, modes are private") {
    const Folder folder;
    const mode_t mask = umask(0);
    const auto disk = open_root(folder.path + "/missing/parents");
    CHECK(disk->make_directory("a") == 0);
    CHECK(disk->make_directory("a") == 0);
    const int file = disk->open("a/f", OpenMode::create);
    umask(mask);
    REQUIRE(file >= 0);
    CHECK(mode_of(folder.path + "/missing") == 0700);
    CHECK(mode_of(folder.path + "/missing/parents/a") == 0700);
    CHECK(mode_of(folder.path + "/missing/parents/a/f") == 0600);
    CHECK(disk->open("a/f", OpenMode::create_new) == -EEXIST);
    char text[] = "hello, world";
    iovec parts[2] = {{text, 5}, {text + 5, 7}};
    CHECK(disk->pwritev(file, parts, 4094) == 12);
    char back[16]{};
    iovec whole{back, sizeof back};
    CHECK(disk->preadv(file, {&whole, 1}, 4094) == 12);
    CHECK(std::string(back) == text);
    CHECK(disk->allocate(file, 1 << 20) == 0);
    std::vector<DirEntry> entries;
    CHECK(disk->list("a", entries) == 0);
    REQUIRE(entries.size() == 1);
    CHECK(entries[0].allocated >= 1 << 20);
    CHECK(disk->truncate(file, 10) == 0);
    CHECK(disk->sync(file) == 0);
    CHECK(disk->close(file) == 0);
    CHECK(disk->rename("a/f", "a/g") == 0);
    CHECK(disk->open("a/f", OpenMode::read) == -ENOENT);
    CHECK(disk->remove("a") == -ENOTEMPTY);
    CHECK(disk->remove("a/g") == 0);
    CHECK(disk->remove("a") == 0);
    std::uint64_t free = 0;
    CHECK(disk->free_bytes(free) == 0);
    CHECK(free > 0);
}

TEST_CASE("B14: direct or not, the bytes are right") {
    const Folder folder;
    const auto disk = open_root(folder.path);
    disk->close(disk->open("f", OpenMode::create));
    const int file = disk->open("f", OpenMode::update_direct);
    REQUIRE(file >= 0);
    const AlignedBuffer buffer(3 * 4096);
    for (std::size_t i = 0; i < buffer.bytes(); ++i) buffer.data()[i] = std::byte(i * 7 % 253);
    iovec parts[2] = {{buffer.data(), 4096}, {buffer.data() + 4096, 8192}};
    CHECK(disk->pwritev(file, parts, 8192) == 12288);
    const AlignedBuffer back(4 * 4096);
    iovec whole{back.data(), back.bytes()};
    CHECK(disk->preadv(file, {&whole, 1}, 8192) == 12288);
    CHECK(std::memcmp(buffer.data(), back.data(), 12288) == 0);
    // Unaligned: what O_DIRECT refuses goes through the page cache.
    iovec odd{buffer.data() + 1, 100};
    CHECK(disk->pwritev(file, {&odd, 1}, 3) == 100);
    iovec odd_back{back.data() + 3, 100};
    CHECK(disk->preadv(file, {&odd_back, 1}, 3) == 100);
    CHECK(std::memcmp(buffer.data() + 1, back.data() + 3, 100) == 0);
    disk->close(file);
}

TEST_CASE("disk: a lock is exclusive between handles and ends with close") {
    const Folder folder;
    const auto disk = open_root(folder.path);
    const auto again = open_root(folder.path);
    const int mine = disk->open("lock", OpenMode::create);
    const int theirs = again->open("lock", OpenMode::create);
    CHECK(disk->lock(mine) == 0);
    CHECK(again->lock(theirs) == -EWOULDBLOCK);
    CHECK(disk->unlock(mine) == 0);
    CHECK(again->lock(theirs) == 0);
    CHECK(disk->lock(mine) == -EWOULDBLOCK);
    again->close(theirs);
    CHECK(disk->lock(mine) == 0);
    disk->close(mine);
}

TEST_CASE("disk: links, pipes, directories and foreign files are refused and nothing hangs") {
    const Folder folder;
    const auto disk = open_root(folder.path);
    disk->make_directory("real");
    disk->close(disk->open("real/f", OpenMode::create));
    REQUIRE(symlink("real/f", (folder.path + "/link").c_str()) == 0);
    REQUIRE(symlink("real", (folder.path + "/way").c_str()) == 0);
    REQUIRE(mkfifo((folder.path + "/pipe").c_str(), 0600) == 0);
    CHECK(disk->open("link", OpenMode::update) == -ELOOP);
    const int through = disk->open("way/f", OpenMode::update);
    CHECK((through == -ELOOP || through == -ENOTDIR));
    CHECK(disk->make_directory("way") == -ENOTDIR);
    CHECK(disk->open("pipe", OpenMode::update) == -EINVAL);
    CHECK(disk->open("pipe", OpenMode::read) == -EINVAL);
    CHECK(disk->open("real", OpenMode::update) == -EISDIR);
    CHECK(disk->open("real/f/g", OpenMode::read) == -ENOTDIR);
    if (geteuid() == 0) {
        REQUIRE(chown((folder.path + "/real/f").c_str(), 12345, 12345) == 0);
        CHECK(disk->open("real/f", OpenMode::update) == -EPERM);
    }
}

TEST_CASE("B11: an unusable disk_path gives one sentence with path, cause and fix") {
    const Folder folder;
    std::ofstream(folder.path + "/file") << "x";
    for (const std::string& path :
         {folder.path + "/file", folder.path + "/file/below", std::string("/proc/nowhere/at/all"), std::string{}}) {
        const std::string error = refusal(path);
        CHECK(error.find(path) != std::string::npos);
        CHECK(error.find("; ") != std::string::npos);
    }
    const std::string open_to_all = folder.path + "/open";
    std::filesystem::create_directory(open_to_all);
    std::ofstream(open_to_all + "/something") << "x";
    chmod(open_to_all.c_str(), 0777);
    CHECK(refusal(open_to_all).find("other users") != std::string::npos);
    if (geteuid() == 0) {
        const std::string foreign = folder.path + "/foreign";
        std::filesystem::create_directory(foreign);
        REQUIRE(chown(foreign.c_str(), 12345, 12345) == 0);
        CHECK(refusal(foreign).find("12345") != std::string::npos);
    } else {
        const std::string read_only = folder.path + "/read-only";
        std::filesystem::create_directory(read_only);
        chmod(read_only.c_str(), 0500);
        CHECK(refusal(read_only + "/below").find("permission") != std::string::npos);
    }
}

TEST_CASE("disk: an empty directory becomes private, left-over probes go away") {
    const Folder folder;
    chmod(folder.path.c_str(), 0755);
    open_root(folder.path);
    CHECK(mode_of(folder.path) == 0700);
    std::ofstream(folder.path + "/.probe-1-1") << "x";
    const auto disk = open_root(folder.path);
    std::vector<DirEntry> entries;
    CHECK(disk->list("", entries) == 0);
    CHECK(entries.empty());
}

TEST_CASE("B5: a root that was removed is made again with the next file in it, at the same handle") {
    const Folder folder;
    const std::string path = folder.path + "/cache/deep";
    const auto disk = open_root(path);
    const int old = disk->open("lock", OpenMode::create);
    CHECK_FALSE(disk->removed(old));
    std::filesystem::remove_all(folder.path + "/cache");
    CHECK(disk->removed(old));
    CHECK(disk->make_directory("shelves") == -ENOENT);
    CHECK(disk->open("lock", OpenMode::update) == -ENOENT);
    const int made = disk->open("lock", OpenMode::create);
    REQUIRE(made >= 0);
    CHECK_FALSE(disk->removed(made));
    CHECK(disk->make_directory("shelves") == 0);
    CHECK(std::filesystem::exists(path + "/lock"));
    CHECK(std::filesystem::exists(path + "/shelves"));
    disk->close(old);
    disk->close(made);

    // Not where others may write, and not by tools, which make nothing.
    std::filesystem::remove_all(folder.path + "/cache");
    std::filesystem::create_directories(path);
    std::filesystem::permissions(path, std::filesystem::perms::all);
    CHECK(disk->open("lock", OpenMode::create) == -ENOENT);
    std::string error;
    const auto tool = PosixDisk::open_existing(path, error);
    REQUIRE(tool);
    std::filesystem::remove_all(path);
    CHECK(tool->open("lock", OpenMode::create) == -ENOENT);
    CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("C2: whoever holds a lock file that was removed takes the one that is there") {
    const Folder folder;
    Directory one(open_root(folder.path), 1), other(open_root(folder.path), 2);
    REQUIRE(one.open() == 0);
    std::filesystem::remove(folder.path + "/lock");
    REQUIRE(other.open() == 0);
    const Directory::Hold theirs(other, std::chrono::milliseconds{0});
    CHECK(theirs.error == 0);
    CHECK(Directory::Hold(one, std::chrono::milliseconds{0}).error == -EWOULDBLOCK);
}
