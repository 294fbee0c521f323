// What the owner of a shelf tells other processes: the block in its `owner` file, and the counters in its `changes` file. Described in
// docs/disk-format.md. Neither is ever synced: whoever reads them lives on the same machine at the same time.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "file.hpp"
#include "purge_order.hpp"

namespace kvstrata {

struct OwnerRecord {
    std::uint32_t pid = 0;    // for people
    std::uint64_t home = 0;   // the shelf where the owner keeps its record up to date; a process may own several
    std::uint64_t cap = 0;    // of the directory, as this process was configured
    std::uint64_t seen = 0;   // the smallest cap of any process that it keeps to
    std::uint64_t holds = 0;  // bytes of its segments
    std::uint64_t wants = 0;  // bytes that it cannot take although it holds less than its share
    PurgeAnswer answer;       // to the latest request
    friend bool operator==(const OwnerRecord&, const OwnerRecord&) = default;
};

int write_owner(const File& owner, const OwnerRecord& record);             // 0 or -errno
std::optional<OwnerRecord> parse_owner(std::span<const std::byte> block);  // where it is whole

// The owner's side of `changes`: one u64 per segment number, and number 0 for the record. Each bump comes after what it announces.
class Changes {
   public:
    Changes(std::shared_ptr<Disk> disk, std::string path) : disk_(std::move(disk)), path_(std::move(path)) {}
    void bump(std::uint32_t number);  // what fails here others learn later, or by a read that finds another page

   private:
    std::shared_ptr<Disk> disk_;
    std::string path_;
    std::mutex mutex_;
    std::shared_ptr<File> file_;
    std::vector<std::uint64_t> counters_;
};

// All of them, by number; one request to the file where there are about as many as `before`. Empty where they cannot be read.
std::vector<std::uint64_t> read_counters(const File& changes, std::size_t before = 0);

}  // namespace kvstrata
