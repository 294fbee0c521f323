// What the driver asks of the I/O threads, and what they answer.
//
// A submission borrows: the slab row and the page's content stay untouched and alive until its completion is handed to the driver
// (or for ever, when it never completes: the driver then quarantines both).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.hpp"

namespace kvstrata {

enum class OpKind : std::uint8_t {
    read,   // slot -> slab row, proven against `page`
    write,  // slab row -> slot: clear the record, write header and row, set the record
    clear,  // forget what the slot holds (clear its record)
    grow,   // make room for more slots: a new segment, or one taken over from another slot size
};

// Everything a slot header proves about a page.
struct PageImage {
    Key space;   // namespace
    Key parent;  // page key of the parent; the namespace itself for a first page
    Key key;
    Content content;
    std::uint32_t uses = 0;
    std::uint32_t last_use = 0;  // seconds as the caller counts them; kept in the record
};

struct Op {
    std::uint64_t id = 0;
    OpKind kind = OpKind::read;
    SlotRef slot;
    Row row = kNoRow;  // of the slab
    PageImage page;
};

enum class OpStatus : std::uint8_t {
    ok,
    corrupt,     // wrong checksum or identity: the slot's content is worthless
    conflict,    // sound, and of this very key, but other content: keep it, it is not ours
    stale,       // sound, but the slot holds another key by now (reused): a miss
    unreadable,  // errno said so: keep, skip, retry later
    full,        // no room: cap, reserve or ENOSPC
    failed,      // a write failed for another reason than room
};

struct Completion {
    std::uint64_t id = 0;
    OpStatus status = OpStatus::ok;
    int error = 0;               // errno where one is known
    std::vector<SlotRef> slots;  // grow: the new slots
    std::vector<SlotRef> lost;   // grow: slots that a segment taken over held before (their pages are gone)
};

// That the page in a slot was used.
struct SlotUse {
    SlotRef slot;
    std::uint32_t time = 0;  // as PageImage::last_use
};

class Io {
   public:
    virtual ~Io() = default;
    // Never blocks, never fails: trouble is a completion. Order between operations is not kept.
    virtual void submit(std::vector<Op>&& ops) = 0;
};

}  // namespace kvstrata
