// Reads and proves everything in a cache directory, beside whoever lives there; on request drops what is bad.
//
// Every page that a record names is read: the slot's header must be sound and name the record's page, the key must be the hash of
// namespace, parent and content, and every plane's checksum must hold. The sizes of the planes come from the header itself, so pages of
// any model are proven.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "segment_file.hpp"

namespace kvstrata {

struct BadPage {
    std::uint32_t slot = 0;
    SlotState state = SlotState::sound;
    int error = 0;   // -errno, of unreadable ones
    Key space, key;  // as the record says
};

struct SegmentProof {
    static constexpr std::size_t kBadKept = 100;  // bad pages told one by one; all are counted

    std::string name;
    int error = 0;  // -errno: the file, or its table, could not be read to the end
    HeaderState state = HeaderState::damaged;
    bool has_slots = false;  // without a sound header block: slots were found that tell what it was
    std::uint32_t version = 0;
    std::uint64_t sound = 0;
    std::uint64_t corrupt = 0;     // a wrong checksum or key, or another page's header
    std::uint64_t torn = 0;        // the file ends before the page does
    std::uint64_t unreadable = 0;  // the medium said so
    std::uint64_t damaged_records = 0;
    std::uint64_t changed = 0;  // used again by their owner while they were read
    std::vector<BadPage> bad;
    // Repair:
    std::uint64_t dropped = 0;    // records of bad pages cleared
    std::uint64_t recovered = 0;  // pages found by their own headers, whose records or header block had been lost
    bool rebuilt = false;         // lost records and header block were made again
    bool removed = false;         // the file: nothing was in it

    // Bad pages and lost records that are still there; the header block and the file itself count as one each.
    std::uint64_t left() const {
        return corrupt + torn + unreadable - dropped + (rebuilt ? 0 : damaged_records + has_slots) + (error != 0);
    }
};

struct ShelfProof {
    std::string id;
    bool alive = false;  // repair leaves it to its owner
    int error = 0;       // -errno: it could not be listed, or taken for repair
    std::vector<SegmentProof> segments;
};

struct Verification {
    int error = 0;  // -errno: the directory could not be listed
    std::vector<ShelfProof> shelves;
    std::uint64_t bytes = 0;  // of the slots that were read
    bool cancelled = false;
};

// Called every few milliseconds of work with bytes of slots done and in all; false cancels.
using Progress = std::function<bool(std::uint64_t done, std::uint64_t total)>;

// `repair`: shelves without a living owner are taken (nobody adopts one meanwhile), and of these, records of bad pages are freed, lost
// records and header blocks made again from the slots. What the medium could not read is kept.
Verification verify(const std::shared_ptr<Disk>& disk, bool repair, const Progress& progress);

}  // namespace kvstrata
