// A segment file as somebody sees it who does not own it: survey, verifier, purge. It may change at any moment under whoever owns it, and
// nothing in it is believed.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "file.hpp"
#include "header_search.hpp"

namespace kvstrata {

class SegmentFile {
   public:
    // `bytes`: the file's length, as its directory lists it.
    SegmentFile(std::shared_ptr<Disk> disk, std::string path, std::uint64_t bytes)
        : disk_(std::move(disk)), path_(std::move(path)), bytes_(bytes) {}

    // Reads the header block. 0 (state() says what it is), or -errno.
    int open();
    HeaderState state() const { return state_; }
    std::uint32_t version() const { return version_; }  // that its header claims; 0 without our magic
    const std::string& path() const { return path_; }
    std::uint64_t bytes() const { return bytes_; }

    // Of one without a sound header: what it was, as its slots tell, if they do. 0 or -errno.
    int find_header(std::optional<SegmentHeader>& into) const { return kvstrata::find_header(*file_, bytes_, Shape{}, into); }

    // Only where the state is sound:
    const SegmentHeader& header() const { return header_; }
    const Shape& shape() const { return header_.shape; }
    std::uint32_t slots() const { return slots_; }                    // that the table tells of
    std::uint32_t whole_slots() const { return header_.plan.slots; }  // of these, those in front of the file's end
    std::uint64_t slot_offset(std::uint32_t slot) const { return header_.plan.slots_offset + slot * shape().slot_bytes(); }
    // Records read, from `first` on; fewer at the end of the file, or -errno.
    std::int64_t read_records(std::uint32_t first, std::span<Record> into) const;
    RecordState judge(const Record& record, std::uint32_t slot) const { return record.judge(header_.epoch, slot); }
    // Hands over every record in order. `run`: so many slots from this one on are known to hold pages. A record that was just being
    // written is read again. False from the sink: enough. 0, or -errno: the table could not be read to its end.
    using RecordSink = std::function<bool(std::uint32_t slot, RecordState state, const Record& record, std::uint32_t run)>;
    int for_each(const RecordSink& sink) const;
    // Whether the slot's record is still this one. A record read while it was written is neither the old nor the new one.
    bool still(std::uint32_t slot, const Record& record) const;
    bool reformatted() const;  // since open()

    // Changes, by whoever keeps the slot from being used meanwhile. 0 or -errno.
    int clear_record(std::uint32_t slot);
    int overwrite_header(std::uint32_t slot);  // with zeros: the tokens in it are gone
    int sync();

   private:
    std::uint64_t record_offset(std::uint32_t slot) const { return kBlockBytes + std::uint64_t{slot} * sizeof(Record); }
    int file_to_change(OpenMode mode, std::shared_ptr<File>& file);

    std::shared_ptr<Disk> disk_;
    std::string path_;
    std::uint64_t bytes_;
    std::shared_ptr<File> file_;
    std::shared_ptr<File> table_;  // to change it
    std::shared_ptr<File> rows_;   // likewise: past the page cache, as owners write
    HeaderState state_ = HeaderState::damaged;
    std::uint32_t version_ = 0;
    SegmentHeader header_;
    std::uint32_t slots_ = 0;
};

// Reads slots one behind the other in large requests.
class SlotReader {
   public:
    static constexpr std::size_t kRequest = 4u << 20;

    SlotReader(const std::shared_ptr<Disk>& disk, const SegmentFile& segment);

    // From `least` (at most a slot header) to `most` bytes at this offset, in memory until the next call; fewer than `least` at the end of
    // the file. `ahead`: how much from here on will be wanted. On failure nothing, and -errno in `error`.
    std::span<const std::byte> read(std::uint64_t offset, std::size_t least, std::uint64_t most, std::uint64_t ahead, int& error);
    void forget() { size_ = 0; }  // what was read: it may have changed

   private:
    int error_ = 0;  // of opening; before the file, whose opening sets it
    std::shared_ptr<File> file_;
    AlignedBuffer buffer_;
    std::uint64_t begin_ = 0;  // of what the buffer holds, in the file
    std::size_t size_ = 0;
};

enum class SlotState : std::uint8_t {
    sound,       // the header proves itself, and the row
    bad_header,  // its checksum or its key is wrong
    other_page,  // a sound header of another page than asked for
    bad_row,     // a plane's checksum is wrong
    cut,         // the file ends too early
    unreadable,
};

// Proves the page in a slot from its own header alone: checksum, key from content, and every plane. `wanted`: what the record says, or
// nullptr: any page. `ahead` as above, of the whole run of slots. `found`, where the header is sound, is what it names.
SlotState prove_page(SlotReader& reader, const SegmentFile& segment, std::uint32_t slot, const Record* wanted, std::uint64_t ahead,
                     FoundPage& found, int& error);

}  // namespace kvstrata
