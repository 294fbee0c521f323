#include "owner.hpp"

#include <array>
#include <cstring>

#include "checksum.hpp"

namespace kvstrata {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kMostCounters = 1 << 20;
constexpr std::size_t kMoreCounters = 512;  // than were there last: room for what came meanwhile
constexpr char kMagic[8] = {'K', 'V', 'S', 'O', 'W', 'N', 'E', 'R'};
constexpr std::uint32_t kVersion = 1;

struct Block {
    char magic[8];
    std::uint32_t version;
    std::uint32_t pid;
    std::uint64_t home, cap, seen, holds, wants;
    PurgeAnswer answer;
    std::array<std::byte, kBlock - 64 - sizeof(PurgeAnswer)> zeros;
    std::uint64_t check;
};
static_assert(sizeof(Block) == kBlock && std::is_trivially_copyable_v<Block>);

std::uint64_t check_of(const Block& block) { return checksum(&block, kBlock - sizeof block.check); }

}  // namespace

int write_owner(const File& owner, const OwnerRecord& record) {
    Block block{};
    std::memcpy(block.magic, kMagic, sizeof kMagic);
    block.version = kVersion;
    block.pid = record.pid;
    block.home = record.home;
    block.cap = record.cap;
    block.seen = record.seen;
    block.holds = record.holds;
    block.wants = record.wants;
    block.answer = record.answer;
    block.check = check_of(block);
    return owner.write(&block, sizeof block, 0);
}

std::optional<OwnerRecord> parse_owner(std::span<const std::byte> bytes) {
    Block block;
    if (bytes.size() != sizeof block) return std::nullopt;
    std::memcpy(&block, bytes.data(), sizeof block);
    if (std::memcmp(block.magic, kMagic, sizeof kMagic) != 0 || block.version != kVersion || block.check != check_of(block))
        return std::nullopt;
    return OwnerRecord{block.pid, block.home, block.cap, block.seen, block.holds, block.wants, block.answer};
}

void Changes::bump(std::uint32_t number) {
    if (number >= kMostCounters) return;
    std::uint64_t value = 0;
    std::shared_ptr<File> file;
    {
        const std::lock_guard lock(mutex_);
        if (!file_) {
            int error = 0;
            file_ = File::open(disk_, path_, OpenMode::create, error);
            if (!file_) return;
            counters_ = read_counters(*file_);  // an owner before us has counted already
        }
        if (number >= counters_.size()) counters_.resize(number + 1);
        value = ++counters_[number];
        file = file_;
    }
    file->write(&value, sizeof value, number * sizeof value);
}

std::vector<std::uint64_t> read_counters(const File& changes, std::size_t before) {
    for (std::size_t room = before + kMoreCounters;; room *= 2) {
        std::vector<std::uint64_t> counters(room);
        const std::int64_t got = changes.read(counters.data(), room * sizeof counters[0], 0);
        counters.resize(got < 0 ? 0 : std::size_t(got) / sizeof counters[0]);
        if (counters.size() < room || room >= kMostCounters) return counters;
    }
}

}  // namespace kvstrata
