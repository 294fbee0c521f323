// The one I/O interface: what the disk tier asks of a file system. Real (disk_posix), simulated with faults (disk_sim).
//
// Paths are relative to the root the Disk was opened on ("" is the root itself), made of names that the shelf chose itself, never of
// user input. Every call returns a non-negative result or -errno; none throws. Calls on different files, or on disjoint ranges of one
// file, may run at once.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvstrata {

struct DirEntry {
    std::string name;
    bool directory = false;
    std::uint64_t allocated = 0;  // bytes of disk blocks in use, not the nominal length
    std::uint64_t size = 0;
};

enum class OpenMode : std::uint8_t {
    read,           // must exist
    update,         // must exist; read and write
    create,         // read and write, made if missing, mode 0600
    create_new,     // as create, but must not be there yet (EEXIST)
    update_direct,  // as update, O_DIRECT where the file system has it (else buffered; direct() tells)
    read_direct,    // as read, likewise: what lies on the medium, not what the page cache remembers
};

class Disk {
   public:
    virtual ~Disk() = default;

    virtual int open(const std::string& path, OpenMode mode) = 0;  // a handle, or -errno (ELOOP: a link; EPERM: foreign owner)
    virtual int close(int file) = 0;
    // Bytes moved. Fewer than asked only at the end of the file (read) or when the medium gave up half-way (write): a short write is a
    // failed write. Through a direct handle every part and the offset are multiples of 4 KiB.
    virtual std::int64_t preadv(int file, std::span<const iovec> parts, std::uint64_t offset) = 0;
    virtual std::int64_t pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) = 0;
    virtual int allocate(int file,
                         std::uint64_t bytes) = 0;  // blocks for [0, bytes) exist and read as zeros where new, or it failed
    virtual int truncate(int file, std::uint64_t bytes) = 0;
    virtual int sync(int file) = 0;
    virtual int lock(int file) = 0;  // exclusive, never waits: 0 or -EWOULDBLOCK; ends with close() or the process
    virtual int unlock(int file) = 0;
    virtual int make_directory(const std::string& path) = 0;  // mode 0700; 0 if it is there already
    virtual int remove(const std::string& path) = 0;          // a file, or an empty directory
    virtual int rename(const std::string& from, const std::string& to) = 0;
    virtual int list(const std::string& path, std::vector<DirEntry>& into) = 0;
    virtual int free_bytes(std::uint64_t& into) = 0;   // of the file system, for this user
    virtual bool direct() const = 0;                   // whether update_direct really bypasses the page cache
    virtual std::string where() const = 0;             // the root's path, for messages
    virtual bool removed(int) const { return false; }  // of an open file: no name leads to it any more
    virtual int descriptor(int) const { return -1; }   // of an open file, as the kernel calls it; -1: it has none
};

}  // namespace kvstrata
