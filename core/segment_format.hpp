// What a segment file holds before its slots: the header block and the table of records. Described in docs/disk-format.md.
//
// Pure: bytes in, answers out. Nothing is believed before its checksum holds and its sizes are possible.
#pragma once

#include <algorithm>
#include <optional>
#include <span>

#include "slot.hpp"

namespace kvstrata {

enum class RecordState : std::uint8_t {
    page,     // names a page
    free,     // says that the slot holds nothing
    damaged,  // neither: what the slot holds only its own header tells
};

// One per slot. Bound to its place: moved to another slot, copied to another segment, or left over from an earlier formatting, it is damaged.
struct Record {
    std::uint32_t state = kFree;
    std::uint32_t uses = 0;
    Key key, parent, space;
    std::uint32_t last_use = 0;
    std::uint32_t reserved = 0;
    // What came after the record was written, in place, whenever the owner gets to it. Not under the checksum, and worth no more than a
    // hint: of a page that was in the slot before, it says no later time than this page was written.
    struct Since {
        std::uint32_t used = 0;  // the last time, 0: not
        std::uint32_t uses = 0;
    } since;
    std::uint64_t check = 0;  // of the bytes before `since`, seeded with the segment's epoch and the slot

    static constexpr std::uint32_t kPage = 0x45474150;  // "PAGE"
    static constexpr std::uint32_t kFree = 0x45455246;  // "FREE"

    std::uint32_t used() const { return std::max(last_use, since.used); }
    void seal(std::uint64_t epoch, std::uint32_t slot);
    RecordState judge(std::uint64_t epoch, std::uint32_t slot) const;
};
static_assert(sizeof(Record) == 128 && std::is_trivially_copyable_v<Record>);

// How many slots of a shape a file holds, and where.
struct SegmentPlan {
    std::uint32_t slots = 0;
    std::uint64_t slots_offset = 0;
    std::uint64_t bytes = 0;

    // For a file of about `target` bytes; never fewer than four slots.
    static SegmentPlan of(const Shape& shape, std::uint64_t target);
    // The one that fills `file_bytes` exactly, where there is one.
    static std::optional<SegmentPlan> filling(const Shape& shape, std::uint64_t file_bytes);
    static std::uint64_t table_end(std::uint64_t slots) { return round_up(kBlockBytes + slots * sizeof(Record), kBlockBytes); }
};

struct SegmentHeader {
    Shape shape;
    SegmentPlan plan;
    std::uint64_t epoch = 0;  // random, new with each formatting
};

enum class HeaderState : std::uint8_t {
    sound,
    unknown,  // a sound block of another format version: not ours to touch
    damaged,  // zeros, or our magic over a wrong checksum or impossible sizes: ours once
    foreign,  // neither magic nor checksum: another program's file, or damaged so badly that only its slots can tell
};

// `block`: the file's first block, or what there is of it. Where it is sound, `into` is what it says; a file shorter than that has fewer
// slots, at least one.
HeaderState parse_segment_header(std::span<const std::byte> block, std::uint64_t file_bytes, SegmentHeader& into);
// The format version that the file's first block (kBlockBytes) claims, 0 without our magic. Not proven.
std::uint32_t claimed_version(const std::byte* block);
void encode_segment_header(std::byte* block, const SegmentHeader& header);  // kBlockBytes

}  // namespace kvstrata
