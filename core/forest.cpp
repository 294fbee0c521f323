#include "forest.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "keys.hpp"

namespace kvstrata {

Forest::Forest(std::uint32_t page_size) : page_size_(page_size), table_(64) {}

PageId Forest::allocate() {
    PageId page;
    if (!free_.empty()) {
        page = free_.back();
        free_.pop_back();
    } else {
        page = next_++;
        if ((page >> kBlockBits) == blocks_.size()) {
            auto block = std::make_unique<Block>();
            block->tokens.reset(new std::int32_t[(std::size_t{1} << kBlockBits) * page_size_]);
            blocks_.push_back(std::move(block));
        }
    }
    PageRecord& record = at(page);
    const std::uint32_t generation = record.generation + 1;
    record = PageRecord{};
    record.generation = generation;
    record.alive = true;
    return page;
}

PageId Forest::root(const Key& space) {
    std::vector<PageId>& same_prefix = roots_[space.prefix()];
    for (PageId page : same_prefix)
        if (at(page).key == space) return page;
    const PageId page = allocate();
    at(page).key = space;
    at(page).root = page;
    same_prefix.push_back(page);
    return page;
}

std::span<const MediaItem> Forest::media(PageId page) const {
    if (media_.empty()) return {};
    const auto found = media_.find(page);
    return found == media_.end() ? std::span<const MediaItem>{} : std::span<const MediaItem>(found->second);
}

Content Forest::content(PageId page) const { return {{tokens(page), page_size_}, media(page)}; }

// For the few tokens of a small page a call of memcmp costs more than the comparison.
bool Forest::same_tokens(const std::int32_t* a, const std::int32_t* b, std::size_t count) {
    constexpr std::size_t kSmallPage = 16;
    if (count != kSmallPage) return std::memcmp(a, b, count * sizeof *a) == 0;
    std::int32_t differ = 0;
    for (std::size_t i = 0; i < kSmallPage; ++i) differ |= a[i] ^ b[i];
    return differ == 0;
}

bool Forest::same_media(PageId page, const Content& content) const {
    const auto mine = media(page);
    return mine.size() == content.media.size() &&
           (mine.empty() || std::memcmp(mine.data(), content.media.data(), mine.size_bytes()) == 0);
}

std::uint32_t Forest::mix(PageId parent, const Content& content) {
    std::uint64_t h = content_hash(content) ^ (parent * 0x9E3779B97F4A7C15ull);
    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9ull;
    return static_cast<std::uint32_t>(h >> 32);
}

PageId Forest::search(PageId parent, const Content& content) const {
    const std::uint32_t hash = mix(parent, content);
    const std::size_t mask = table_.size() - 1;
    for (std::size_t i = hash & mask; table_[i].page != kNoPage; i = (i + 1) & mask) {
        const PageId page = table_[i].page;
        if (table_[i].hash == hash && at(page).parent == parent && same(page, content)) return page;
    }
    return kNoPage;
}

PageId Forest::insert(PageId parent, const Content& content, const Key& key) {
    const PageId page = allocate();
    std::memcpy(tokens(page), content.tokens.data(), page_size_ * sizeof(std::int32_t));
    if (!content.media.empty()) media_[page].assign(content.media.begin(), content.media.end());
    PageRecord& record = at(page);
    PageRecord& above = at(parent);
    record.key = key;
    record.parent = parent;
    record.root = above.root;
    record.depth = above.depth + 1;
    record.hash = mix(parent, content);
    above.children++;
    if (above.first_child == kNoPage) above.first_child = page;
    ++live_;
    table_insert(page);
    return page;
}

void Forest::erase(PageId page) {
    PageRecord& record = at(page);
    if (record.is_root()) {
        auto found = roots_.find(record.key.prefix());
        std::erase(found->second, page);
        if (found->second.empty()) roots_.erase(found);
    } else {
        table_erase(page);
        PageRecord& above = at(record.parent);
        above.children--;
        if (above.first_child == page) above.first_child = kNoPage;
        if (!media_.empty()) media_.erase(page);
        --live_;
    }
    record.alive = false;
    free_.push_back(page);
}

void Forest::table_insert(PageId page) {
    if (live_ * 2 > table_.size()) table_grow();
    table_put({page, at(page).hash});
}

void Forest::table_put(Place place) {
    const std::size_t mask = table_.size() - 1;
    std::size_t i = place.hash & mask;
    while (table_[i].page != kNoPage) i = (i + 1) & mask;
    table_[i] = place;
}

void Forest::table_grow() {
    const std::vector<Place> before = std::exchange(table_, std::vector<Place>(table_.size() * 2));
    for (const Place& place : before)
        if (place.page != kNoPage) table_put(place);
}

// Closes the gap by moving later members of the probe sequence back, so that no tombstones are needed.
void Forest::table_erase(PageId page) {
    const std::size_t mask = table_.size() - 1;
    std::size_t gap = at(page).hash & mask;
    while (table_[gap].page != page) gap = (gap + 1) & mask;
    for (std::size_t i = (gap + 1) & mask; table_[i].page != kNoPage; i = (i + 1) & mask) {
        const std::size_t home = table_[i].hash & mask;
        if (((i - home) & mask) >= ((i - gap) & mask)) {
            table_[gap] = table_[i];
            gap = i;
        }
    }
    table_[gap].page = kNoPage;
}

bool Forest::check_integrity(std::string& fault) const {
    std::vector<std::uint32_t> children(next_, 0);
    std::vector<std::array<std::uint32_t, 2>> in_tier(next_, {0, 0});
    std::size_t live = 0;
    for (PageId page = 0; page < next_; ++page) {
        const PageRecord& record = at(page);
        if (!record.alive || record.is_root()) continue;
        ++live;
        if (!at(record.parent).alive) return fault = "page " + std::to_string(page) + " has a dead parent", false;
        if (record.root != at(record.parent).root) return fault = "page " + std::to_string(page) + ": wrong root", false;
        if (record.depth != at(record.parent).depth + 1) return fault = "page " + std::to_string(page) + ": wrong depth", false;
        if (child(record.parent, content(page)) != page) return fault = "page " + std::to_string(page) + " cannot be found", false;
        children[record.parent]++;
        for (int tier = 0; tier < 2; ++tier) in_tier[record.parent][tier] += record.state[tier] != Residency::none;
    }
    if (live != live_)
        return fault = "the forest counts " + std::to_string(live_) + " pages and has " + std::to_string(live), false;
    for (PageId page = 0; page < next_; ++page) {
        const PageRecord& record = at(page);
        if (!record.alive) continue;
        if (record.children != children[page]) return fault = "page " + std::to_string(page) + ": wrong child count", false;
        for (int tier = 0; tier < 2; ++tier)
            if (record.tier_children[tier] != in_tier[page][tier])
                return fault = "page " + std::to_string(page) + ": wrong count of children in tier " + std::to_string(tier), false;
    }
    return true;
}

}  // namespace kvstrata
