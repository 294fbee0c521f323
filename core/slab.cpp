#include "slab.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <limits>

namespace kvstrata {
namespace {

constexpr std::size_t kBlock = 4096;

// What this process can ever have: physical memory, or the container's limit where that is smaller.
std::uint64_t memory_limit() {
    std::uint64_t limit = std::uint64_t(sysconf(_SC_PHYS_PAGES)) * std::uint64_t(sysconf(_SC_PAGESIZE));
    for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
        std::ifstream file(path);
        std::uint64_t value = 0;
        if (file >> value && value > 0 && value < limit) limit = value;  // "max" does not parse: no limit
    }
    return limit;
}

std::string gib(std::uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f GiB", double(bytes) / double(1ull << 30));
    return text;
}

}  // namespace

std::shared_ptr<Slab> Slab::make(const SlabConfig& config, std::string& error) {
    if (config.rows == 0 || config.rows > std::uint32_t(std::numeric_limits<Row>::max()) || config.row_stride == 0 ||
        config.row_stride % kBlock != 0) {
        error = "the CPU tier needs at least one row and a row stride that is a multiple of 4096 bytes";
        return nullptr;
    }
    const std::uint64_t limit = memory_limit();
    if (config.row_stride > std::numeric_limits<std::size_t>::max() / config.rows || config.row_stride * config.rows > limit) {
        error = "the CPU tier is to hold " + std::to_string(config.rows) + " pages of " + std::to_string(config.row_stride) +
                " bytes, but this machine (or container) has only " + gib(limit) + " of memory; lower cpu_memory_size_GB";
        return nullptr;
    }
    std::shared_ptr<Slab> slab(new Slab());  // the constructor is private; owned at once
    slab->rows_ = config.rows;
    slab->row_stride_ = config.row_stride;
    slab->bytes_ = config.row_stride * config.rows;
    slab->chunk_bytes_ = std::max<std::size_t>(1, config.chunk_bytes / config.row_stride) * config.row_stride;

    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (config.shared) {
        flags = MAP_SHARED;
        slab->fd_ = memfd_create("kvstrata-slab", MFD_CLOEXEC);
        if (slab->fd_ < 0 || ftruncate(slab->fd_, off_t(slab->bytes_)) != 0) {
            error = "cannot make " + gib(slab->bytes_) + " of shared memory for the CPU tier: " + std::strerror(errno) +
                    "; lower cpu_memory_size_GB";
            return nullptr;
        }
    }
    void* base = mmap(nullptr, slab->bytes_, PROT_READ | PROT_WRITE, flags, slab->fd_, 0);
    if (base == MAP_FAILED) {
        error = "cannot map " + gib(slab->bytes_) + " for the CPU tier: " + std::strerror(errno) + "; lower cpu_memory_size_GB";
        return nullptr;
    }
    slab->base_ = static_cast<std::byte*>(base);
    madvise(base, slab->bytes_, MADV_HUGEPAGE);  // fewer faults and TLB misses where allowed; refusal is fine
    madvise(base, slab->bytes_, MADV_DONTDUMP);  // prompts do not belong into core dumps
    return slab;
}

Slab::~Slab() {
    stop_prefault();
    if (base_) munmap(base_, bytes_);
    if (fd_ >= 0) ::close(fd_);
}

void Slab::start_prefault(Prefault::ChunkHook hook) {
    if (!prefault_) prefault_ = std::make_unique<Prefault>(base_, bytes_, chunk_bytes_, std::move(hook));
}

void Slab::stop_prefault() {
    if (prefault_) prefault_->stop();
}

void Slab::poison(Row index) const { std::memset(row(index), int(kPoison), row_stride_); }

}  // namespace kvstrata
