// Copies of page rows between two pools in host memory: slab, host-side device pool, staging.
//
// Row i of `from_rows` goes to row i of `to_rows`; both spans have the same length and every row lies inside its pool. The caller
// pins source and target for the duration of the call. The pools do not overlap.
#pragma once

#include "types.hpp"

namespace kvstrata {

struct RowPool {
    std::byte* base = nullptr;
    std::size_t stride = 0;  // bytes from one row to the next
};

void copy_rows(RowPool to, std::span<const Row> to_rows, RowPool from, std::span<const Row> from_rows, std::size_t bytes);

// Only bytes [offset, offset + bytes) of each row: one plane, or the adjacent planes of one layer.
void copy_planes(RowPool to, std::span<const Row> to_rows, RowPool from, std::span<const Row> from_rows, std::size_t offset,
                 std::size_t bytes);

}  // namespace kvstrata
