// Memory of the CPU tier: one mapping of rows at a fixed stride, 4 KiB aligned, so that a row can go to O_DIRECT as it is.
//
// The mapping is made at once and filled with real memory in chunks by a background thread, so that neither the start nor the close
// waits for it: until a chunk is filled, its rows work and cost a page fault. Chunks are whole rows: whoever pins memory chunk by chunk
// never cuts a row in two.
#pragma once

#include <memory>
#include <string>

#include "prefault.hpp"
#include "types.hpp"

namespace kvstrata {

struct SlabConfig {
    std::uint32_t rows = 0;
    std::size_t row_stride = 0;             // a multiple of 4 KiB
    bool shared = false;                    // a memfd that other processes can map (fd())
    std::size_t chunk_bytes = 64ull << 20;  // rounded down to whole rows, at least one
};

class Slab {
   public:
    // nullptr and one sentence in `error` when the memory does not exist on this machine or the system refuses it.
    static std::shared_ptr<Slab> make(const SlabConfig& config, std::string& error);
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    std::byte* row(Row index) const { return base_ + static_cast<std::size_t>(index) * row_stride_; }
    std::uint32_t rows() const { return rows_; }
    std::size_t row_stride() const { return row_stride_; }

    std::byte* base() const { return base_; }
    std::size_t bytes() const { return bytes_; }
    std::size_t chunk_bytes() const { return chunk_bytes_; }
    int fd() const { return fd_; }  // -1 unless shared; owned by the slab

    // At most once. Rows may be in use already.
    void start_prefault(Prefault::ChunkHook hook = {});
    // Returns after the chunk in progress. The destructor does it too.
    void stop_prefault();
    // [base, base + prefaulted_bytes) is filled.
    std::size_t prefaulted_bytes() const { return prefault_ ? prefault_->filled_bytes() : 0; }

    // Fills a row with a pattern no model writes; for tests that prove freed rows are never read.
    void poison(Row index) const;
    static constexpr std::byte kPoison{0xDB};

   private:
    Slab() = default;

    std::byte* base_ = nullptr;
    std::size_t bytes_ = 0;
    std::size_t row_stride_ = 0;
    std::size_t chunk_bytes_ = 0;
    std::uint32_t rows_ = 0;
    int fd_ = -1;
    std::unique_ptr<Prefault> prefault_;
};

}  // namespace kvstrata
