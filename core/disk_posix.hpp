// The real Disk: everything relative to one directory handle, no link followed below it, files 0600, directories 0700. Of a directory that
// a group shares: 0660 and 2770, and what members of that group own is ours as well.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>

#include "disk.hpp"

namespace kvstrata {

class PosixDisk : public Disk {
   public:
    // Makes the directory (and missing parents) with mode 0700 where needed, refuses one that belongs to or can be written by others,
    // and finds out once whether O_DIRECT works there. On failure nullptr and one sentence naming path, cause and fix. Returns within
    // `patience` even when the file system below does not answer.
    // `group`: the directory's group shares it; then a directory that its members cannot all write is refused.
    static std::shared_ptr<Disk> open_root(const std::string& path, std::string& error, bool group = false,
                                           std::chrono::milliseconds patience = std::chrono::milliseconds{1500});

    // For tools: a directory that is there already. Nothing is made or written, so that it may be full or read-only; whether O_DIRECT works
    // is found out file by file. Whether a group shares it, its mode tells. Errors and patience as above.
    static std::shared_ptr<Disk> open_existing(const std::string& path, std::string& error,
                                               std::chrono::milliseconds patience = std::chrono::milliseconds{1500});

    PosixDisk(int root, std::string where);  // takes the handle over; buffered until allow_direct()
    ~PosixDisk() override;
    PosixDisk(const PosixDisk&) = delete;
    PosixDisk& operator=(const PosixDisk&) = delete;

    int open(const std::string& path, OpenMode mode) override;
    int close(int file) override;
    std::int64_t preadv(int file, std::span<const iovec> parts, std::uint64_t offset) override;
    std::int64_t pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) override;
    int allocate(int file, std::uint64_t bytes) override;
    int truncate(int file, std::uint64_t bytes) override;
    int sync(int file) override;
    int lock(int file) override;
    int unlock(int file) override;
    int make_directory(const std::string& path) override;
    int remove(const std::string& path) override;
    int rename(const std::string& from, const std::string& to) override;
    int list(const std::string& path, std::vector<DirEntry>& into) override;
    int free_bytes(std::uint64_t& into) override;
    bool direct() const override { return direct_.load(std::memory_order_relaxed); }
    std::string where() const override { return where_; }
    bool removed(int file) const override;
    int descriptor(int file) const override { return file; }

    // From now on a root that somebody removes is made again when a file is to be made in it.
    void keep_root() { keep_root_ = true; }
    void share_with(gid_t group) { group_ = group; }
    void allow_direct() { direct_.store(true, std::memory_order_relaxed); }

   protected:
    // What not every file system can do; a test refuses it here. As openat() and fallocate(): -1 and errno.
    virtual int open_at(int directory, const char* name, int flags) const;
    virtual int preallocate(int file, std::uint64_t bytes) const;

   private:
    bool remake_root();
    bool ours(const struct stat& info) const;

    int root_;
    std::string where_;
    bool keep_root_ = false;
    std::optional<gid_t> group_;  // that shares the directory
    std::atomic<bool> direct_{false};
};

}  // namespace kvstrata
