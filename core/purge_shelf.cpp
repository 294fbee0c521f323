// Purging one shelf, segment by segment, slot by slot.
#include <algorithm>

#include "purge.hpp"
#include "segment.hpp"

namespace kvstrata {
namespace {

constexpr std::uint64_t kSmallSlot = 64 * 1024;  // slots up to here are read whole, many at once, to get at their headers

class SegmentPurge {
   public:
    SegmentPurge(const std::shared_ptr<Disk>& disk, SegmentFile& segment, const PurgeOrder& order, SlotClaims* claims,
                 PurgeReport& report)
        : segment_(segment), reader_(disk, segment), order_(order), claims_(claims), report_(report) {}

    // Pages left in the segment.
    std::uint64_t run(const SlotDone& slot_done) {
        const auto sink = [&](std::uint32_t slot, RecordState state, const Record& record, std::uint32_t) {
            treat(slot, state, record);
            report_.cancelled = !slot_done();
            return !report_.cancelled;
        };
        if (const int error = segment_.for_each(sink); error != 0) report_.failed(error, segment_.path());
        if (const int error = segment_.sync(); error != 0) report_.failed(error, segment_.path());
        return kept_;
    }

   private:
    enum class Fate : std::uint8_t {
        nothing,  // there is none
        keep,     // a page that the order does not name
        drop,     // one that it does
        clean,    // what is left of a page that is gone
    };

    void treat(std::uint32_t slot, RecordState state, const Record& record) {
        Fate fate = decide(slot, state, record);
        kept_ += fate == Fate::keep;
        if (fate == Fate::nothing || fate == Fate::keep) return;
        if (!claims_) return empty(slot, state, fate);
        if (!claims_->claim(segment_.path(), slot, state == RecordState::page ? &record.key : nullptr)) {
            ++kept_;
            count_used(slot, state, record, fate);
            return;
        }
        try {  // only now it stands still
            Record now;
            reader_.forget();
            if (segment_.read_records(slot, {&now, 1}) == 1) {
                state = segment_.judge(now, slot);
                fate = decide(slot, state, now);
            }
            kept_ += fate == Fate::keep;
            if (fate == Fate::drop || fate == Fate::clean) empty(slot, state, fate);
        } catch (...) {
            claims_->done(segment_.path(), slot);
            throw;
        }
        claims_->done(segment_.path(), slot);
    }

    // A slot that could not be had. It may have been used again since its record was read: what is there now counts.
    void count_used(std::uint32_t slot, RecordState state, const Record& record, Fate fate) {
        Record now = record;
        if (segment_.read_records(slot, {&now, 1}) == 1) state = segment_.judge(now, slot);
        const bool leftover = fate == Fate::clean && now.key == record.key;  // of whatever page
        const bool page = state == RecordState::page && (leftover || order_.drops(now.key, now.space, now.used()));
        const bool perhaps = page || state == RecordState::damaged;  // it may name a page that could not be read
        report_.used_pages += perhaps;
        report_.used_bytes += perhaps ? segment_.shape().slot_bytes() : 0;
    }

    Fate decide(std::uint32_t slot, RecordState state, const Record& record) {
        const bool named = state == RecordState::page && order_.drops(record.key, record.space, record.used());
        if (named) return Fate::drop;
        if (slot >= segment_.whole_slots()) return state == RecordState::page ? Fate::keep : Fate::nothing;
        const Shape& shape = segment_.shape();
        const std::uint64_t ahead = shape.slot_bytes() <= kSmallSlot ? SlotReader::kRequest : shape.header_bytes;
        int error = 0;
        const auto header = reader_.read(segment_.slot_offset(slot), shape.header_bytes, shape.header_bytes, ahead, error);
        FoundPage found;
        const bool whole = header.size() == shape.header_bytes;
        const bool sound = whole && read_header(header.data(), shape, found);
        if (state == RecordState::page) {
            if (error != 0) return Fate::keep;  // it may be readable another time
            // Any other header proves nothing, and may hold another page's tokens.
            return sound && found.key == record.key && found.space == record.space ? Fate::keep : Fate::clean;
        }
        // The owner's next start gives such a page its record back.
        if (state == RecordState::damaged && sound)
            return order_.drops(found.key, found.space, found.last_use) ? Fate::drop : Fate::keep;
        const bool empty = whole && std::ranges::all_of(header, [](std::byte byte) { return byte == std::byte{0}; });
        return empty && state == RecordState::free ? Fate::nothing : Fate::clean;
    }

