#include "prefault.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "thread_name.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvstrata {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kSpareBytes = 256ull << 20;  // left to others while filling

// Memory that can be filled now without pushing anybody out. Unknown: all of it.
std::uint64_t memory_available() {
    std::ifstream file("/proc/meminfo");
    std::string name;
    std::uint64_t kib = 0;
    while (file >> name >> kib) {
        if (name == "MemAvailable:") return kib * 1024;
        file.ignore(64, '\n');
    }
    return std::numeric_limits<std::uint64_t>::max();
}

// Kernels before 5.14 cannot populate a range: touch every block with an atomic no-op, which loses no concurrent store.
__attribute__((no_sanitize("thread"))) void touch(std::byte* chunk, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += kBlock) {
        __atomic_fetch_or(reinterpret_cast<unsigned char*>(chunk + at), 0, __ATOMIC_RELAXED);
    }
}

}  // namespace

Prefault::Prefault(std::byte* base, std::size_t bytes, std::size_t chunk_bytes, ChunkHook hook)
    : base_(base), bytes_(bytes), chunk_bytes_(chunk_bytes), hook_(std::move(hook)), thread_([this] { fill(); }) {}

void Prefault::stop() {
    stop_.store(true, std::memory_order_relaxed);
    if (thread_.joinable()) thread_.join();
}

void Prefault::fill() {
    name_thread("kvstrata-fill");
    for (std::size_t at = 0; at < bytes_ && !stop_.load(std::memory_order_relaxed); at += chunk_bytes_) {
        const std::size_t size = std::min(chunk_bytes_, bytes_ - at);
        if (memory_available() < size + kSpareBytes) return;  // it works all the same; nobody is killed for our haste
        // An allocator's memory begins anywhere in its first page: whole pages, from that one on.
        std::byte* const first = base_ + at - reinterpret_cast<std::uintptr_t>(base_ + at) % kBlock;
        int result = 0;
        do {
            result = madvise(first, std::size_t(base_ + at + size - first), MADV_POPULATE_WRITE);
        } while (result != 0 && errno == EINTR);
        if (result != 0 && errno != EINVAL) return;
        if (result != 0) touch(base_ + at, size);
        filled_.store(at + size, std::memory_order_release);
        if (hook_) hook_(base_ + at, size);
    }
}

}  // namespace kvstrata
