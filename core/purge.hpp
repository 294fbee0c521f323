// Drops pages from a cache directory so that nothing of them is left in its files: records are freed, slot headers (they hold the tokens in
// clear) overwritten, also those of pages that were evicted long ago. Rows are overwritten by later pages, or go with their segments.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "directory.hpp"
#include "disk.hpp"
#include "purge_order.hpp"
#include "survey.hpp"
#include "verifier.hpp"

namespace kvstrata {

struct PurgeReport {
    std::uint64_t pages = 0;       // dropped
    std::uint64_t bytes = 0;       // of their slots: free for other pages, or given back with their segments
    std::uint64_t leftovers = 0;   // headers of pages that were gone already, overwritten
    std::uint64_t segments = 0;    // removed, since nothing was left in them
    std::uint64_t freed = 0;       // bytes given back to the file system
    std::uint64_t namespaces = 0;  // descriptions removed, since no page uses them
    std::uint64_t allocated = 0;   // by everything in the directory, afterwards
    // What the order names and could not be dropped:
    std::uint64_t used_shelves = 0;  // their owners live
    std::uint64_t used_pages = 0;
    std::uint64_t used_bytes = 0;
    std::uint64_t failures = 0;    // slots and files that could not be read or written
    int error = 0;                 // -errno of the first of them
    std::string where;             // its file
    std::uint64_t unanswered = 0;  // shelves whose owners live and did not say that they did it
    std::uint64_t unknown = 0;     // segments of another format version or another program: left alone
    bool cancelled = false;

    void failed(int code, const std::string& file);
};

// How the owner of a shelf in use keeps a slot from being used while it is overwritten.
class SlotClaims {
   public:
    virtual ~SlotClaims() = default;
    // `page`: what its record names, nullptr when it names nothing. False: the page is in use, or the slot is being written; it stays.
    virtual bool claim(const std::string& segment, std::uint32_t slot, const Key* page) = 0;
    virtual void done(const std::string& segment, std::uint32_t slot) = 0;  // it is empty now
};

// Carries the order out on one segment file, or on all of a shelf, for whoever owns the shelf. `claims`: nullptr where no one uses it;
// damaged segments are then made readable first, and empty ones removed. `slot_done`, called after each slot: false cancels. All of a
// segment is purged with to_size.
using SlotDone = std::function<bool()>;
void purge_segment(const std::shared_ptr<Disk>& disk, const OwnedShelf& shelf, const DirEntry& file, const PurgeOrder& order,
                   SlotClaims* claims, PurgeReport& report, const SlotDone& slot_done);
void purge_shelf(const std::shared_ptr<Disk>& disk, const OwnedShelf& shelf, const PurgeOrder& order, SlotClaims* claims,
                 PurgeReport& report, const SlotDone& slot_done);

// Adds to the order's keys every page in the directory that continues one of them, whoever owns it.
void add_continuations(const std::shared_ptr<Disk>& disk, const Survey& all, PurgeOrder& order);

// On all shelves without a living owner. Those that live, but for `ours`, are asked to do it on theirs. One purge at a time: others, and
// then the answers, are waited for, `patience` in all; of shelves whose owner has not answered by then it is counted what the order names.
// `progress` is in slots. `meanwhile` is done when the others have been asked: for `ours`.
PurgeReport purge(const std::shared_ptr<Disk>& disk, PurgeOrder order, const Progress& progress,
                  const std::vector<std::string>& ours = {}, std::chrono::milliseconds patience = std::chrono::seconds{10},
                  const std::function<void()>& meanwhile = {});

}  // namespace kvstrata