    void empty(std::uint32_t slot, RecordState state, Fate fate) {
        int error = state == RecordState::free ? 0 : segment_.clear_record(slot);
        if (slot < segment_.whole_slots()) {
            if (const int result = segment_.overwrite_header(slot); error == 0) error = result;
        }
        if (error != 0) return report_.failed(error, segment_.path());
        report_.pages += fate == Fate::drop;
        report_.bytes += fate == Fate::drop ? segment_.shape().slot_bytes() : 0;
        report_.leftovers += fate == Fate::clean;
    }

    SegmentFile& segment_;
    SlotReader reader_;
    const PurgeOrder& order_;
    SlotClaims* claims_;
    PurgeReport& report_;
    std::uint64_t kept_ = 0;
};

// What was left of a segment when its header block was lost becomes a segment again.
int make_readable(const std::shared_ptr<Disk>& disk, const OwnedShelf& shelf, const std::string& path, std::uint64_t bytes,
                  Segment::Kind& kind) {
    Segment segment(std::make_shared<Handles>(disk), shelf.owner, path, bytes);
    int error = segment.load([](std::uint32_t, RecordState, const Record&) {});
    if (error == 0 && segment.kind() == Segment::Kind::damaged)
        error = segment.recover_header(Shape{}, Directory(disk, 0).random());
    kind = segment.kind();
    return error;
}

}  // namespace

void PurgeReport::failed(int code, const std::string& file) {
    if (failures++ > 0) return;
    error = code;
    where = file;
}

void purge_segment(const std::shared_ptr<Disk>& disk, const OwnedShelf& shelf, const DirEntry& file, const PurgeOrder& order,
                   SlotClaims* claims, PurgeReport& report, const SlotDone& slot_done) {
    const std::string path = shelf.path + "/" + file.name;
    const bool unused = claims == nullptr;
    SegmentFile segment(disk, path, file.size);
    int error = segment.open();
    bool blank = false;
    if (error == 0 && segment.state() != HeaderState::sound && unused) {
        Segment::Kind kind{};
        error = make_readable(disk, shelf, path, file.size, kind);
        blank = kind == Segment::Kind::blank;
        if (error == 0 && kind == Segment::Kind::pages) error = segment.open();
    }
    if (error == -ENOENT && !unused) return;  // it was given back meanwhile
    if (error != 0) return report.failed(error, path);
    std::uint64_t kept = 0;
    if (segment.state() == HeaderState::sound) {
        kept = SegmentPurge(disk, segment, order, claims, report).run(slot_done);
    } else if (!blank || order.kind != PurgeOrder::Kind::all) {  // whose pages a blank one held nobody knows
        // One of ours whose header could not be made out: it may hold anything.
        if (!unused && segment.state() == HeaderState::damaged) report.failed(-EIO, path);
        report.unknown += !blank;
        return;
    }
    if (!unused || kept > 0 || report.cancelled) return;
    if (error = disk->remove(path); error != 0) return report.failed(error, path);
    ++report.segments;
    report.freed += std::max(file.allocated, file.size);
}

void purge_shelf(const std::shared_ptr<Disk>& disk, const OwnedShelf& shelf, const PurgeOrder& order, SlotClaims* claims,
                 PurgeReport& report, const SlotDone& slot_done) {
    std::vector<DirEntry> entries;
    if (const int error = disk->list(shelf.path, entries); error != 0) return report.failed(error, shelf.path);
    for (const DirEntry& entry : entries) {
        if (entry.directory || segment_number(entry.name) == 0) continue;
        purge_segment(disk, shelf, entry, order, claims, report, slot_done);
        if (report.cancelled) return;
    }
}

}  // namespace kvstrata
