#include "request.hpp"

#include <cstring>
#include <vector>

#include "checksum.hpp"

namespace kvstrata {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'S', 'P', 'U', 'R', 'G', 'E'};
constexpr std::uint32_t kVersion = 1;

struct Head {
    char magic[8];
    std::uint32_t version;
    std::uint32_t kind;
    std::uint64_t id;
    std::uint64_t bytes;
    std::uint64_t from;
    std::uint32_t before;
    std::uint32_t keys;
};
static_assert(sizeof(Head) == 48 && std::is_trivially_copyable_v<Head>);

}  // namespace

std::uint64_t PurgeRequest::bytes(std::size_t keys) { return sizeof(Head) + keys * sizeof(Key) + sizeof(std::uint64_t); }

int write_request(const File& file, const PurgeRequest& request) {
    if (request.order.keys.size() > PurgeRequest::kMostKeys) return -EINVAL;
    Head head{};
    std::memcpy(head.magic, kMagic, sizeof kMagic);
    head.version = kVersion;
    head.kind = static_cast<std::uint32_t>(request.order.kind);
    head.id = request.id;
    head.bytes = request.order.bytes;
    head.from = request.from;
    head.before = request.order.before;
    head.keys = std::uint32_t(request.order.keys.size());
    std::vector<std::byte> bytes(sizeof head + head.keys * sizeof(Key) + sizeof(std::uint64_t));
    std::memcpy(bytes.data(), &head, sizeof head);
    std::size_t at = sizeof head;
    for (const Key& key : request.order.keys) {
        std::memcpy(bytes.data() + at, &key, sizeof key);
        at += sizeof key;
    }
    const std::uint64_t check = checksum(bytes.data(), at);
    std::memcpy(bytes.data() + at, &check, sizeof check);
    return file.write(bytes.data(), bytes.size(), 0);
}

PurgeRequest read_request(const std::shared_ptr<Disk>& disk) {
    int error = 0;
    const auto file = File::open(disk, PurgeRequest::kPath, OpenMode::read, error);
    Head head;
    if (!file || file->read(&head, sizeof head, 0) != sizeof head || std::memcmp(head.magic, kMagic, sizeof kMagic) != 0 ||
        head.version != kVersion || head.keys > PurgeRequest::kMostKeys ||
        head.kind > static_cast<std::uint32_t>(PurgeOrder::Kind::to_size))
        return {};
    std::vector<std::byte> bytes(sizeof head + head.keys * sizeof(Key) + sizeof(std::uint64_t));
    if (file->read(bytes.data(), bytes.size(), 0) != std::int64_t(bytes.size())) return {};
    std::memcpy(&head, bytes.data(), sizeof head);
    if (disk->lock(file->handle()) != -EWOULDBLOCK) return {};  // nobody waits for it any more
    const std::size_t end = bytes.size() - sizeof(std::uint64_t);
    std::uint64_t check = 0;
    std::memcpy(&check, bytes.data() + end, sizeof check);
    if (check != checksum(bytes.data(), end)) return {};
    PurgeRequest request{.id = head.id, .from = head.from, .order = {}};
    request.order.kind = static_cast<PurgeOrder::Kind>(head.kind);
    request.order.before = head.before;
    request.order.bytes = head.bytes;
    for (std::size_t at = sizeof head; at < end; at += sizeof(Key)) {
        Key key;
        std::memcpy(&key, bytes.data() + at, sizeof key);
        request.order.keys.insert(key);
    }
    return request;
}

}  // namespace kvstrata
