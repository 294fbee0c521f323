// The part of disk_path that one writer process owns: segments of slots, each slot a header and a page row.
// The format is described in docs/disk-format.md. Thread-safe for operations on different slots; grow() is serialised inside.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "disk.hpp"
#include "io.hpp"
#include "request.hpp"
#include "types.hpp"

namespace kvstrata {

// One plane of a page row: its place in the row. Each has its own checksum, so that layers can be proven one by one.
struct Plane {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

struct ShelfConfig {
    std::uint32_t page_size = 0;
    std::uint64_t row_bytes = 0;
    std::uint64_t row_stride = 0;  // row_bytes rounded up to 4 KiB; slab rows lie at this stride, 4 KiB aligned
    std::vector<Plane> planes;     // cover [0, row_bytes) without gaps
    std::uint64_t cap_bytes = 0;   // of everything under the root
    std::uint64_t reserve_free_bytes = 0;
    std::chrono::milliseconds await_others{1000};  // those who keep to a higher cap: how long open() gives them to give back
    Key space;                                     // of the cache without adapter or tenant: names namespaces/<hex>.json
    std::string space_json;                        // its content: model, dtype, layout in clear
    std::uint64_t seed = 0;  // of the names and epochs it draws; 0: unpredictable. Simulations set it to replay exactly
};

struct FoundPage {
    SlotRef slot;
    Key key, parent, space;
    std::uint32_t uses = 0;
    std::uint32_t last_use = 0;
};

// What a shelf learns after it was opened, in the order it is to be heard.
struct ShelfNews {
    std::vector<std::uint32_t> vanished;  // SlotRef::segment of files that are gone: their slots are not to be used any more
    std::vector<SlotRef> gone;            // slots of other processes that hold something else now, or nothing
    std::vector<std::uint32_t> adopted;   // segments of other processes that are ours now
    std::vector<FoundPage> found;         // pages of ours: in slots whose records had been lost, or in adopted segments
    std::vector<FoundPage> shared;        // pages of other processes, in slots that are theirs: to be read only
    std::vector<SlotRef> empty;           // slots of ours that hold nothing
    bool room = false;                    // others made room: growing may succeed now
    PurgeRequest purge;                   // id 0: none. To be carried out with purge(), and answered
    bool nothing() const {
        return vanished.empty() && gone.empty() && adopted.empty() && found.empty() && shared.empty() && empty.empty() && !room &&
               purge.id == 0;
    }
};

// What the shelf met; counts since open.
struct ShelfStats {
    std::uint64_t segments = 0;           // of our shape, now
    std::uint64_t other_segments = 0;     // owned, but of another slot shape or without a sound header, now
    std::uint64_t unknown_files = 0;      // of a format version we do not know or not ours at all: left alone
    std::uint64_t damaged_segments = 0;   // whose header block was lost: rebuilt from their slots
    std::uint64_t damaged_records = 0;    // likewise
    std::uint64_t unproven_slots = 0;     // of those, slots that were not looked at yet, now
    std::uint64_t rebuilt_pages = 0;      // found again that way
    std::uint64_t vanished_segments = 0;  // files that were removed under us
    std::uint64_t removed_segments = 0;   // given up for the cap or for another slot shape
    std::uint64_t adopted_shelves = 0;
    std::uint64_t owners = 1;     // processes that share the directory, now, this one among them
    std::uint64_t cap_bytes = 0;  // the smallest cap of any of them, now
    std::uint64_t unacknowledged =
        0;                // of them, those that had not given back what a lower cap asks for when this one had waited for it
    bool direct = false;  // slots bypass the page cache
};

class SlotRun;
struct PurgeReport;

// How the one who uses the slots lets them be overwritten: see Driver::claim_slot.
class ShelfClaims {
   public:
    virtual ~ShelfClaims() = default;
    virtual bool claim(SlotRef slot, const Key* page) = 0;
    virtual void done(SlotRef slot) = 0;
    virtual void heard(ShelfNews&&) {}                // what came to light just before
    virtual bool over() const { return false; }       // nothing more is to be purged
    virtual void retired(std::uint32_t segment) = 0;  // its file was removed: see Driver::retire_segment
};

class Shelf {
   public:
    // Takes every orphaned shelf over, or makes one. Called once at start; blocks for `patience` at most, whatever the disk does. On failure nullptr and `error` holds one sentence that names the path, the cause and the fix.
    static std::unique_ptr<Shelf> open(const std::shared_ptr<Disk>& disk, const ShelfConfig& config, std::string& error,
                                       std::chrono::milliseconds patience = std::chrono::seconds{30});
    virtual ~Shelf() = default;

