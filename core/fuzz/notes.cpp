// Fuzzing what processes tell each other through files: the record and the counters of an owner, and requests to purge. Nothing may
// crash or allocate wildly, and what is read and written again is the same.
//
// An input is a byte of flags, then a file's content. Flags: which file it is, and whether its checksum is made to fit.
#include <cstdlib>
#include <cstring>

#include "../checksum.hpp"
#include "../disk_sim.hpp"
#include "../owner.hpp"
#include "../request.hpp"

using namespace kvstrata;

namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kBlock = 4096;
constexpr std::size_t kHead = 48, kCountAt = 44;  // of a request: its fixed part, and where the number of keys stands
enum Flags : std::uint8_t { file_mask = 3, reseal = 4 };

void seal(Bytes& bytes, std::size_t at) {
    if (bytes.size() < at + 8) return;
    const std::uint64_t check = checksum(bytes.data(), at);
    std::memcpy(bytes.data() + at, &check, sizeof check);
}

void try_owner(Bytes bytes, bool sealed) {
    if (sealed) {
        bytes.resize(kBlock);
        seal(bytes, kBlock - 8);
    }
    const auto record = parse_owner(bytes);
    if (!record) return;
    const auto disk = SimMedium::make(1)->attach();
    int error = 0;
    const auto file = File::open(disk, "owner", OpenMode::create, error);
    if (!file || write_owner(*file, *record) != 0) std::abort();
    bytes.resize(kBlock);
    if (file->read(bytes.data(), kBlock, 0) != kBlock || parse_owner(bytes) != record) std::abort();
}

void try_request(Bytes bytes, bool sealed) {
    if (sealed && bytes.size() >= kHead) {
        std::uint32_t keys;
        std::memcpy(&keys, bytes.data() + kCountAt, sizeof keys);
        keys = keys % 64 == 63 ? PurgeRequest::kMostKeys + 1 : keys % 64;
        std::memcpy(bytes.data() + kCountAt, &keys, sizeof keys);
        bytes.resize(kHead + keys * sizeof(Key) + 8);
        seal(bytes, bytes.size() - 8);
    }
    const auto medium = SimMedium::make(1);
    const auto disk = medium->attach();
    medium->edit(PurgeRequest::kPath, [&](Bytes& file) { file = bytes; });
    const PurgeRequest request = read_request(disk);
    if (request.id == 0) return;
    if (request.order.keys.size() > PurgeRequest::kMostKeys) std::abort();
    int error = 0;
    const auto file = File::open(disk, PurgeRequest::kPath, OpenMode::create, error);
    disk->truncate(file->handle(), 0);
    if (write_request(*file, request) != 0) std::abort();
    const PurgeRequest again = read_request(disk);
    if (again.id != request.id || again.order.kind != request.order.kind || again.order.keys.size() != request.order.keys.size())
        std::abort();
}

void try_counters(const Bytes& bytes) {
    const auto medium = SimMedium::make(1);
    const auto disk = medium->attach();
    medium->edit("changes", [&](Bytes& file) { file = bytes; });
    int error = 0;
    const auto file = File::open(disk, "changes", OpenMode::read, error);
    if (!file || read_counters(*file).size() != bytes.size() / 8) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const auto* content = reinterpret_cast<const std::byte*>(data + 1);
    const Bytes bytes(content, content + size - 1);
    const bool sealed = (data[0] & reseal) != 0;
    switch (data[0] & file_mask) {
        case 0:
            try_owner(bytes, sealed);
            break;
        case 1:
            try_request(bytes, sealed);
            break;
        default:
            try_counters(bytes);
    }
    return 0;
}
