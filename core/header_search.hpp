// What a segment file was whose header block is lost: its slots tell.
#pragma once

#include "file.hpp"
#include "segment_format.hpp"

namespace kvstrata {

// Looks into the first 32 MiB for a slot header that proves itself, preferably of the shape `ours`, and lies where it would in a segment of
// its shape that fills the file. `into` is then that segment's header, without an epoch. 0, or -errno: it is not known.
int find_header(const File& file, std::uint64_t file_bytes, const Shape& ours, std::optional<SegmentHeader>& into);

}  // namespace kvstrata