    // What the tables of this shelf hold in slots of our shape (every namespace), and the slots that are empty. Read once after open.
    virtual std::vector<FoundPage> take_found() = 0;
    virtual std::vector<SlotRef> take_empty() = 0;
    virtual ShelfNews take_news() { return {}; }  // what was learnt of other processes until then

    // Background work: rebuilding what was damaged, and files that are gone. One piece of it takes some milliseconds on a disk that
    // answers; to be called, by one thread at a time, while there is news to come. Slots in the news are the caller's from then on.
    virtual bool has_news() const { return false; }
    virtual ShelfNews next_news() { return {}; }
    // Looks whether the segments' files are still there; those that are not become news. For every few seconds.
    virtual void check_files() {}
    // Looks what other processes did: cheap when they did nothing, next to nothing when there are none. For a few times a second.
    virtual ShelfNews poll() { return {}; }
    // Where both hold the same page the copy of the lesser shelf is kept, and the other's owner forgets its own.
    virtual bool precedes(const SlotRef&, const SlotRef&) const { return false; }

    // Runs one operation to its end on the calling thread. `row`: the slab row of op.row (row_stride bytes, 4 KiB aligned).
    virtual Completion execute(const Op& op, std::byte* row) = 0;

    // The same in three parts for reads (writes) of adjacent slots of one segment, by rising slot: begin, the request, which may be made
    // elsewhere, finish. begin: nullptr when there is no such segment, or never (then execute() does it). At most max_run() operations.
    virtual std::size_t max_run() const { return 1; }
    virtual std::unique_ptr<SlotRun> begin(const std::vector<Op>& ops, const std::vector<std::byte*>& rows);
    virtual std::vector<Completion> finish(SlotRun& run, std::int64_t moved, bool again);

    // Says in clear, when the files are looked after next or at the end, what a namespace is: `json`, for people and tools. The first
    // thousand namespaces of a directory are described. No I/O here.
    virtual void describe(const Key&, std::string) {}

    // When pages in slots of this process were used. Written down when the files are looked after next, at a purge, and at the end. No I/O
    // here.
    virtual void note_uses(std::vector<SlotUse>) {}

    // Drops what the order names from the segments this process owns, beside its operations: `claims` keeps slots of our shape still.
    // Blocks, until `claims` are over or the shelf is closed; by one thread at a time. Counts are added to the report.
    virtual void purge(PurgeOrder, ShelfClaims&, PurgeReport&) {}
    virtual bool still_asked(std::uint64_t) const { return true; }  // that request: who asked waits for the answer
    virtual void answer(const PurgeAnswer&) {}                      // to a request that came with the news
    virtual std::vector<std::string> own_shelves() { return {}; }   // their names

    // What was written so far survives a power loss. 0 or -errno of the first that failed.
    virtual int sync() { return 0; }

    virtual std::uint64_t allocated_bytes() const = 0;  // of this shelf's files
    virtual ShelfStats stats() const { return {}; }
    // Gives the shelf up; the files stay. Operations still running keep what they use, and the ownership with it, until they return:
    // nobody adopts a slot that a late write may still touch.
    virtual void close() = 0;
};

}  // namespace kvstrata
