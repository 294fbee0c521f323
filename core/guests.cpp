// Guest mode: copies between pages of a lease and device blocks that the engine owns. See driver.hpp.
#include <algorithm>
#include <utility>

#include "driver.hpp"
#include "keys.hpp"

namespace kvstrata {

std::uint64_t Driver::load(double now, LeaseId id, std::uint32_t first_page, std::span<const Row> blocks) {
    ledger_.set_time(now_ = now);
    const auto found = leases_.find(id);
    if (found == leases_.end() || own_mode() || !found->second.settled) return 0;
    Lease& lease = found->second;
    CopyMove move{.guest = true, .pages = {}, .slab = {}, .device = {}};
    for (std::uint32_t i = 0; i < blocks.size() && first_page + i < lease.hit; ++i) {
        const PageId page = lease.path[first_page + i];
        ledger_.hold(Tier::cpu, page);
        move.pages.push_back(page);
        move.slab.push_back(ledger_.forest().at(page).row[1]);
        move.device.push_back(blocks[i]);
    }
    if (move.pages.empty()) return 0;
    if (!std::exchange(lease.used, true)) tally(lease, counters_.used);
    return start_copy(std::move(move), released_);
}

std::uint64_t Driver::save(double now, LeaseId id, std::uint32_t first_page, std::span<const Row> blocks, Fence ready) {
    ledger_.set_time(now_ = now);
    const auto found = leases_.find(id);
    if (found == leases_.end() || own_mode() || !found->second.write) return 0;
    Lease& lease = found->second;
    // Pages beyond the slab's size could never be there together with those before them: see lease().
    const std::uint64_t full = std::min<std::uint64_t>(lease.tokens.size() / config_.ledger.page_size, ledger_.capacity(Tier::cpu));
    CopyMove move{.up = false, .guest = true, .pages = {}, .slab = {}, .device = {}};
    PageId above = lease.root;
    for (std::uint32_t i = 0; i < std::min<std::uint64_t>(full, first_page + blocks.size()); ++i) {
        const Content written = content(lease, i);
        PageId page = ledger_.child(above, written);
        if (page == kNoPage) page = ledger_.add_page(above, written, key_below(lease, above, written));
        above = page;
        if (i < first_page || ledger_.forest().at(page).state[1] != Residency::none) continue;
        // Held while a row is taken: eviction below it must not retire its record.
        ledger_.hold(Tier::cpu, page);
        const Row row = may_dirty(move.pages.size()) ? ledger_.take_row(Tier::cpu) : kNoRow;
        if (row != kNoRow) ledger_.expect(Tier::cpu, page, row);
        ledger_.unhold(Tier::cpu, page);
        if (row == kNoRow) {
            counters_.saves_dropped += first_page + blocks.size() - i;
            break;
        }
        move.pages.push_back(page);
        move.slab.push_back(row);
        move.device.push_back(blocks[i - first_page]);
    }
    ledger_.retire(above);
    if (move.pages.empty()) return 0;
    return start_copy(std::move(move), ready);
}

}  // namespace kvstrata
