// Pages that a caller carries between his own memory and the slab, without a row of the device, in either mode. See driver.hpp.
#include <algorithm>
#include <utility>

#include "driver.hpp"
#include "keys.hpp"

namespace kvstrata {

// The next page of a prompt where slab or disk hold it, or are about to; kNoPage: they do not. Found by key it joins the forest, as in
// find_path.
PageId Driver::cold_child(const Lease& prompt, PageId above, std::uint32_t index) {
    const Content wanted = content(prompt, index);
    PageId page = ledger_.child(above, wanted);
    if (page != kNoPage) {
        const PageRecord& record = ledger_.forest().at(page);
        if (record.state[1] != Residency::none || (record.entry != kNoEntry && ledger_.readable(record.entry))) return page;
    }
    if (ledger_.index().size() == 0) return kNoPage;
    const Key key = page != kNoPage ? ledger_.forest().at(page).key : key_below(prompt, above, wanted);
    const EntryId entry = ledger_.find_entry(key);
    if (entry == kNoEntry || !ledger_.readable(entry) || ledger_.index().at(entry).page != kNoPage) return kNoPage;
    if (page == kNoPage) page = ledger_.add_page(above, wanted, key);
    ledger_.attach(page, entry);
    return page;
}

Lease Driver::prompt_of(const Key& space, std::span<const std::int32_t> tokens) {
    Lease prompt;
    prompt.root = ledger_.root(space);
    prompt.tokens.assign(tokens.begin(), tokens.end());
    return prompt;
}

RawRows Driver::put(double now, const Key& space, std::span<const std::int32_t> tokens, std::uint32_t first) {
    ledger_.set_time(now_ = now);
    const Lease prompt = prompt_of(space, tokens);
    const auto full = static_cast<std::uint32_t>(tokens.size() / config_.ledger.page_size);
    RawRows answer;
    answer.next = std::min(first, full);
    CopyMove move{.up = false, .guest = true, .pages = {}, .slab = {}, .device = {}};
    PageId above = prompt.root;
    for (std::uint32_t i = 0; cpu_tier() && i < full && move.pages.size() < config_.copy_rows; ++i) {
        PageId page = cold_child(prompt, above, i);
        const bool cold = page != kNoPage;
        if (!cold) {
            const Content brought = content(prompt, i);
            page = ledger_.child(above, brought);
            if (page == kNoPage) page = ledger_.add_page(above, brought, key_below(prompt, above, brought));
        }
        if (cold) save_again(page);
        if (!cold && i >= first) {
            // Held while a row is taken, as in save(). The row must not cost the page before this one where that is not written down.
            const bool keep = above != prompt.root && ledger_.forest().at(above).entry == kNoEntry;
            ledger_.hold(Tier::cpu, page);
            if (keep) ledger_.hold(Tier::cpu, above);
            const Row row = may_dirty(move.pages.size()) ? ledger_.take_row(Tier::cpu) : kNoRow;
            if (row != kNoRow) ledger_.expect(Tier::cpu, page, row);
            if (keep) ledger_.unhold(Tier::cpu, above);
            ledger_.unhold(Tier::cpu, page);
            if (row == kNoRow) break;
            move.pages.push_back(page);
            move.slab.push_back(row);
            answer.pages.push_back(static_cast<Row>(i));
            answer.rows.push_back(row);
        }
        above = page;
        answer.next = std::max(answer.next, i + 1);
    }
    ledger_.retire(above);
    if (move.pages.empty()) return answer;
    answer.ticket = next_id_++;
    move.deadline = now_ + config_.copy_deadline;
    saving_ += static_cast<std::uint32_t>(move.pages.size());
    copies_.emplace(answer.ticket, std::move(move));
    return answer;
}

bool Driver::room_to_put() const {
    return may_dirty(0) && (ledger_.free_rows(Tier::cpu) > 0 || (!writes_paused() && ledger_.candidates(Tier::cpu) > 0));
}

std::uint32_t Driver::cold_pages(double now, const Key& space, std::span<const std::int32_t> tokens) {
    ledger_.set_time(now_ = now);
    const Lease prompt = prompt_of(space, tokens);
    const auto full = static_cast<std::uint32_t>(tokens.size() / config_.ledger.page_size);
    PageId above = prompt.root;
    std::uint32_t pages = 0;
    for (; pages < full; ++pages) {
        const PageId page = cold_child(prompt, above, pages);
        if (page == kNoPage) break;
        above = page;
    }
    ledger_.retire(above);
    return pages;
}

std::uint64_t Driver::fetch(double now, const Key& space, std::span<const std::int32_t> tokens, std::uint32_t first,
                            std::uint32_t most) {
    ledger_.set_time(now_ = now);
    const Lease prompt = prompt_of(space, tokens);
    const std::uint64_t full = std::min<std::uint64_t>(tokens.size() / config_.ledger.page_size, std::uint64_t{first} + most);
    std::vector<PageId> pages;
    PageId above = prompt.root;
    for (std::uint32_t i = 0; cpu_tier() && i < full; ++i) {
        const PageId page = cold_child(prompt, above, i);
        if (page == kNoPage) break;
        if (i >= first) pages.push_back(page);
        above = page;
    }
    if (pages.empty()) {
        ledger_.retire(above);
        return 0;
    }
    ledger_.used(above);
    for (const PageId page : pages) {
        ledger_.hold(Tier::cpu, page);  // from before it is there: it stays once it is
        readers_[page]++;
        const PageRecord& record = ledger_.forest().at(page);
        if (record.entry != kNoEntry) note_use_of(record.entry);
        if (record.state[1] == Residency::none && !record.load_queued) queue_load(page);
    }
    const std::uint64_t id = next_id_++;
    fetches_.emplace(id, std::move(pages));
    return id;
}

bool Driver::fetched(std::uint64_t id) const {
    const auto found = fetches_.find(id);
    return found == fetches_.end() || std::ranges::none_of(found->second, [this](PageId page) {
               const PageRecord& record = ledger_.forest().at(page);
               return record.load_queued || record.state[1] == Residency::incoming;
           });
}

std::vector<Row> Driver::fetched_rows(std::uint64_t id) const {
    std::vector<Row> rows;
    const auto found = fetches_.find(id);
    if (found == fetches_.end()) return rows;
    for (const PageId page : found->second) {
        const PageRecord& record = ledger_.forest().at(page);
        if (record.state[1] != Residency::resident) break;
        rows.push_back(record.row[1]);
    }
    return rows;
}

void Driver::end_fetch(double now, std::uint64_t id) {
    ledger_.set_time(now_ = now);
    const auto found = fetches_.find(id);
    if (found == fetches_.end()) return;
    const std::vector<PageId> pages = std::move(found->second);
    fetches_.erase(found);
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
        if (--readers_[*page] == 0) readers_.erase(*page);
        ledger_.unhold(Tier::cpu, *page);
    }
}

}  // namespace kvstrata
