#include "header_search.hpp"

#include <algorithm>
#include <cerrno>

namespace kvstrata {
namespace {

constexpr std::uint64_t kScanBytes = 32ull << 20;
constexpr std::size_t kScanChunk = 1u << 20;

}  // namespace

int find_header(const File& file, std::uint64_t file_bytes, const Shape& ours, std::optional<SegmentHeader>& into) {
    const AlignedBuffer chunk(kScanChunk);
    if (!chunk.data()) return -ENOMEM;
    std::vector<std::byte> header;
    for (std::uint64_t at = SegmentPlan::table_end(1); at < std::min(file_bytes, kScanBytes); at += kScanChunk) {
        const std::int64_t got = file.read(chunk.data(), kScanChunk, at);
        if (got < 0) return int(got);
        for (std::uint64_t block = 0; block + kBlockBytes <= std::uint64_t(got); block += kBlockBytes) {
            const auto shape = claimed_shape(chunk.data() + block);
            if (!shape || (into && *shape != ours)) continue;
            const auto plan = SegmentPlan::filling(*shape, file_bytes);
            if (!plan || at + block < plan->slots_offset || (at + block - plan->slots_offset) % shape->slot_bytes() != 0) continue;
            header.resize(shape->header_bytes);
            FoundPage page;
            if (file.read(header.data(), header.size(), at + block) < std::int64_t(header.size())) continue;
            if (!read_header(header.data(), *shape, page)) continue;
            into = {*shape, *plan, 0};
            if (*shape == ours) return 0;
        }
    }
    return 0;
}

}  // namespace kvstrata
