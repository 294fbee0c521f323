// A slot: the header that proves one page, followed by its row. Described in docs/disk-format.md.
//
// The header is read and written whole, together with the row; nothing in it is believed before its checksum holds and its sizes are
// those of our own shape.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>

#include "checksum.hpp"
#include "io.hpp"
#include "shelf.hpp"

namespace kvstrata {

inline constexpr std::uint64_t kBlockBytes = 4096;
inline constexpr std::uint32_t kFormatVersion = 1;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

// What two slots must share to be exchanged for one another. Namespaces of equal shape share segments.
struct Shape {
    std::uint32_t page_size = 0;
    std::uint32_t plane_count = 0;
    std::uint32_t header_bytes = 0;  // a multiple of 4 KiB
    std::uint64_t row_bytes = 0;
    std::uint64_t row_stride = 0;
    std::uint64_t layout = 0;  // checksum of the planes' places

    static Shape of(const ShelfConfig& config);
    std::uint64_t slot_bytes() const { return header_bytes + row_stride; }
    std::size_t media_room() const;  // media items that fit into a header
    bool possible() const;           // sizes from disk: consistent, and far from overflow
    friend bool operator==(const Shape&, const Shape&) = default;
};

// 4 KiB aligned memory, as O_DIRECT wants it.
class AlignedBuffer {
   public:
    explicit AlignedBuffer(std::size_t bytes)
        : data_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, round_up(bytes, kBlockBytes))), &std::free),
          bytes_(bytes) {}
    std::byte* data() const { return data_.get(); }  // nullptr when there was no memory
    std::size_t bytes() const { return bytes_; }

   private:
    std::unique_ptr<std::byte, decltype(&std::free)> data_;
    std::size_t bytes_;
};

// Fills `header` (shape.header_bytes). 0, -EINVAL (not one page of tokens) or -E2BIG (more media items than a header holds).
int encode_header(std::byte* header, const Shape& shape, std::span<const Plane> planes, const PageImage& page,
                  const std::byte* row);

// What a header by itself tells about its page, where it is sound, of this shape, and its key is the hash of its content: everything but
// the row, and `slot`. False: there is no page.
bool read_header(const std::byte* header, const Shape& shape, FoundPage& into);
std::vector<std::int32_t> header_tokens(const std::byte* header, const Shape& shape);  // of one that it found to be sound

// Proves a row that comes piece by piece, from its first byte on, against the planes and checksums that its own header names. The header
// is one that read_header() found to be sound; it is not needed any more once this is made.
class RowProof {
   public:
    RowProof(const std::byte* header, const Shape& shape);
    void add(const std::byte* data, std::size_t bytes);  // what lies behind the row's end is ignored
    bool failed() const { return !sound_; }              // already: no more bytes are needed
    bool proven() const { return sound_ && plane_ == planes_.size(); }

   private:
    std::vector<Plane> planes_;
    std::vector<std::uint64_t> sums_;
    bool sound_ = false;
    std::size_t plane_ = 0;
    std::uint64_t done_ = 0;  // bytes of that plane
    RunningChecksum running_;
};

// The shape that a slot's first block (4 KiB) claims for itself. Possible, but not proven: only read_header() does that.
std::optional<Shape> claimed_shape(const std::byte* block);

// Whether header and row are exactly `page`: ok, corrupt, stale or conflict, as OpStatus says.
OpStatus prove_slot(const std::byte* header, const Shape& shape, std::span<const Plane> planes, const PageImage& page,
                    const std::byte* row);

}  // namespace kvstrata
