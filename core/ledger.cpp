#include "ledger.hpp"

#include <algorithm>
#include <utility>

#include "guard.hpp"

namespace kvstrata {

Ledger::Ledger(const LedgerConfig& config, std::unique_ptr<Policy> policy)
    : forest_(config.page_size),
      policy_(std::move(policy)),
      home_(config.gpu_rows > 0 ? Tier::gpu : Tier::cpu),
      log_freed_(config.log_freed),
      events_(config.event_capacity) {
    const std::array<std::pair<std::uint32_t, Row>, 2> sizes{{{config.gpu_rows, config.first_gpu_row}, {config.cpu_rows, 0}}};
    for (std::size_t tier = 0; tier < 2; ++tier) {
        Rows& rows = rows_[tier];
        rows.total = sizes[tier].first;
        rows.first = sizes[tier].second;
        for (std::uint32_t i = rows.total; i-- > 0;) rows.free.push_back(rows.first + static_cast<Row>(i));
    }
}

bool Ledger::findable(PageId page) const {
    const PageRecord& record = forest_.at(page);
    if (record.state[0] == Residency::resident || record.state[1] == Residency::resident) return true;
    return record.entry != kNoEntry && readable(record.entry);
}

void Ledger::retire(PageId page) {
    while (page != kNoPage) {
        const PageRecord& record = forest_.at(page);
        const bool needed = record.children > 0 || record.pins > 0 || record.entry != kNoEntry || record.load_queued ||
                            record.busy[0] > 0 || record.busy[1] > 0 || record.state[0] != Residency::none ||
                            record.state[1] != Residency::none;
        if (!record.alive || needed) return;
        const PageId above = record.parent;
        forest_.erase(page);
        page = above;
    }
}

void Ledger::used(Tier tier, PageId deepest) {
    if (tier == Tier::disk)
        used_again(forest_.at(deepest).entry);
    else
        policy_->used(tier, deepest, now_);
}

void Ledger::used(PageId deepest) {
    for (Tier tier : {Tier::gpu, Tier::cpu, Tier::disk}) {
        PageId page = deepest;
        while (!forest_.at(page).is_root() && !has_copy(tier, page)) page = forest_.at(page).parent;
        if (!forest_.at(page).is_root()) used(tier, page);
    }
}

void Ledger::used_again(EntryId id) {
    const EntryId ours = own_from(id);
    if (ours != kNoEntry) policy_->used(Tier::disk, ours, now_);
}

// --- rows

Row Ledger::take_row(Tier tier) {
    Rows& rows = rows_[slot(tier)];
    if (rows.free.empty()) {
        const std::uint32_t victim = policy_->victim(tier, now_);
        if (victim == kNobody) return kNoRow;
        counters_[slot(tier)].evicted++;
        leave_tier(tier, victim);
        retire(victim);
    }
    const Row row = rows.free.back();
    rows.free.pop_back();
    return row;
}

void Ledger::give_row(Tier tier, Row row) {
    rows_[slot(tier)].free.push_back(row);
    if (log_freed_ && tier == Tier::cpu) freed_.push_back(row);
}

// --- copies in a memory tier

std::uint32_t Ledger::parent_in(Tier tier, PageId page) const {
    const PageId above = forest_.at(page).parent;
    return !forest_.at(above).is_root() && forest_.at(above).state[slot(tier)] == Residency::resident ? above : kNobody;
}

void Ledger::set_state(Tier tier, PageId page, Residency state) {
    PageRecord& record = forest_.at(page);
    const bool was = record.state[slot(tier)] != Residency::none;
    const bool is = state != Residency::none;
    if (record.state[slot(tier)] == Residency::resident) rows_[slot(tier)].resident--;
    if (state == Residency::resident) rows_[slot(tier)].resident++;
    record.state[slot(tier)] = state;
    if (was != is) {
        std::uint32_t& count = forest_.at(record.parent).tier_children[slot(tier)];
        count = is ? count + 1 : count - 1;
        refresh(tier, record.parent);
    }
    refresh(tier, page);
}

void Ledger::refresh(Tier tier, PageId page) {
    PageRecord& record = forest_.at(page);
    const bool may_go = record.state[slot(tier)] == Residency::resident &&
                        (record.tier_children[slot(tier)] == 0 || !guarded(Guard::leaf_first)) &&
                        (record.busy[slot(tier)] == 0 || !guarded(Guard::copy_holds)) &&
                        (tier != home_ || record.pins == 0 || !guarded(Guard::pins));
    if (may_go == record.candidate[slot(tier)]) return;
    record.candidate[slot(tier)] = may_go;
    if (may_go)
        policy_->enter(tier, page);
    else
        policy_->leave(tier, page);
}

void Ledger::expect(Tier tier, PageId page, Row row) {
    forest_.at(page).row[slot(tier)] = row;
    set_state(tier, page, guarded(Guard::publish_after_place) ? Residency::incoming : Residency::resident);
}

void Ledger::arrive(Tier tier, PageId page, Tier source) {
    policy_->inserted(tier, page, parent_in(tier, page), now_);
    set_state(tier, page, Residency::resident);
    counters_[slot(tier)].stored++;
    note(EventKind::stored, tier, source, forest_.at(page).key, forest_.at(page).depth);
}

Row Ledger::withdraw(Tier tier, PageId page) {
    set_state(tier, page, Residency::none);
    return std::exchange(forest_.at(page).row[slot(tier)], kNoRow);
}

// The policy hears of the removal while the copy is still no candidate and the parent not yet one: stamps are handed up first.
void Ledger::leave_tier(Tier tier, PageId page) {
    PageRecord& record = forest_.at(page);
    if (record.candidate[slot(tier)]) {
        record.candidate[slot(tier)] = false;
        policy_->leave(tier, page);
    }
    policy_->removed(tier, page, parent_in(tier, page));
    note(EventKind::removed, tier, tier, record.key, record.depth);
    give_row(tier, std::exchange(record.row[slot(tier)], kNoRow));
    set_state(tier, page, Residency::none);
}

void Ledger::drop(Tier tier, PageId page) {
    counters_[slot(tier)].dropped++;
    leave_tier(tier, page);
    retire(page);
}

void Ledger::hold(Tier tier, PageId page) {
    forest_.at(page).busy[slot(tier)]++;
    refresh(tier, page);
}

void Ledger::unhold(Tier tier, PageId page) {
    forest_.at(page).busy[slot(tier)]--;
    refresh(tier, page);
    retire(page);
}

void Ledger::pin(PageId page) {
    forest_.at(page).pins++;
    refresh(home_, page);
}

void Ledger::unpin(PageId page) {
    forest_.at(page).pins--;
    refresh(home_, page);
    retire(page);
}

// --- proofs

std::uint32_t Ledger::evictable(const std::vector<PageId>& in_use, std::uint32_t enough) {
    const std::size_t home = slot(home_);
    std::uint64_t most = 0;  // that cannot leave
    for (PageId page : in_use) most += forest_.at(page).depth;
    if (most + enough <= rows_[home].resident) return enough;
    ++visit_;
    if (visited_.size() < forest_.id_bound()) visited_.resize(forest_.id_bound(), 0);
    std::uint32_t fixed = 0;
    for (PageId page : in_use)
        for (; !forest_.at(page).is_root() && visited_[page] != visit_; page = forest_.at(page).parent) {
            if (forest_.at(page).state[home] == Residency::none) break;  // nothing above is held by what is below a gap
            visited_[page] = visit_;
            fixed += forest_.at(page).state[home] == Residency::resident;
        }
    return rows_[home].resident - fixed;
}

void Ledger::note(EventKind kind, Tier tier, Tier source, const Key& key, std::uint32_t depth) {
    events_.add({.sequence = 0, .time = now_, .kind = kind, .tier = tier, .source = source, .depth = depth, .key = key});
}

bool Ledger::check_integrity(std::string& fault) const {
    if (!forest_.check_integrity(fault) || !index_.check_integrity(fault)) return false;
    for (Tier tier : {Tier::gpu, Tier::cpu}) {
        const Rows& rows = rows_[slot(tier)];
        std::vector<std::uint8_t> taken(rows.total, 0);
        const std::string where = tier == Tier::gpu ? "gpu" : "cpu";
        for (Row row : rows.free)
            if (taken.at(static_cast<std::size_t>(row - rows.first))++) return fault = where + " row is free twice", false;
        std::uint32_t resident = 0;
        for (PageId page = 0; page < forest_.id_bound(); ++page) {
            const PageRecord& record = forest_.at(page);
            if (!record.alive) continue;
            const Residency state = record.state[slot(tier)];
            if (state == Residency::none) {
                if (record.candidate[slot(tier)]) return fault = where + " candidate without a copy", false;
                continue;
            }
            resident += state == Residency::resident;
            if (state == Residency::incoming && record.row[slot(tier)] == kNoRow && record.load_queued) continue;  // no row yet
            if (taken.at(static_cast<std::size_t>(record.row[slot(tier)] - rows.first))++)
                return fault = where + " row " + std::to_string(record.row[slot(tier)]) + " has two owners", false;
            const bool may_go = state == Residency::resident && record.tier_children[slot(tier)] == 0 &&
                                record.busy[slot(tier)] == 0 && (tier != home_ || record.pins == 0);
            if (may_go != record.candidate[slot(tier)]) return fault = where + " page is wrongly (not) a candidate", false;
        }
        if (resident != rows.resident) return fault = where + " resident count is wrong", false;
    }
    std::uint32_t stored = 0, shared = 0;
    for (EntryId id = 0; id < index_.id_bound(); ++id) {
        const Entry& entry = index_.at(id);
        if (!entry.alive) continue;
        (entry.foreign ? shared : stored) += !entry.writing;
        if (entry.foreign != foreign(entry.slot.segment) && !entry.gone)
            return fault = "entry " + std::to_string(id) + " and its segment disagree about whose it is", false;
        if (entry.foreign && entry.writing) return fault = "entry " + std::to_string(id) + " is written to another's file", false;
        if (entry.candidate != (!entry.foreign && !entry.writing && entry.busy == 0 && entry.children == 0))
            return fault = "entry " + std::to_string(id) + " is wrongly (not) a candidate", false;
        if (entry.page != kNoPage && (!forest_.at(entry.page).alive || forest_.at(entry.page).entry != id))
            return fault = "entry " + std::to_string(id) + " and its page disagree", false;
        if ((entry_at(entry.slot) == id) == entry.gone)
            return fault = "entry " + std::to_string(id) + " is not where its slot is", false;
        if (lost(entry) && !entry.writing && entry.busy == 0)
            return fault = "entry " + std::to_string(id) + " is of a copy that is gone", false;
    }
    if (shared != shared_entries_) return fault = "the count of other processes' entries is wrong", false;
    for (SlotRef free : free_slots_)
        if (entry_at(free) != kNoEntry || retired(free.segment) || foreign(free.segment))
            return fault = "a slot is free and is not", false;
    if (stored != stored_entries_) return fault = "the count of stored entries is wrong", false;
    return true;
}

}  // namespace kvstrata
