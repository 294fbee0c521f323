#include "copy.hpp"

namespace kvstrata {
namespace {

// The one place where bytes move; non-temporal stores for large ranges belong here.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace

void copy_planes(RowPool to, std::span<const Row> to_rows, RowPool from, std::span<const Row> from_rows, std::size_t offset,
                 std::size_t bytes) {
    for (std::size_t i = 0; i < to_rows.size(); ++i) {
        copy_bytes(to.base + static_cast<std::size_t>(to_rows[i]) * to.stride + offset,
                   from.base + static_cast<std::size_t>(from_rows[i]) * from.stride + offset, bytes);
    }
}

void copy_rows(RowPool to, std::span<const Row> to_rows, RowPool from, std::span<const Row> from_rows, std::size_t bytes) {
    copy_planes(to, to_rows, from, from_rows, 0, bytes);
}

}  // namespace kvstrata
