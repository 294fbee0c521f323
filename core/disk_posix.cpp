#include "disk_posix.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <limits>

namespace kvstrata {
namespace {

constexpr std::uint64_t kBlock = 4096;

// Repeats a system call while signals interrupt it.
template <class Call>
auto retry(Call call) -> decltype(call()) {
    decltype(call()) result;
    do {
        result = call();
    } while (result < 0 && errno == EINTR);
    return result;
}

// O_NOFOLLOW guards only the last name of a path, so each directory on the way is opened by itself. The handle of the last name's
// directory, to be closed by the destructor unless it is the root's.
class Walk {
   public:
    Walk(int root, const std::string& path) : root_(root), at_(root) {
        std::size_t begin = 0;
        for (std::size_t slash; (slash = path.find('/', begin)) != std::string::npos; begin = slash + 1) {
            const std::string name = path.substr(begin, slash - begin);
            const int next = retry([&] { return openat(at_, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
            const int error = next < 0 ? errno : 0;
            step(next);
            if (next < 0) {
                error_ = error;
                return;
            }
        }
        name_ = begin < path.size() ? path.substr(begin) : ".";
    }
    ~Walk() { step(-1); }
    Walk(const Walk&) = delete;
    Walk& operator=(const Walk&) = delete;

    int error() const { return error_; }
    int directory() const { return at_; }
    const char* name() const { return name_.c_str(); }

   private:
    void step(int next) {
        if (at_ >= 0 && at_ != root_) ::close(at_);
        at_ = next;
    }

    int root_;
    int at_;
    int error_ = 0;
    std::string name_;
};

// Moves all of `parts`, going on after short transfers. In direct mode a transfer goes on at whole blocks only.
template <class Transfer>
std::int64_t transfer_all(int file, std::span<const iovec> parts, std::uint64_t offset, bool direct, Transfer transfer) {
    std::vector<iovec> left(parts.begin(), parts.end());
    std::uint64_t total = 0;
    for (const iovec& part : parts) total += part.iov_len;
    std::uint64_t done = 0;
    std::size_t first = 0;
    while (done < total) {
        const int count = int(std::min<std::size_t>(left.size() - first, IOV_MAX));
        const ssize_t moved = retry([&] { return transfer(file, left.data() + first, count, off_t(offset + done)); });
        if (moved < 0) return done > 0 && errno == EINVAL ? std::int64_t(done) : -errno;  // EINVAL after a part: at the file's end
        std::uint64_t step = std::uint64_t(moved);
        if (direct && done + step < total) {
            if (step % kBlock != 0 && step < kBlock) return std::int64_t(done + step);
            step -= step % kBlock;
        }
        if (step == 0) break;
        done += step;
        while (first < left.size() && step >= left[first].iov_len) step -= left[first++].iov_len;
        if (step > 0) {
            left[first].iov_base = static_cast<char*>(left[first].iov_base) + step;
            left[first].iov_len -= step;
        }
    }
    return std::int64_t(done);
}

// Some file systems accept O_DIRECT at open and refuse it at the first transfer: the handle goes on buffered.
bool drop_direct(int file) {
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0 && fcntl(file, F_SETFL, flags & ~O_DIRECT) == 0;
}

// Files that are locked. A lock belongs to the open file, which the child of a fork shares: so a child closes them at once, else its parent
// would own them for as long as the child lives. Fixed memory and no mutex: in a child, one that another thread had taken stays taken.
class LockedFiles {
   public:
    LockedFiles() {
        for (std::atomic<int>& place : places_) place = kNone;
        pthread_atfork(nullptr, nullptr, [] { known().close_all(); });
    }
    static LockedFiles& known() {
        static LockedFiles files;
        return files;
    }

    void add(int file) {
        if (!exchange(file, file)) exchange(kNone, file);
    }
    bool remove(int file) { return exchange(file, kNone); }

   private:
    static constexpr int kNone = -1;

    bool exchange(int from, int to) {
        return std::ranges::any_of(places_, [=](std::atomic<int>& place) {
            int expected = from;
            return place.compare_exchange_strong(expected, to);
        });
    }
    void close_all() {
        for (std::atomic<int>& place : places_) {
            if (const int file = place.exchange(kNone); file != kNone) ::close(file);
        }
    }

    std::array<std::atomic<int>, 1024> places_;
};

bool reads_only(OpenMode mode) { return mode == OpenMode::read || mode == OpenMode::read_direct; }

bool is_direct(int file) {
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
}

}  // namespace

PosixDisk::PosixDisk(int root, std::string where) : root_(root), where_(std::move(where)) {}

PosixDisk::~PosixDisk() { ::close(root_); }

bool PosixDisk::ours(const struct stat& info) const { return info.st_uid == geteuid() || (group_ && info.st_gid == *group_); }

int PosixDisk::open_at(int directory, const char* name, int flags) const { return openat(directory, name, flags, 0600); }

int PosixDisk::preallocate(int file, std::uint64_t bytes) const { return fallocate(file, 0, 0, off_t(bytes)); }

int PosixDisk::open(const std::string& path, OpenMode mode) {
    const Walk walk(root_, path);
    if (walk.error() != 0) return -walk.error();
    // O_NONBLOCK: a pipe put in a file's place must not stop us; it is refused below. Regular files do not know the flag.
    int flags = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (reads_only(mode) ? O_RDONLY : O_RDWR);
    if (mode == OpenMode::create || mode == OpenMode::create_new) flags |= O_CREAT;
    if (mode == OpenMode::create_new) flags |= O_EXCL;
    if ((mode == OpenMode::update_direct || mode == OpenMode::read_direct) && direct()) flags |= O_DIRECT;
    int file = retry([&] { return open_at(walk.directory(), walk.name(), flags); });
    if (file < 0 && errno == ENOENT && (flags & O_CREAT) != 0 && walk.directory() == root_) {
        if (!remake_root()) return -ENOENT;
        file = retry([&] { return open_at(walk.directory(), walk.name(), flags); });
    }
    if (file < 0 && errno == EINVAL && (flags & O_DIRECT) != 0) {
        direct_.store(false, std::memory_order_relaxed);
        file = retry([&] { return open_at(walk.directory(), walk.name(), flags & ~O_DIRECT); });
    }
    if (file < 0) return -errno;
    struct stat info {};
    int error = 0;
    if (fstat(file, &info) != 0) {
        error = errno;
    } else if (!S_ISREG(info.st_mode)) {
        error = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    } else if (!ours(info)) {
        error = EPERM;
    } else if (group_ && info.st_uid == geteuid() && (info.st_mode & 0777) != 0660) {  // whatever the umask left of it
        fchmod(file, 0660);
    }
    if (error != 0) ::close(file);
    return error != 0 ? -error : file;
}

int PosixDisk::close(int file) {
    if (LockedFiles::known().remove(file)) flock(file, LOCK_UN);
    return ::close(file) == 0 || errno == EINTR ? 0 : -errno;  // after EINTR Linux has closed it
}

std::int64_t PosixDisk::preadv(int file, std::span<const iovec> parts, std::uint64_t offset) {
    const auto read = [](int fd, const iovec* iov, int count, off_t at) { return ::preadv(fd, iov, count, at); };
    std::int64_t result = transfer_all(file, parts, offset, is_direct(file), read);
    if (result == -EINVAL && drop_direct(file)) result = transfer_all(file, parts, offset, false, read);
    return result;
}

std::int64_t PosixDisk::pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) {
    const auto write = [](int fd, const iovec* iov, int count, off_t at) { return ::pwritev(fd, iov, count, at); };
    std::int64_t result = transfer_all(file, parts, offset, is_direct(file), write);
    if (result == -EINVAL && drop_direct(file)) result = transfer_all(file, parts, offset, false, write);
    return result;
}

int PosixDisk::allocate(int file, std::uint64_t bytes) {
    if (retry([&] { return preallocate(file, bytes); }) == 0) return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return -errno;
    // No preallocation here: write the zeros, so that the space is really ours. What the file holds already stays.
    struct stat info {};
    if (fstat(file, &info) != 0) return -errno;
    static constexpr std::array<char, 64 * 1024> zeros{};
    for (std::uint64_t at = std::uint64_t(info.st_size); at < bytes;) {
        const std::size_t size = std::size_t(std::min<std::uint64_t>(zeros.size(), bytes - at));
        const ssize_t written = retry([&] { return ::pwrite(file, zeros.data(), size, off_t(at)); });
        if (written <= 0) return written < 0 ? -errno : -EIO;
        at += std::uint64_t(written);
    }
    return 0;
}

int PosixDisk::truncate(int file, std::uint64_t bytes) {
    return retry([&] { return ftruncate(file, off_t(bytes)); }) == 0 ? 0 : -errno;
}

int PosixDisk::sync(int file) {
    return retry([&] { return fdatasync(file); }) == 0 ? 0 : -errno;
}

int PosixDisk::lock(int file) {
    if (retry([&] { return flock(file, LOCK_EX | LOCK_NB); }) != 0) return -errno;
    LockedFiles::known().add(file);
    return 0;
}

int PosixDisk::unlock(int file) {
    LockedFiles::known().remove(file);
    return retry([&] { return flock(file, LOCK_UN); }) == 0 ? 0 : -errno;
}

int PosixDisk::make_directory(const std::string& path) {
    const Walk walk(root_, path);
    if (walk.error() != 0) return -walk.error();
    if (mkdirat(walk.directory(), walk.name(), 0700) == 0)
        return !group_ || fchmodat(walk.directory(), walk.name(), 02770, 0) == 0 ? 0 : -errno;
    if (errno != EEXIST) return -errno;
    struct stat info {};
    if (fstatat(walk.directory(), walk.name(), &info, AT_SYMLINK_NOFOLLOW) != 0) return -errno;
    if (!S_ISDIR(info.st_mode)) return -ENOTDIR;
    return ours(info) ? 0 : -EPERM;
}

int PosixDisk::remove(const std::string& path) {
    const Walk walk(root_, path);
    if (walk.error() != 0) return -walk.error();
    if (unlinkat(walk.directory(), walk.name(), 0) == 0) return 0;
    if (errno != EISDIR && errno != EPERM) return -errno;  // POSIX says EPERM for a directory, Linux EISDIR
    return unlinkat(walk.directory(), walk.name(), AT_REMOVEDIR) == 0 ? 0 : -errno;
}

int PosixDisk::rename(const std::string& from, const std::string& to) {
    const Walk source(root_, from);
    const Walk target(root_, to);
    if (source.error() != 0 || target.error() != 0) return -std::max(source.error(), target.error());
    return renameat(source.directory(), source.name(), target.directory(), target.name()) == 0 ? 0 : -errno;
}

int PosixDisk::list(const std::string& path, std::vector<DirEntry>& into) {
    into.clear();
    const Walk walk(root_, path);
    if (walk.error() != 0) return -walk.error();
    const int directory =
        retry([&] { return openat(walk.directory(), walk.name(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
    if (directory < 0) return -errno;
    DIR* stream = fdopendir(directory);
    if (!stream) {
        const int error = errno;
        ::close(directory);
        return -error;
    }
    int error = 0;
    for (;;) {
        errno = 0;
        const dirent* item = readdir(stream);
        if (!item) {
            error = errno;
            break;
        }
        const std::string name = item->d_name;
        struct stat info {};
        if (name == "." || name == "..") continue;
        if (fstatat(directory, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;  // gone meanwhile
        into.push_back({name, S_ISDIR(info.st_mode), std::uint64_t(info.st_blocks) * 512, std::uint64_t(info.st_size)});
    }
    closedir(stream);
    std::sort(into.begin(), into.end(), [](const DirEntry& a, const DirEntry& b) { return a.name < b.name; });
    return -error;
}

bool PosixDisk::removed(int file) const {
    struct stat info {};
    return fstat(file, &info) == 0 && info.st_nlink == 0;
}

int PosixDisk::free_bytes(std::uint64_t& into) {
    struct statvfs info {};
    if (retry([&] { return fstatvfs(root_, &info); }) != 0) return -errno;
    // A file system that counts no blocks at all, as those in memory do, does not know.
    into = info.f_blocks == 0 ? std::numeric_limits<std::uint64_t>::max() : std::uint64_t(info.f_bavail) * info.f_frsize;
    return 0;
}

}  // namespace kvstrata
