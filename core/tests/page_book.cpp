#include "page_book.hpp"

#include <algorithm>

namespace kvstrata::testing {

void PageBook::note(const PageName& name) {
    const auto [chain, fresh_chain] = keys_.try_emplace(name.chain, name.key);
    require(chain->second == name.key, "one page has two keys");
    const auto [page, fresh] = pages_.try_emplace(name.key.prefix());
    require(fresh || page->second.name.chain == name.chain, "two different pages have one key");
    if (!fresh) return;
    page->second.name = name;
    page->second.bytes = row_of(name.chain, row_bytes_);
}

PageFacts& PageBook::at(const Key& key) {
    const auto found = pages_.find(key.prefix());
    require(found != pages_.end() && found->second.name.key == key, "a page that nobody ever asked for");
    return found->second;
}

const PageFacts& PageBook::at(const Key& key) const { return const_cast<PageBook*>(this)->at(key); }

Expectation PageBook::lookup(const Prompt& prompt, std::uint32_t limit, double now) const {
    Expectation expected;
    bool sure = true;
    for (std::uint32_t i = 0; i < std::min<std::size_t>(limit, prompt.pages().size()); ++i) {
        const PageFacts& page = at(prompt.pages()[i].key);
        const bool in_memory = page.in[0] || page.in[1];
        if (!in_memory && (!page.in[2] || page.unreadable_until > now)) break;
        if (!in_memory) sure = sure && hanging_reads_ == 0 && doubtful_until_ <= now;
        expected.most++;
        if (sure) expected.least++;
    }
    return expected;
}

void PageBook::await(const Key& key, double now) {
    PageFacts& page = at(key);
    if (!page.in[0] && !page.in[1]) page.awaited_since = std::min(page.awaited_since, now);
}

void PageBook::read_failed(const Key& key, double now, double retry_after) {
    PageFacts& page = at(key);
    page.trouble_at = now;
    page.unreadable_until = std::max(page.unreadable_until, now + retry_after);
}

void PageBook::read_overdue(const Key& key, double now, double retry_after) {
    PageFacts& page = at(key);
    page.trouble_at = now;
    page.unreadable_until = kNever;
    hanging_reads_++;
    doubtful_until_ = std::max(doubtful_until_, now + retry_after);
}

void PageBook::read_came_late(const Key& key, double now) {
    at(key).unreadable_until = now;
    hanging_reads_--;
}

bool PageBook::any_in(Tier tier, const Key& parent) const {
    return std::any_of(pages_.begin(), pages_.end(), [&](const auto& entry) {
        return entry.second.in[static_cast<int>(tier)] && entry.second.name.parent == parent;
    });
}

std::size_t PageBook::count(Tier tier) const {
    return static_cast<std::size_t>(
        std::count_if(pages_.begin(), pages_.end(), [&](const auto& entry) { return entry.second.in[static_cast<int>(tier)]; }));
}

void PageBook::lose_memory() {
    hanging_reads_ = 0;
    doubtful_until_ = -1e18;
    for (auto& [prefix, page] : pages_) {
        page.awaited_since = kNever;
        page.in[0] = page.in[1] = false;
        page.unreadable_until = -1e18;
    }
}

}  // namespace kvstrata::testing
