// Copies of page rows between pools in host memory: slab, host-side device pool, staging, and blocks that lie layer by layer.
//
// Row i of one side belongs to row i of the other; both spans have the same length and every row lies inside its pool. The caller pins
// source and target for the duration of the call. The pools do not overlap.
#pragma once

#include "types.hpp"

namespace kvstrata {

// Streaming stores go round the processor's caches: faster for much at once, and right where nobody reads the target soon.
enum class Stores : std::uint8_t { plain, streaming };

struct RowPool {
    std::byte* base = nullptr;
    std::size_t stride = 0;  // bytes from one row to the next
};

// Only bytes [offset, offset + bytes) of each row: all of it, one plane, or the adjacent planes of one layer.
void copy_rows(RowPool to, std::span<const Row> to_rows, RowPool from, std::span<const Row> from_rows, std::size_t offset,
               std::size_t bytes, Stores stores);

// The blocks of one layer, and where in a row its bytes are.
struct LayerBlocks {
    RowPool blocks;
    std::size_t offset = 0;
    std::size_t bytes = 0;
};

// Between rows and blocks whose layers lie apart, row by row. `up`: from the rows to the blocks.
void copy_layers(std::span<const LayerBlocks> layers, std::span<const Row> blocks, RowPool pool, std::span<const Row> rows, bool up,
                 Stores stores);

// For tests: the ways of streaming that this processor has, the one in use last. Any sizes and alignments.
using CopyBytes = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);
std::span<const CopyBytes> streaming_copies();

}  // namespace kvstrata
