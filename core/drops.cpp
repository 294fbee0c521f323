// The driver's part of a purge: what is named leaves memory, and slots are kept still while they are overwritten.
#include <algorithm>

#include "driver.hpp"

namespace kvstrata {
namespace {

// Which pages an order names. A page is asked after its parent, each once: so a prefix names all that continues it.
class Named {
   public:
    Named(const Forest& forest, const PurgeOrder& order) : forest_(forest), order_(order), verdicts_(forest.id_bound()) {}

    bool operator()(PageId page) {
        std::vector<PageId> way;
        for (; verdicts_[page] == Verdict::unknown && !forest_.at(page).is_root(); page = forest_.at(page).parent)
            way.push_back(page);
        if (verdicts_[page] == Verdict::unknown) verdicts_[page] = root(forest_.at(page).key) ? Verdict::yes : Verdict::no;
        bool named = verdicts_[page] == Verdict::yes;
        for (; !way.empty(); way.pop_back()) {
            named = named || (order_.kind == PurgeOrder::Kind::prefix && order_.keys.contains(forest_.at(way.back()).key));
            verdicts_[way.back()] = named ? Verdict::yes : Verdict::no;
        }
        return named;
    }

   private:
    enum class Verdict : std::uint8_t { unknown, yes, no };

    bool root(const Key& space) const {
        return order_.kind == PurgeOrder::Kind::all || (order_.kind == PurgeOrder::Kind::spaces && order_.keys.contains(space));
    }

    const Forest& forest_;
    const PurgeOrder& order_;
    std::vector<Verdict> verdicts_;
};

}  // namespace

MemoryDrops Driver::drop_pages(double now, const PurgeOrder& order) {
    ledger_.set_time(now_ = now);
    MemoryDrops drops;
    if (order.kind == PurgeOrder::Kind::unused || order.kind == PurgeOrder::Kind::to_size) return drops;
    const Forest& forest = ledger_.forest();
    Named named(forest, order);
    std::vector<PageId> pages;
    for (PageId page = 0; page < forest.id_bound(); ++page) {
        if (forest.at(page).alive && !forest.at(page).is_root() && named(page)) pages.push_back(page);
    }
    // The deepest first: a page that has none below it in its tier may go.
    std::ranges::stable_sort(pages, std::greater{}, [&](PageId page) { return forest.at(page).depth; });
    for (PageId page : pages) {
        for (const Tier tier : {Tier::gpu, Tier::cpu}) {
            const auto at = static_cast<std::size_t>(tier);
            // Dropped in the tier before, the record may be gone.
            if (!forest.at(page).alive || forest.at(page).state[at] == Residency::none) continue;
            if (forest.at(page).candidate[at]) {
                ledger_.drop(tier, page);
                (tier == Tier::gpu ? drops.gpu : drops.cpu)++;
            } else {
                drops.in_use++;
            }
        }
    }
    return drops;
}

bool Driver::claim_slot(double now, SlotRef slot, const Key* page) {
    ledger_.set_time(now_ = now);
    const EntryId id = ledger_.entry_at(slot);
    if (id == kNoEntry) return ledger_.take_this_slot(slot);
    const Entry& entry = ledger_.index().at(id);
    if (!page || entry.key != *page || entry.writing || entry.busy > 0 || entry.foreign) return false;
    ledger_.forget(id, EventKind::removed);
    return true;
}

}  // namespace kvstrata
