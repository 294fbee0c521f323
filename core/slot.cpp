#include "slot.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>

#include "keys.hpp"

namespace kvstrata {
namespace {

static_assert(std::endian::native == std::endian::little, "files hold integers as they lie in memory");

constexpr std::uint64_t kMagic = 0x31544f4c5353564bull;  // "KVSSLOT1"

struct HeaderStart {
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint32_t page_size;
    std::uint32_t plane_count;
    std::uint32_t media_count;
    std::uint32_t uses;
    std::uint64_t row_bytes;
    std::uint64_t layout;
    Key space;
    Key parent;
    Key key;
    std::uint32_t last_use;
    std::uint32_t reserved[11];
};
static_assert(sizeof(HeaderStart) == 192 && std::is_trivially_copyable_v<HeaderStart>);

// One per plane: so much of the row, and its checksum. With its size a page can be proven by whoever does not know its model.
struct PlaneSum {
    std::uint64_t bytes;
    std::uint64_t check;

    static PlaneSum of(const Plane& plane, const std::byte* row) {
        return {plane.bytes, checksum(row + plane.offset, plane.bytes)};
    }
    friend bool operator==(const PlaneSum&, const PlaneSum&) = default;
};
static_assert(sizeof(PlaneSum) == 16 && std::is_trivially_copyable_v<PlaneSum>);

constexpr std::size_t kPlanesAt = sizeof(HeaderStart);  // then a sum per plane, int32 per token, 36 bytes per media item
constexpr std::size_t kTrailer = 8;                     // checksum of everything before it
constexpr std::uint32_t kMaxHeader = 16u << 20;         // bounds that keep sums of sizes from disk far from overflow
constexpr std::uint64_t kMaxRow = 1ull << 40;

std::size_t tokens_at(const Shape& shape) { return kPlanesAt + sizeof(PlaneSum) * shape.plane_count; }
std::size_t media_at(const Shape& shape) { return tokens_at(shape) + std::size_t{4} * shape.page_size; }

std::uint64_t load_u64(const std::byte* from) {
    std::uint64_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// As every writer computes it.
std::uint64_t header_bytes_of(const Shape& shape) {
    const std::size_t media = sizeof(MediaItem) * std::max<std::size_t>(16, shape.page_size / 8);
    return round_up(media_at(shape) + media + kTrailer, kBlockBytes);
}

// Nothing of a header is believed before this.
bool sound_header(const std::byte* header, const Shape& shape, HeaderStart& start) {
    if (checksum(header, shape.header_bytes - kTrailer) != load_u64(header + shape.header_bytes - kTrailer)) return false;
    std::memcpy(&start, header, sizeof start);
    return start.magic == kMagic && start.version == kFormatVersion && start.header_bytes == shape.header_bytes &&
           start.page_size == shape.page_size && start.plane_count == shape.plane_count && start.row_bytes == shape.row_bytes &&
           start.layout == shape.layout && start.media_count <= shape.media_room();
}

}  // namespace

Shape Shape::of(const ShelfConfig& config) {
    Shape shape;
    shape.page_size = config.page_size;
    shape.plane_count = static_cast<std::uint32_t>(config.planes.size());
    shape.row_bytes = config.row_bytes;
    shape.row_stride = config.row_stride;
    shape.layout = checksum(config.planes.data(), config.planes.size() * sizeof(Plane));
    shape.header_bytes = static_cast<std::uint32_t>(header_bytes_of(shape));
    return shape;
}

std::size_t Shape::media_room() const { return (header_bytes - kTrailer - media_at(*this)) / sizeof(MediaItem); }

bool Shape::possible() const {
    return page_size > 0 && plane_count > 0 && header_bytes <= kMaxHeader && header_bytes == header_bytes_of(*this) &&
           row_bytes > 0 && row_bytes <= kMaxRow && row_stride == round_up(row_bytes, kBlockBytes);
}

int encode_header(std::byte* header, const Shape& shape, std::span<const Plane> planes, const PageImage& page,
                  const std::byte* row) {
    const Content& content = page.content;
    if (content.tokens.size() != shape.page_size) return -EINVAL;
    if (content.media.size() > shape.media_room()) return -E2BIG;
    HeaderStart start{};
    start.magic = kMagic;
    start.version = kFormatVersion;
    start.header_bytes = shape.header_bytes;
    start.page_size = shape.page_size;
    start.plane_count = shape.plane_count;
    start.media_count = static_cast<std::uint32_t>(content.media.size());
    start.uses = page.uses;
    start.row_bytes = shape.row_bytes;
    start.layout = shape.layout;
    start.space = page.space;
    start.parent = page.parent;
    start.key = page.key;
    start.last_use = page.last_use;

    std::memset(header, 0, shape.header_bytes);
    std::memcpy(header, &start, sizeof start);
    std::byte* at = header + kPlanesAt;
    for (const Plane& plane : planes) {
        const PlaneSum sum = PlaneSum::of(plane, row);
        std::memcpy(at, &sum, sizeof sum);
        at += sizeof sum;
    }
    std::memcpy(at, content.tokens.data(), content.tokens.size_bytes());
    if (!content.media.empty()) std::memcpy(header + media_at(shape), content.media.data(), content.media.size_bytes());
    const std::uint64_t sum = checksum(header, shape.header_bytes - kTrailer);
    std::memcpy(header + shape.header_bytes - kTrailer, &sum, sizeof sum);
    return 0;
}

bool read_header(const std::byte* header, const Shape& shape, FoundPage& into) {
    HeaderStart start;
    if (!sound_header(header, shape, start)) return false;
    const std::vector<std::int32_t> tokens = header_tokens(header, shape);
    std::vector<MediaItem> media(start.media_count);
    if (!media.empty()) std::memcpy(media.data(), header + media_at(shape), media.size() * sizeof(MediaItem));
    if (page_key(start.space, start.parent, {tokens, media}) != start.key) return false;
    into.space = start.space;
    into.parent = start.parent;
    into.key = start.key;
    into.uses = start.uses;
    into.last_use = start.last_use;
    return true;
}

std::vector<std::int32_t> header_tokens(const std::byte* header, const Shape& shape) {
    std::vector<std::int32_t> tokens(shape.page_size);
    std::memcpy(tokens.data(), header + tokens_at(shape), tokens.size() * sizeof(std::int32_t));
    return tokens;
}

RowProof::RowProof(const std::byte* header, const Shape& shape) {
    planes_.reserve(shape.plane_count);
    sums_.reserve(shape.plane_count);
    std::uint64_t covered = 0;
    for (std::size_t i = 0; i < shape.plane_count; ++i) {
        PlaneSum sum;
        std::memcpy(&sum, header + kPlanesAt + i * sizeof sum, sizeof sum);
        if (sum.bytes == 0 || sum.bytes > shape.row_bytes - covered) return;
        planes_.push_back({covered, sum.bytes});
        sums_.push_back(sum.check);
        covered += sum.bytes;
    }
    sound_ = covered == shape.row_bytes && checksum(planes_.data(), planes_.size() * sizeof(Plane)) == shape.layout;
}

void RowProof::add(const std::byte* data, std::size_t bytes) {
    while (bytes > 0 && sound_ && plane_ < planes_.size()) {
        const auto part = std::size_t(std::min<std::uint64_t>(bytes, planes_[plane_].bytes - done_));
        running_.add(data, part);
        data += part;
        bytes -= part;
        done_ += part;
        if (done_ < planes_[plane_].bytes) return;
        sound_ = running_.value() == sums_[plane_++];
        running_.restart();
        done_ = 0;
    }
}

std::optional<Shape> claimed_shape(const std::byte* block) {
    HeaderStart start;
    std::memcpy(&start, block, sizeof start);
    if (start.magic != kMagic || start.version != kFormatVersion || start.row_bytes > kMaxRow) return std::nullopt;
    const Shape shape{
        start.page_size, start.plane_count, start.header_bytes, start.row_bytes, round_up(start.row_bytes, kBlockBytes),
        start.layout};
    return shape.possible() ? std::optional(shape) : std::nullopt;
}

OpStatus prove_slot(const std::byte* header, const Shape& shape, std::span<const Plane> planes, const PageImage& page,
                    const std::byte* row) {
    HeaderStart start;
    if (!sound_header(header, shape, start)) return OpStatus::corrupt;
    if (start.key != page.key) return OpStatus::stale;
    if (start.space != page.space) return OpStatus::corrupt;
    // The key is a name, not a proof: another page can have it only by a collision, and that page is not ours to drop.
    const Content& content = page.content;
    if (start.parent != page.parent || content.tokens.size() != shape.page_size || content.media.size() != start.media_count ||
        std::memcmp(header + tokens_at(shape), content.tokens.data(), content.tokens.size_bytes()) != 0 ||
        (start.media_count > 0 && std::memcmp(header + media_at(shape), content.media.data(), content.media.size_bytes()) != 0)) {
        return OpStatus::conflict;
    }
    const std::byte* at = header + kPlanesAt;
    for (const Plane& plane : planes) {
        PlaneSum sum;
        std::memcpy(&sum, at, sizeof sum);
        if (sum != PlaneSum::of(plane, row)) return OpStatus::corrupt;
        at += sizeof sum;
    }
    return OpStatus::ok;
}

}  // namespace kvstrata
