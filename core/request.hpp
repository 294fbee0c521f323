// A purge that a living owner of shelves is asked to carry out on them: the file `requests`, described in docs/disk-format.md.
//
// Whoever asks holds the file's lock from asking to the end, so that there is one request at a time, and the directory's while writing it. An
// owner looks when the list of shelves has a new generation, under the directory's lock, and answers in its record.
#pragma once

#include <memory>

#include "file.hpp"
#include "purge_order.hpp"

namespace kvstrata {

struct PurgeRequest {
    static constexpr const char* kPath = "requests";
    static constexpr std::size_t kMostKeys = 1 << 17;

    static std::uint64_t bytes(std::size_t keys);  // of the file

    std::uint64_t id = 0;    // drawn; 0: none
    std::uint64_t from = 0;  // the home of the process that asks, 0: it owns no shelf
    PurgeOrder order;        // of a prefix: with the keys of all that is known to continue it
};

int write_request(const File& file, const PurgeRequest& request);  // 0 or -errno
// What is asked; none where there is no file, it is not whole, or whoever asked is gone.
PurgeRequest read_request(const std::shared_ptr<Disk>& disk);

}  // namespace kvstrata
