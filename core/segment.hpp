// A segment file: header block, table of records, slots. Owned by the shelf's owner; overwritten in place.
//
// Operations on different slots may run at once; the driver runs at most one at a time on a slot. The table goes through a buffered
// handle (its records are 128 bytes), slots through a direct one: the two never touch the same block.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "handles.hpp"
#include "header_search.hpp"
#include "owner.hpp"

namespace kvstrata {

class Segment {
   public:
    enum class Kind : std::uint8_t {
        pages,    // a sound header
        damaged,  // no sound header; slots may tell what it was
        blank,    // no header and no slots: worth nothing, may be formatted
        unknown,  // another format version, or not our file: left alone
    };

    // `owner` is the flock of the shelf: held as long as anybody uses one of its segments. Without one it is another process's: read, never
    // changed. `changes`: where others are told of what changes here, if anywhere.
    Segment(std::shared_ptr<Handles> handles, std::shared_ptr<File> owner, std::string path, std::uint64_t file_bytes,
            std::shared_ptr<Changes> changes = {});

    // Reads header and table and hands over each slot with what its record is. 0, or -errno of a failing medium: slots not handed over
    // are not to be used.
    using RecordSink = std::function<void(std::uint32_t slot, RecordState state, const Record& record)>;
    int load(const RecordSink& sink);
    // Makes the file one of empty slots: table first, then the new header. On failure the segment is blank.
    int format(const Shape& shape, const SegmentPlan& plan, std::uint64_t epoch);

    // Rebuilding, before anybody else uses the segment or the slot.
    // Of a damaged segment: finds its shape by a sound slot header, preferably `ours` (Shape{}: any), and writes a new header block under which all
    // records count as damaged. 0: it has pages now, or is blank or unknown; -errno: nothing is known yet.
    int recover_header(const Shape& ours, std::uint64_t epoch);
    // Of a slot whose record is damaged: 1 when its own header names a page, which `into` then is, 0 when it does not, -errno when it
    // cannot be read. The record is made to say the same.
    int recover_slot(std::uint32_t slot, FoundPage& into);

    // The parts of reads and writes (slot_run.hpp). Records of `count` slots from `first` on, in one request; 0 or -errno.
    std::shared_ptr<File> open_slots(int& error) const {
        return handles_->get(path_, ours() ? OpenMode::update_direct : OpenMode::read_direct, error);
    }
    int free_records(std::uint32_t first, std::size_t count);  // none where they are free already
    int set_records(std::uint32_t first, std::span<const Op> pages);
    OpStatus clear(std::uint32_t slot, int& error);
    void used_at(std::uint32_t time);
    void note_uses(std::span<const SlotUse> uses);  // in the records; what fails is lost
    // Everything written so far survives a power loss; nothing to do where nothing was written since. 0 or -errno.
    int sync();

    bool ours() const { return owner_ != nullptr; }
    void tell() const;  // others: look again
    std::uint64_t epoch() const { return epoch_; }
    const std::string& path() const { return path_; }
    Kind kind() const { return kind_; }
    const Shape& shape() const { return shape_; }
    std::uint32_t slots() const { return plan_.slots; }
    std::uint64_t slot_offset(std::uint32_t slot) const { return plan_.slots_offset + slot * shape_.slot_bytes(); }
    std::uint64_t file_bytes() const { return file_bytes_; }
    bool miss() { return misses_.fetch_add(1, std::memory_order_relaxed) >= 2; }  // found no file: true from the third time on
    std::uint32_t last_use() const { return last_use_.load(std::memory_order_relaxed); }  // of its most recently used page

   private:
    void take(const SegmentHeader& header);
    std::uint64_t record_offset(std::uint32_t slot) const { return kBlockBytes + std::uint64_t{slot} * sizeof(Record); }
    int put_records(std::uint32_t first, std::span<Record> records);
    int put_record(std::uint32_t slot, Record record);

    std::shared_ptr<Handles> handles_;
    std::shared_ptr<File> owner_;
    std::string path_;
    std::uint64_t file_bytes_;
    std::shared_ptr<Changes> changes_;
    Kind kind_ = Kind::blank;
    bool known_ = false;  // damaged: zeros or our magic, so that it may be formatted when it holds nothing
    Shape shape_;
    SegmentPlan plan_;
    std::uint64_t epoch_ = 0;
    std::atomic<std::uint32_t> last_use_{0};
    std::atomic<std::uint32_t> misses_{0};
    std::atomic<bool> dirty_{false};       // written to since the last sync
    std::vector<std::uint8_t> maybe_set_;  // by slot: the record on disk may name a page
};

}  // namespace kvstrata
