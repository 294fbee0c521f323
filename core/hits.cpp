// A lease's hit on its way to be settled: pages arrive, or do not and make it shorter. See driver.hpp.
#include <algorithm>
#include <utility>

#include "driver.hpp"
#include "keys.hpp"

namespace kvstrata {

void Driver::settle(double now, LeaseId id) {
    ledger_.set_time(now_ = now);
    const auto found = leases_.find(id);
    if (found == leases_.end() || found->second.settled) return;
    Lease& lease = found->second;
    const std::size_t home = static_cast<std::size_t>(ledger_.home());
    std::uint32_t keep = 0;
    while (keep < lease.path.size() &&
           (ledger_.forest().at(lease.path[keep]).state[home] == Residency::resident || uploading_.contains(lease.path[keep])))
        ++keep;
    shorten(lease, id, keep);
}

void Driver::shorten(Lease& lease, LeaseId id, std::uint32_t pages) {
    const std::uint64_t size = config_.ledger.page_size;
    pages = static_cast<std::uint32_t>(pages * size / lease.multiple * lease.multiple / size);
    if (lease.settled || pages >= lease.path.size()) return;
    // The lease will compute these pages itself. It takes back the rows that were reserved for them and for nobody else; then the pin
    // moves, and only then other rows are taken for the rest: what the pin protected may be evicted for them.
    const std::vector<PageId> dropped(lease.path.begin() + pages, lease.path.end());
    for (std::uint32_t i = static_cast<std::uint32_t>(lease.path.size()); i-- > pages;) {
        const Row row = give_up_page(lease, id, i);
        if (!own_mode()) continue;
        lease.rows[i] = row;
        lease.own[i] = row != kNoRow;
    }
    cut_path(lease, pages);
    move_pin(lease);
    for (std::size_t i = dropped.size(); i-- > 0;) ledger_.retire(dropped[i]);
    for (std::size_t i = pages; own_mode() && i < pages + dropped.size(); ++i) {
        if (lease.own[i]) continue;
        lease.rows[i] = ledger_.take_row(Tier::gpu);
        lease.own[i] = lease.rows[i] != kNoRow;
        lease.rows_lost |= !lease.own[i];
    }
    lease.hit = pages;
    lease.missing = 0;
    for (PageId page : lease.path)
        lease.missing += ledger_.forest().at(page).state[static_cast<std::size_t>(ledger_.home())] != Residency::resident;
    check_settled(lease);
}

// The lease no longer waits for this page of its path. If nobody else does and nothing is being copied into it, the row of the device
// that was reserved for it is the caller's.
Row Driver::give_up_page(const Lease& lease, LeaseId id, std::uint32_t index) {
    const PageId page = lease.path[index];
    const auto found = waiters_.find(page);
    if (found == waiters_.end()) return kNoRow;
    std::erase(found->second, id);
    if (!found->second.empty()) return kNoRow;
    waiters_.erase(found);
    const PageRecord& record = ledger_.forest().at(page);
    if (own_mode())
        return record.state[0] == Residency::incoming && !uploading_.contains(page) ? ledger_.withdraw(Tier::gpu, page) : kNoRow;
    if (readers_.contains(page)) return kNoRow;  // it is still to be read
    if (record.load_queued && record.state[1] == Residency::incoming) ledger_.withdraw(Tier::cpu, page);
    ledger_.set_load_queued(page, false);
    return kNoRow;
}

void Driver::move_pin(Lease& lease) {
    const PageId deepest = lease.path.empty() ? lease.root : lease.path.back();
    if (deepest == lease.pinned) return;
    ledger_.pin(deepest);
    const PageId before = std::exchange(lease.pinned, deepest);
    if (before != kNoPage) ledger_.unpin(before);
}

void Driver::arrived_home(PageId page) {
    const auto found = waiters_.find(page);
    if (found == waiters_.end()) return;
    const std::vector<LeaseId> waiting = std::move(found->second);
    waiters_.erase(found);
    for (LeaseId id : waiting) {
        Lease& lease = leases_.at(id);
        lease.missing--;
        check_settled(lease);
    }
}

// The page cannot be brought: every lease that waits for it ends before it.
void Driver::fail_page(PageId page) {
    const auto found = waiters_.find(page);
    if (found != waiters_.end()) {
        const std::uint32_t index = ledger_.forest().at(page).depth - 1;
        for (LeaseId id : std::vector<LeaseId>(found->second)) shorten(leases_.at(id), id, index);
    } else if (own_mode() && ledger_.forest().at(page).state[0] == Residency::incoming && !uploading_.contains(page)) {
        ledger_.give_row(Tier::gpu, ledger_.withdraw(Tier::gpu, page));
    }
    ledger_.retire(page);
}

void Driver::check_settled(Lease& lease) {
    if (lease.settled || lease.missing > 0) return;
    lease.settled = true;
    tally(lease, counters_.loaded);
}

}  // namespace kvstrata
