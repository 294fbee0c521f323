// What the driver does about moves that do not end in time: see the first lines of moves.cpp.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "driver.hpp"
#include "guard.hpp"

namespace kvstrata {

void Driver::expire() {
    if (!guarded(Guard::deadline)) return;
    std::vector<PageId> failed;
    for (auto& [id, move] : disk_moves_) {
        if (move.abandoned || move.deadline > now_) continue;
        abandon(move);
        if (move.kind == OpKind::read) failed.push_back(move.page);
    }
    for (auto& [ticket, move] : copies_) {
        if (move.abandoned || move.deadline > now_) continue;
        abandon(move);
        if (move.up && !move.guest) failed.insert(failed.end(), move.pages.begin(), move.pages.end());
    }
    for (PageId page : failed) fail_page(page);
}

void Driver::abandon(DiskMove& move) {
    constexpr double kNever = std::numeric_limits<double>::infinity();
    move.abandoned = true;
    counters_.timeouts++;
    switch (move.kind) {
        case OpKind::read:
            ledger_.hold(Tier::cpu, move.page);  // the record's tokens are borrowed by the operation
            ledger_.withdraw(Tier::cpu, move.page);
            save_instead(move.page);
            ledger_.back_off(move.entry, kNever);  // while it hangs, a second read would only hang too
            if (++stuck_reads_ == config_.reads_at_once)
                ledger_.pause_disk_reads(kNever);
            else if (++timeouts_in_a_row_ >= 3)
                ledger_.pause_disk_reads(now_ + config_.retry_after);
            return health_.ill(DiskHealth::Side::reads, DiskHealth::Trouble::stalled, 0, now_);
        case OpKind::write:
            stuck_writes_++;
            dirty_--;  // the row is lost for now, but what it waits for no longer keeps others from being saved
            return pause_writes(DiskHealth::Trouble::stalled, 0);
        case OpKind::clear:
            return;
        case OpKind::grow:
            growing_ = false;
            grow_again_at_ = kNever;  // until it comes back
    }
}

void Driver::abandon(CopyMove& move) {
    move.abandoned = true;
    counters_.timeouts++;
    if (!move.up) saving_ -= static_cast<std::uint32_t>(move.pages.size());
    if (move.up && move.guest) return;
    for (PageId page : move.pages) {
        if (move.up) uploading_.erase(page);
        ledger_.withdraw(move.up ? Tier::gpu : Tier::cpu, page);
        if (!move.up) want(page);
        if (!move.up && move.guest) ledger_.retire(page);
    }
}

double Driver::next_deadline() const {
    double next = std::numeric_limits<double>::infinity();
    if (no_row_to_load_) next = loads_.front().since + config_.read_deadline;
    for (const auto& [id, move] : disk_moves_)
        if (!move.abandoned) next = std::min(next, move.deadline);
    for (const auto& [ticket, move] : copies_)
        if (!move.abandoned) next = std::min(next, move.deadline);
    return next;
}

bool Driver::idle() const {
    const auto pending = [](const auto& item) { return !item.second.abandoned; };
    return loads_.empty() && ups_.empty() && downs_.empty() && spills_.empty() && out_.ops.empty() && out_.copies.empty() &&
           std::none_of(disk_moves_.begin(), disk_moves_.end(), pending) && std::none_of(copies_.begin(), copies_.end(), pending);
}

}  // namespace kvstrata
