// An open file of a Disk, closed when its last user lets go.
#pragma once

#include <cerrno>
#include <memory>

#include "disk.hpp"

namespace kvstrata {

class File {
   public:
    // nullptr and -errno in `result` on failure, else 0 in it.
    static std::shared_ptr<File> open(const std::shared_ptr<Disk>& disk, const std::string& path, OpenMode mode, int& result) {
        const int handle = disk->open(path, mode);
        result = handle < 0 ? handle : 0;
        return handle < 0 ? nullptr : std::make_shared<File>(disk, handle);
    }

    File(std::shared_ptr<Disk> disk, int handle) : disk_(std::move(disk)), handle_(handle) {}
    ~File() { disk_->close(handle_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    Disk& disk() const { return *disk_; }
    int handle() const { return handle_; }

    // Bytes read (fewer at the end of the file), or -errno.
    std::int64_t read(void* into, std::size_t bytes, std::uint64_t offset) const {
        const iovec part{into, bytes};
        return disk_->preadv(handle_, {&part, 1}, offset);
    }
    // 0 when everything was written, else -errno.
    int write(const void* data, std::size_t bytes, std::uint64_t offset) const {
        const iovec part{const_cast<void*>(data), bytes};
        return write({&part, 1}, offset);
    }
    int write(std::span<const iovec> parts, std::uint64_t offset) const {
        std::uint64_t bytes = 0;
        for (const iovec& part : parts) bytes += part.iov_len;
        const std::int64_t written = disk_->pwritev(handle_, parts, offset);
        if (written < 0) return int(written);
        return std::uint64_t(written) == bytes ? 0 : -EIO;
    }

   private:
    std::shared_ptr<Disk> disk_;
    int handle_;
};

}  // namespace kvstrata
