// Opening the root directory of a PosixDisk: what makes a disk_path usable, and what to say when it is not.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>

#include "bounded.hpp"
#include "disk_posix.hpp"

namespace kvstrata {
namespace {

constexpr std::size_t kBlock = 4096;

struct Opened {
    std::shared_ptr<Disk> disk;
    std::string error;
};

Opened refuse(const std::string& path, const std::string& cause, const std::string& fix) {
    return {nullptr, "disk_path " + path + ": " + cause + "; " + fix};
}

std::string why(int error) { return std::strerror(error); }

const char* advice(int error) {
    switch (error) {
        case EACCES:
        case EPERM:
            return "give this user read and write permission there or choose another directory";
        case EROFS:
            return "mount the file system for writing or choose another directory";
        case ENOSPC:
        case EDQUOT:
            return "free some space there or choose another directory";
        case ENOTDIR:
        case EEXIST:
            return "a file stands where a directory is needed: remove it or choose another directory";
        default:
            return "choose a directory on a working local file system";
    }
}

// mkdir -p with mode 0700 for whatever is missing.
int make_directories(const std::filesystem::path& path) {
    if (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return 0;
    if (errno != ENOENT || !path.has_parent_path() || path.parent_path() == path) return errno;
    if (const int error = make_directories(path.parent_path()); error != 0) return error;
    return mkdir(path.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

// Writes one block with O_DIRECT into a file without a future. 1: direct I/O works, 0: only buffered I/O does, else -errno.
int probe(int root) {
    static std::atomic<unsigned> counter{0};
    const std::string name = ".probe-" + std::to_string(getpid()) + "-" + std::to_string(counter++);
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(kBlock, kBlock), &std::free);
    if (!block) return -ENOMEM;
    std::memset(block.get(), 0, kBlock);
    int result = -EINVAL;
    for (const int direct : {O_DIRECT, 0}) {
        const int file = openat(root, name.c_str(), flags | direct, 0600);
        if (file < 0) {
            result = -errno;
        } else {
            const ssize_t written = pwrite(file, block.get(), kBlock, 0);
            result = written == ssize_t(kBlock) ? (direct != 0 ? 1 : 0) : (written < 0 ? -errno : -ENOSPC);
            ::close(file);
        }
        unlinkat(root, name.c_str(), 0);  // also when the open failed half-way: some file systems leave the name
        if (result >= 0) break;
    }
    return result;
}

std::filesystem::path without_slash(const std::string& path) {
    std::filesystem::path clean = std::filesystem::path(path).lexically_normal();
    return !clean.has_filename() && clean.has_parent_path() ? clean.parent_path() : clean;
}

bool is_member(gid_t group) {
    std::vector<gid_t> groups(std::size_t(std::max(getgroups(0, nullptr), 0)));
    const int count = getgroups(int(groups.size()), groups.data());
    groups.resize(std::size_t(std::max(count, 0)));
    return getegid() == group || std::ranges::find(groups, group) != groups.end() || geteuid() == 0;
}

bool group_may_write(const struct stat& info) { return (info.st_mode & 070) == 070 && (info.st_mode & 07) == 0; }

// Of a directory that a group is to share: 0, or the sentence's cause.
std::string objection(int root, struct stat& info, bool fresh) {
    const std::string name = std::to_string(info.st_gid);
    if (!is_member(info.st_gid)) return "belongs to group " + name + ", of which this user is no member";
    if (fresh && info.st_uid == geteuid() && fchmod(root, 02770) == 0) fstat(root, &info);
    if (!group_may_write(info) || (info.st_mode & S_ISGID) == 0) return "is not shared by its group " + name;
    return {};
}

Opened open_now(const std::string& path, bool group) {
    if (path.empty()) return refuse("(empty)", "no directory is named", "set kvc2.disk_path to a directory");
    const std::filesystem::path clean = without_slash(path);
    const bool existed = access(clean.c_str(), F_OK) == 0;
    if (const int error = make_directories(clean); error != 0) return refuse(path, "cannot be made: " + why(error), advice(error));
    const int root = ::open(clean.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return refuse(path, "cannot be opened: " + why(errno), advice(errno));
    auto disk = std::make_shared<PosixDisk>(root, path);  // owns the handle from here on

    struct stat info {};
    if (fstat(root, &info) != 0) return refuse(path, "cannot be examined: " + why(errno), advice(errno));
    if (!group && info.st_uid != geteuid()) {
        return refuse(path, "belongs to user " + std::to_string(info.st_uid), "choose a directory that this user owns");
    }
    std::vector<DirEntry> entries;
    if (const int error = disk->list("", entries); error != 0) {
        return refuse(path, "cannot be read: " + why(-error), advice(-error));
    }
    if (group) {
        const std::string cause = objection(root, info, entries.empty());
        if (!cause.empty()) return refuse(path, cause, "run chgrp GROUP and chmod 2770 on it, or leave kvc2.disk_group out");
        disk->share_with(info.st_gid);
    } else if (existed && entries.empty() && (info.st_mode & 077) != 0) {
        fchmod(root, 0700);  // an empty directory made for us: nobody else needs to look in
    } else if ((info.st_mode & 022) != 0) {
        return refuse(path, "can be written by other users",
                      "run chmod 700 on it, choose another directory, or see kvc2.disk_group");
    }
    for (const DirEntry& entry : entries) {
        if (entry.name.starts_with(".probe-")) disk->remove(entry.name);  // of a process that died just here
    }
    const int direct = probe(root);
    if (direct < 0) return refuse(path, "cannot be written: " + why(-direct), advice(-direct));
    if (direct > 0) disk->allow_direct();
    disk->keep_root();
    return {disk, {}};
}

Opened open_as_it_is(const std::string& path, bool) {
    const int root = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return refuse(path, "cannot be opened: " + why(errno), "name the directory that kvc2.disk_path names");
    auto disk = std::make_shared<PosixDisk>(root, path);
    struct stat info {};
    if (fstat(root, &info) != 0) return refuse(path, "cannot be examined: " + why(errno), advice(errno));
    const bool shared = group_may_write(info) && is_member(info.st_gid);
    if (info.st_uid != geteuid() && !shared)
        return refuse(path, "belongs to user " + std::to_string(info.st_uid), "run this as that user");
    if (shared) disk->share_with(info.st_gid);
    disk->allow_direct();
    return {disk, {}};
}

std::shared_ptr<Disk> in_time(Opened (*open)(const std::string&, bool), const std::string& path, bool group, std::string& error,
                              std::chrono::milliseconds patience) {
    std::optional<Opened> opened = run_bounded([=] { return open(path, group); }, patience);
    if (!opened) {
        opened = refuse(path, "does not answer", "check that its file system is mounted and alive, or choose another directory");
    }
    error = opened->error;
    return opened->disk;
}

}  // namespace

// The same handle leads to the new directory: those who are at it meanwhile see one or the other.
bool PosixDisk::remake_root() {
    if (!keep_root_ || !removed(root_)) return false;
    const std::filesystem::path path = without_slash(where_);
    if (make_directories(path) != 0) return false;
    const int root = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return false;
    struct stat info {};
    bool fits = fstat(root, &info) == 0;
    if (group_) {
        fits = fits && info.st_gid == *group_ && objection(root, info, true).empty();
    } else {
        fits = fits && info.st_uid == geteuid() && (info.st_mode & 022) == 0;
    }
    const bool done = fits && dup3(root, root_, O_CLOEXEC) >= 0;
    ::close(root);
    return done;
}

std::shared_ptr<Disk> PosixDisk::open_root(const std::string& path, std::string& error, bool group,
                                           std::chrono::milliseconds patience) {
    return in_time(&open_now, path, group, error, patience);
}

std::shared_ptr<Disk> PosixDisk::open_existing(const std::string& path, std::string& error, std::chrono::milliseconds patience) {
    return in_time(&open_as_it_is, path, false, error, patience);
}

}  // namespace kvstrata
