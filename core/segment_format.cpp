#include "segment_format.hpp"

#include <algorithm>
#include <array>

#include "checksum.hpp"

namespace kvstrata {
namespace {

constexpr std::array<char, 8> kMagic{'K', 'V', 'S', 'T', 'R', 'A', 'T', 'A'};
constexpr std::uint64_t kMaxFile = 1ull << 60;
constexpr std::uint64_t kMaxSlots = 1u << 26;

struct Fields {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t page_size;
    std::uint32_t plane_count;
    std::uint32_t header_bytes;
    std::uint64_t row_bytes;
    std::uint64_t row_stride;
    std::uint64_t layout;
    std::uint32_t slots;
    std::uint32_t reserved;
    std::uint64_t slots_offset;
    std::uint64_t bytes;
    std::uint64_t epoch;
};
static_assert(sizeof(Fields) == 80 && std::is_trivially_copyable_v<Fields>);

struct HeaderBlock {
    Fields fields{};
    std::array<std::uint8_t, kBlockBytes - sizeof(Fields) - 8> rest{};
    std::uint64_t check = 0;  // of the bytes before it

    std::uint64_t sum() const { return checksum(this, kBlockBytes - 8); }
};
static_assert(sizeof(HeaderBlock) == kBlockBytes && std::is_trivially_copyable_v<HeaderBlock>);

bool possible(const Fields& fields, const Shape& shape, std::uint64_t file_bytes) {
    return shape.possible() && fields.slots > 0 && fields.slots_offset == SegmentPlan::table_end(fields.slots) &&
           fields.slots_offset <= file_bytes && fields.bytes > fields.slots_offset && fields.bytes <= kMaxFile &&
           (fields.bytes - fields.slots_offset) / shape.slot_bytes() == fields.slots;
}

std::uint64_t record_check(const Record& record, std::uint64_t epoch, std::uint32_t slot) {
    return checksum(&record, offsetof(Record, since), epoch ^ (slot * 0x9e3779b97f4a7c15ull));
}

}  // namespace

void Record::seal(std::uint64_t epoch, std::uint32_t slot) { check = record_check(*this, epoch, slot); }

RecordState Record::judge(std::uint64_t epoch, std::uint32_t slot) const {
    if ((state != kPage && state != kFree) || check != record_check(*this, epoch, slot)) return RecordState::damaged;
    return state == kPage ? RecordState::page : RecordState::free;
}

SegmentPlan SegmentPlan::of(const Shape& shape, std::uint64_t target) {
    const std::uint64_t slot = shape.slot_bytes();
    std::uint64_t slots = target > kBlockBytes ? (target - kBlockBytes) / (slot + sizeof(Record)) : 0;
    while (slots > 4 && table_end(slots) + slots * slot > target) --slots;
    slots = std::clamp<std::uint64_t>(slots, 4, kMaxSlots);
    return {static_cast<std::uint32_t>(slots), table_end(slots), table_end(slots) + slots * slot};
}

std::optional<SegmentPlan> SegmentPlan::filling(const Shape& shape, std::uint64_t file_bytes) {
    if (file_bytes <= kBlockBytes || file_bytes > kMaxFile) return std::nullopt;
    // The table's padding is less than a slot, so that the number of slots is the quotient.
    const std::uint64_t slots = (file_bytes - kBlockBytes) / (shape.slot_bytes() + sizeof(Record));
    if (slots == 0 || slots > kMaxSlots || table_end(slots) + slots * shape.slot_bytes() != file_bytes) return std::nullopt;
    return SegmentPlan{static_cast<std::uint32_t>(slots), table_end(slots), file_bytes};
}

HeaderState parse_segment_header(std::span<const std::byte> block, std::uint64_t file_bytes, SegmentHeader& into) {
    HeaderBlock copy;
    std::memcpy(&copy, block.data(), std::min(block.size(), sizeof copy));  // what is missing reads as zeros
    const Fields& fields = copy.fields;
    const bool whole = block.size() >= sizeof copy && copy.check == copy.sum();
    if (!whole) {
        static constexpr std::array<char, 8> nothing{};  // a file whose making was interrupted, or whose blocks were lost
        return fields.magic == kMagic || fields.magic == nothing ? HeaderState::damaged : HeaderState::foreign;
    }
    if (fields.magic != kMagic || fields.version != kFormatVersion) return HeaderState::unknown;
    const Shape shape{fields.page_size, fields.plane_count, fields.header_bytes,
                      fields.row_bytes, fields.row_stride,  fields.layout};
    if (!possible(fields, shape, file_bytes)) return HeaderState::damaged;
    // A file cut short has only the slots that lie in it: writing the others would take space nobody counted.
    const std::uint64_t inside = (file_bytes - fields.slots_offset) / shape.slot_bytes();
    const auto slots = std::uint32_t(std::min<std::uint64_t>(fields.slots, inside));
    if (slots == 0) return HeaderState::damaged;
    into = {shape, {slots, fields.slots_offset, fields.bytes}, fields.epoch};
    return HeaderState::sound;
}

std::uint32_t claimed_version(const std::byte* block) {
    Fields fields;
    std::memcpy(&fields, block, sizeof fields);
    return fields.magic == kMagic ? fields.version : 0;
}

void encode_segment_header(std::byte* block, const SegmentHeader& header) {
    HeaderBlock made;
    const Shape& shape = header.shape;
    made.fields = {kMagic,
                   kFormatVersion,
                   shape.page_size,
                   shape.plane_count,
                   shape.header_bytes,
                   shape.row_bytes,
                   shape.row_stride,
                   shape.layout,
                   header.plan.slots,
                   0,
                   header.plan.slots_offset,
                   header.plan.bytes,
                   header.epoch};
    made.check = made.sum();
    std::memcpy(block, &made, sizeof made);
}

}  // namespace kvstrata
