#include "segment_file.hpp"

#include <algorithm>
#include <array>

namespace kvstrata {
namespace {

constexpr std::uint32_t kTableChunk = 8192;  // records: 1 MiB

bool names(const FoundPage& page, const Record& record) {
    return page.key == record.key && page.parent == record.parent && page.space == record.space;
}

}  // namespace

int SegmentFile::open() {
    int error = 0;
    file_ = File::open(disk_, path_, OpenMode::read, error);
    if (!file_) return error;
    std::array<std::byte, kBlockBytes> block{};
    const std::int64_t got = file_->read(block.data(), block.size(), 0);
    if (got < 0) return int(got);
    state_ = parse_segment_header({block.data(), std::size_t(got)}, bytes_, header_);
    version_ = claimed_version(block.data());
    if (state_ == HeaderState::sound)
        slots_ = std::uint32_t((header_.plan.bytes - header_.plan.slots_offset) / shape().slot_bytes());
    return 0;
}

std::int64_t SegmentFile::read_records(std::uint32_t first, std::span<Record> into) const {
    if (first >= slots_) return 0;
    const std::size_t count = std::min<std::size_t>(into.size(), slots_ - first);
    const std::int64_t got = file_->read(into.data(), count * sizeof(Record), record_offset(first));
    return got < 0 ? got : got / std::int64_t(sizeof(Record));
}

int SegmentFile::for_each(const RecordSink& sink) const {
    std::vector<Record> chunk(std::min(slots_, kTableChunk));
    std::vector<RecordState> states(chunk.size());
    for (std::uint32_t first = 0; first < slots_;) {
        const std::int64_t got = read_records(first, chunk);
        if (got <= 0) return int(got);  // nothing: the file was cut short
        const auto count = std::uint32_t(got);
        for (std::uint32_t i = 0; i < count; ++i) {
            states[i] = judge(chunk[i], first + i);
            if (states[i] == RecordState::damaged && read_records(first + i, {&chunk[i], 1}) == 1)
                states[i] = judge(chunk[i], first + i);
        }
        for (std::uint32_t i = 0, run_end = 0; i < count; ++i) {
            if (run_end < i) run_end = i;
            while (run_end < count && states[run_end] == RecordState::page) ++run_end;
            if (!sink(first + i, states[i], chunk[i], run_end - i)) return 0;
        }
        first += count;
    }
    return 0;
}

bool SegmentFile::still(std::uint32_t slot, const Record& record) const {
    Record now;
    return read_records(slot, {&now, 1}) == 1 && now.check == record.check &&
           std::memcmp(&now, &record, offsetof(Record, since)) == 0;
}

bool SegmentFile::reformatted() const {
    std::array<std::byte, kBlockBytes> block{};
    const std::int64_t got = file_->read(block.data(), block.size(), 0);
    SegmentHeader now;
    return got != std::int64_t(block.size()) || parse_segment_header(block, bytes_, now) != HeaderState::sound ||
           now.epoch != header_.epoch;
}

int SegmentFile::file_to_change(OpenMode mode, std::shared_ptr<File>& file) {
    int error = 0;
    if (!file) file = File::open(disk_, path_, mode, error);
    return error;
}

int SegmentFile::clear_record(std::uint32_t slot) {
    Record record;
    record.seal(header_.epoch, slot);
    const int error = file_to_change(OpenMode::update, table_);
    return error != 0 ? error : table_->write(&record, sizeof record, record_offset(slot));
}

int SegmentFile::overwrite_header(std::uint32_t slot) {
    const AlignedBuffer zeros(shape().header_bytes);
    if (!zeros.data()) return -ENOMEM;
    std::memset(zeros.data(), 0, zeros.bytes());
    const int error = file_to_change(OpenMode::update_direct, rows_);
    return error != 0 ? error : rows_->write(zeros.data(), zeros.bytes(), slot_offset(slot));
}

int SegmentFile::sync() {
    const auto& file = table_ ? table_ : rows_;
    return file ? disk_->sync(file->handle()) : 0;
}

SlotReader::SlotReader(const std::shared_ptr<Disk>& disk, const SegmentFile& segment)
    : file_(File::open(disk, segment.path(), OpenMode::read_direct, error_)),
      buffer_(std::max<std::size_t>(kRequest, segment.shape().header_bytes)) {
    if (!buffer_.data()) error_ = -ENOMEM;
}

std::span<const std::byte> SlotReader::read(std::uint64_t offset, std::size_t least, std::uint64_t most, std::uint64_t ahead,
                                            int& error) {
    error = error_;
    if (error != 0) return {};
    const auto inside = [&] { return offset >= begin_ && offset < begin_ + size_ ? begin_ + size_ - offset : 0; };
    if (inside() < least) {
        if (offset % kBlockBytes != 0) return {};  // only where the file ended in front of it
        const std::uint64_t wanted = std::clamp<std::uint64_t>(ahead, least, buffer_.bytes());
        size_ = 0;
        const std::int64_t got = file_->read(buffer_.data(), round_up(wanted, kBlockBytes), offset);
        if (got < 0) {
            error = int(got);
            return {};
        }
        begin_ = offset;
        size_ = std::size_t(got);
    }
    return {buffer_.data() + (offset - begin_), std::size_t(std::min<std::uint64_t>(inside(), most))};
}

SlotState prove_page(SlotReader& reader, const SegmentFile& segment, std::uint32_t slot, const Record* wanted, std::uint64_t ahead,
                     FoundPage& found, int& error) {
    error = 0;
    if (slot >= segment.whole_slots()) return SlotState::cut;
    const Shape& shape = segment.shape();
    std::uint64_t at = segment.slot_offset(slot);
    const std::uint64_t end = at + std::max(ahead, shape.slot_bytes());
    const auto header = reader.read(at, shape.header_bytes, shape.header_bytes, end - at, error);
    if (error != 0) return SlotState::unreadable;
    if (header.size() < shape.header_bytes) return SlotState::cut;
    if (!read_header(header.data(), shape, found)) return SlotState::bad_header;
    if (wanted && !names(found, *wanted)) return SlotState::other_page;

    RowProof row(header.data(), shape);
    at += shape.header_bytes;
    for (std::uint64_t left = shape.row_bytes; left > 0 && !row.failed();) {
        const auto piece = reader.read(at, 1, left, end - at, error);
        if (error != 0) return SlotState::unreadable;
        if (piece.empty()) return SlotState::cut;
        row.add(piece.data(), piece.size());
        at += piece.size();
        left -= piece.size();
    }
    return row.proven() ? SlotState::sound : SlotState::bad_row;
}

}  // namespace kvstrata
