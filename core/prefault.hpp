// Fills memory that is mapped already with real pages, in chunks and in the background, so that nobody who uses it first pays for the
// faults. Until a chunk is filled it works and costs them.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <thread>

namespace kvstrata {

class Prefault {
   public:
    // Called on the background thread after each chunk is filled, in order; must not throw and must not call Python.
    using ChunkHook = std::function<void(std::byte* chunk, std::size_t bytes)>;

    // Contents are left as they are, so the memory may be in use already. `base` is on a page's edge or within its first page; the
    // memory must stay mapped as long as this lives.
    Prefault(std::byte* base, std::size_t bytes, std::size_t chunk_bytes, ChunkHook hook = {});
    ~Prefault() { stop(); }
    Prefault(const Prefault&) = delete;
    Prefault& operator=(const Prefault&) = delete;

    // Returns after the chunk in progress.
    void stop();
    // [base, base + filled_bytes) is filled. Stops growing before all is when stopped or when memory ran out.
    std::size_t filled_bytes() const { return filled_.load(std::memory_order_acquire); }

   private:
    void fill();

    std::byte* const base_;
    const std::size_t bytes_, chunk_bytes_;
    const ChunkHook hook_;
    std::atomic<std::size_t> filled_{0};
    std::atomic<bool> stop_{false};
    std::thread thread_;  // last: it uses the others
};

}  // namespace kvstrata
