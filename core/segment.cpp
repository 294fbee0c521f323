#include "segment.hpp"

#include <algorithm>
#include <array>
#include <cerrno>

#include "directory.hpp"

namespace kvstrata {
namespace {

constexpr std::uint64_t kTableChunk = 4ull << 20;

// A header buffer of this thread, kept between operations. nullptr when there is no memory.
std::byte* header_buffer(std::size_t bytes) {
    thread_local AlignedBuffer buffer(0);
    if (buffer.bytes() < bytes) buffer = AlignedBuffer(bytes);
    return buffer.data();
}

Record record_of(const Key& space, const Key& parent, const Key& key, std::uint32_t uses, std::uint32_t last_use) {
    Record record;
    record.state = Record::kPage;
    record.uses = uses;
    record.key = key;
    record.parent = parent;
    record.space = space;
    record.last_use = last_use;
    return record;
}

}  // namespace

Segment::Segment(std::shared_ptr<Handles> handles, std::shared_ptr<File> owner, std::string path, std::uint64_t file_bytes,
                 std::shared_ptr<Changes> changes)
    : handles_(std::move(handles)),
      owner_(std::move(owner)),
      path_(std::move(path)),
      file_bytes_(file_bytes),
      changes_(std::move(changes)) {}

void Segment::tell() const {
    if (changes_) changes_->bump(segment_number(path_.substr(path_.rfind('/') + 1)));
}

void Segment::take(const SegmentHeader& header) {
    shape_ = header.shape;
    plan_ = header.plan;
    epoch_ = header.epoch;
    maybe_set_.assign(plan_.slots, 1);
    kind_ = Kind::pages;
}

int Segment::load(const RecordSink& sink) {
    int error = 0;
    const auto file = handles_->get(path_, ours() ? OpenMode::update : OpenMode::read, error);
    if (!file) return error;
    std::array<std::byte, kBlockBytes> block;
    std::int64_t got = file->read(block.data(), block.size(), 0);
    if (got < 0) return int(got);
    SegmentHeader header;
    const HeaderState state = parse_segment_header({block.data(), std::size_t(got)}, file_bytes_, header);
    kind_ = state == HeaderState::unknown ? Kind::unknown : Kind::damaged;
    known_ = state != HeaderState::foreign;
    if (state != HeaderState::sound) return 0;
    take(header);

    const std::uint64_t table = std::uint64_t{plan_.slots} * sizeof(Record);
    std::vector<Record> chunk(std::size_t(std::min(table, kTableChunk) / sizeof(Record)));
    for (std::uint32_t first = 0; first < plan_.slots; first += std::uint32_t(chunk.size())) {
        const std::size_t count = std::min<std::size_t>(chunk.size(), plan_.slots - first);
        got = file->read(chunk.data(), count * sizeof(Record), record_offset(first));
        if (got < 0) return int(got);
        for (std::size_t i = 0; i < std::size_t(got) / sizeof(Record); ++i) {
            const auto slot = first + std::uint32_t(i);
            const RecordState record = chunk[i].judge(epoch_, slot);
            maybe_set_[slot] = record != RecordState::free;
            if (record == RecordState::page) used_at(chunk[i].used());
            sink(slot, record, chunk[i]);
        }
        if (std::size_t(got) < count * sizeof(Record)) break;  // cut short meanwhile
    }
    return 0;
}

int Segment::format(const Shape& shape, const SegmentPlan& plan, std::uint64_t epoch) {
    int error = 0;
    const auto file = handles_->get(path_, OpenMode::update, error);
    if (!file) return error;
    kind_ = Kind::blank;
    std::vector<Record> chunk(std::size_t(std::min<std::uint64_t>(plan.slots, kTableChunk / sizeof(Record))));
    for (std::uint32_t first = 0; first < plan.slots; first += std::uint32_t(chunk.size())) {
        const std::size_t count = std::min<std::size_t>(chunk.size(), plan.slots - first);
        for (std::size_t i = 0; i < count; ++i) chunk[i].seal(epoch, first + std::uint32_t(i));
        if (error = file->write(chunk.data(), count * sizeof(Record), record_offset(first)); error != 0) return error;
    }
    const SegmentHeader header{shape, plan, epoch};
    std::array<std::byte, kBlockBytes> block;
    encode_segment_header(block.data(), header);
    dirty_.store(true, std::memory_order_relaxed);
    if (error = file->write(block.data(), block.size(), 0); error != 0) return error;
    take(header);
    tell();
    std::ranges::fill(maybe_set_, std::uint8_t{0});
    last_use_.store(0, std::memory_order_relaxed);
    return 0;
}

int Segment::recover_header(const Shape& ours, std::uint64_t epoch) {
    int error = 0;
    const auto file = handles_->get(path_, OpenMode::update, error);
    if (!file) return error;
    std::optional<SegmentHeader> header;
    if (error = find_header(*file, file_bytes_, ours, header); error != 0) return error;
    // Our own file of just the size we would give it: its slots will tell, one by one.
    if (!header && known_ && ours.possible()) {
        if (const auto plan = SegmentPlan::filling(ours, file_bytes_)) header = {ours, *plan, 0};
    }
    if (!header) {
        kind_ = known_ ? Kind::blank : Kind::unknown;
        return 0;
    }
    header->epoch = epoch;
    std::array<std::byte, kBlockBytes> block;
    encode_segment_header(block.data(), *header);
    dirty_.store(true, std::memory_order_relaxed);
    if (error = file->write(block.data(), block.size(), 0); error != 0) return error;
    take(*header);
    tell();
    return 0;
}

int Segment::recover_slot(std::uint32_t slot, FoundPage& into) {
    std::byte* header = header_buffer(shape_.header_bytes);
    if (!header) return -ENOMEM;
    int error = 0;
    const auto file = handles_->get(path_, OpenMode::update_direct, error);
    if (!file) return error;
    const std::int64_t got = file->read(header, shape_.header_bytes, slot_offset(slot));
    if (got < 0) return int(got);
    const bool found = got == std::int64_t(shape_.header_bytes) && read_header(header, shape_, into);
    // A record that cannot be written stays damaged: the next start looks again.
    if (!found) {
        put_record(slot, Record{});
        return 0;
    }
    put_record(slot, record_of(into.space, into.parent, into.key, into.uses, into.last_use));
    used_at(into.last_use);
    return 1;
}

int Segment::free_records(std::uint32_t first, std::size_t count) {
    const auto begin = maybe_set_.begin() + std::ptrdiff_t(first);
    if (std::all_of(begin, begin + std::ptrdiff_t(count), [](std::uint8_t set) { return set == 0; })) return 0;
    std::vector<Record> records(count);
    return put_records(first, records);  // told together with what comes into the slots: until then others find another page there
}

int Segment::set_records(std::uint32_t first, std::span<const Op> pages) {
    std::vector<Record> records;
    records.reserve(pages.size());
    for (const Op& op : pages) {
        const PageImage& page = op.page;
        records.push_back(record_of(page.space, page.parent, page.key, page.uses, page.last_use));
        used_at(page.last_use);
    }
    const int result = put_records(first, records);
    tell();
    return result;
}

OpStatus Segment::clear(std::uint32_t slot, int& error) {
    const int result = put_record(slot, Record{});
    error = -result;
    return result == 0 ? OpStatus::ok : OpStatus::failed;
}

int Segment::put_record(std::uint32_t slot, Record record) {
    const int result = put_records(slot, {&record, 1});
    tell();
    return result;
}

// A record that could not be written may be there all the same, or half of it.
int Segment::put_records(std::uint32_t first, std::span<Record> records) {
    for (std::size_t i = 0; i < records.size(); ++i) {
        maybe_set_[first + i] = 1;
        records[i].seal(epoch_, first + std::uint32_t(i));
    }
    int result = 0;
    const auto file = handles_->get(path_, OpenMode::update, result);
    if (!file) return result;
    dirty_.store(true, std::memory_order_relaxed);
    result = file->write(records.data(), records.size_bytes(), record_offset(first));
    if (result != 0) return result;
    for (std::size_t i = 0; i < records.size(); ++i) maybe_set_[first + i] = records[i].state == Record::kPage;
    return 0;
}

void Segment::note_uses(std::span<const SlotUse> uses) {
    int error = 0;
    const auto file = handles_->get(path_, OpenMode::update, error);
    if (!file) return;
    for (const SlotUse& use : uses) {
        const std::uint64_t at = record_offset(use.slot.slot) + offsetof(Record, since);
        Record::Since since;
        if (file->read(&since, sizeof since, at) != sizeof since) return;
        since = {std::max(since.used, use.time), since.uses + 1};
        if (file->write(&since, sizeof since, at) != 0) return;
        used_at(use.time);
    }
}

int Segment::sync() {
    if (!dirty_.exchange(false, std::memory_order_relaxed)) return 0;
    int result = 0;
    const auto file = handles_->get(path_, OpenMode::update, result);
    if (file) result = file->disk().sync(file->handle());
    if (result != 0) dirty_.store(true, std::memory_order_relaxed);
    return result;
}

void Segment::used_at(std::uint32_t time) {
    std::uint32_t before = last_use_.load(std::memory_order_relaxed);
    while (before < time && !last_use_.compare_exchange_weak(before, time, std::memory_order_relaxed)) {
    }
}

}  // namespace kvstrata
