// Why a prompt hits as far as it does, for people: looked at page by page, and nothing is changed by it.
#include <algorithm>

#include "driver.hpp"
#include "keys.hpp"

namespace kvstrata {
namespace {

PlaceInTier place(Residency state) {
    return state == Residency::none ? PlaceInTier::none : state == Residency::incoming ? PlaceInTier::coming : PlaceInTier::there;
}

}  // namespace

Explanation Driver::explain(double now, const Key& space, std::span<const std::int32_t> tokens, std::span<const MediaSpan> media) {
    ledger_.set_time(now_ = now);
    const Forest& forest = ledger_.forest();
    const std::size_t size = forest.page_size();
    Lease asked;  // never one of ours: only what is asked for
    asked.root = ledger_.root(space);
    asked.tokens.assign(tokens.begin(), tokens.end());
    asked.media.assign(media.begin(), media.end());
    Explanation found;
    PageId above = asked.root;  // the last page that the forest knows; kNoPage: the way goes on by keys alone
    Key key = space;
    for (std::uint32_t i = 0; (i + std::size_t{1}) * size <= tokens.size(); ++i) {
        const Content wanted = content(asked, i);
        const PageId page = above == kNoPage ? kNoPage : ledger_.child(above, wanted);
        Explanation::Page& one = found.pages.emplace_back();
        EntryId entry = kNoEntry;
        if (page != kNoPage) {
            const PageRecord& record = forest.at(page);
            one.gpu = place(record.state[0]);
            one.cpu = place(record.state[1]);
            key = record.key;
            entry = record.entry;
        } else {
            key = page_key(space, key, wanted);
            std::fill(key.bytes.begin() + static_cast<std::ptrdiff_t>(config_.key_bytes), key.bytes.end(), std::uint8_t{0});
        }
        if (entry == kNoEntry) entry = ledger_.find_entry(key);
        if (entry != kNoEntry) {
            const Entry& copy = ledger_.index().at(entry);
            one.disk = copy.writing ? PlaceInTier::coming : ledger_.readable(entry) ? PlaceInTier::there : PlaceInTier::left_alone;
        }
        if (one.nowhere()) {
            found.pages.pop_back();
            break;
        }
        above = page;
    }
    find_closest(above, tokens.subspan(std::min(found.pages.size() * size, tokens.size())), found);
    ledger_.retire(asked.root);
    return found;
}

// Of the pages right below the last one that is known: the one whose tokens agree longest with what comes next.
void Driver::find_closest(PageId above, std::span<const std::int32_t> rest, Explanation& found) const {
    if (above == kNoPage) return;
    const Forest& forest = ledger_.forest();
    for (PageId page = 0; page < forest.id_bound(); ++page) {
        if (!forest.at(page).alive || forest.at(page).is_root() || forest.at(page).parent != above) continue;
        const std::span<const std::int32_t> theirs = forest.content(page).tokens;
        const auto same = std::mismatch(rest.begin(), rest.end(), theirs.begin(), theirs.end()).first - rest.begin();
        if (found.closest.empty() || same > found.same) {
            found.same = static_cast<std::uint32_t>(same);
            found.closest.assign(theirs.begin(), theirs.end());
        }
    }
}

}  // namespace kvstrata
