#include "sim_io.hpp"

#include <algorithm>
#include <cerrno>

#include "../keys.hpp"
#include "../slot.hpp"

namespace kvstrata::testing {
namespace {

constexpr double kOpTime = 0.01;  // seconds, at most

}  // namespace

SimIo::SimIo(Agenda& agenda, Dice& dice, PageBook& book, const Slab* slab, std::size_t row_bytes, double read_deadline,
             const IoTroubles& troubles, Deliver deliver)
    : agenda_(agenda),
      dice_(dice),
      book_(book),
      slab_(slab),
      row_bytes_(row_bytes),
      read_deadline_(read_deadline),
      troubles_(troubles),
      deliver_(std::move(deliver)) {}

void SimIo::submit(std::vector<Op>&& ops) {
    for (const Op& op : ops) {
        Running& running = running_[op.id];
        running.op = op;
        if (op.kind == OpKind::read) {
            running.deadline = agenda_.now() + read_deadline_;
            scribble(op);  // the row is the read's from now on
        }
        running.hangs = dice_.chance(troubles_.hang);
        if (running.hangs) continue;
        const double delay = dice_.chance(troubles_.late) ? dice_.real(1, 3) * read_deadline_ : dice_.real(0, kOpTime);
        agenda_.after(delay, [this, id = op.id] { perform(id); });
    }
}

void SimIo::perform(std::uint64_t id) {
    Running& running = running_.at(id);
    running.happened = true;
    const Completion done = execute(running.op);
    agenda_.after(dice_.real(0, kOpTime / 4), [this, id, done] {
        const auto over = running_.extract(id);
        if (over.mapped().overdue) book_.read_came_late(over.mapped().op.page.key, agenda_.now());
        deliver_(over.mapped().op, done);
        if (dice_.chance(troubles_.repeat)) deliver_(Op{.id = id, .kind = OpKind::clear, .slot = {}, .page = {}}, done);
    });
}

Completion SimIo::execute(const Op& op) {
    std::byte* const row = op.row == kNoRow ? nullptr : slab_->row(op.row);
    if (op.kind == OpKind::read || op.kind == OpKind::write) check_source(op);
    if (op.kind == OpKind::write) book_.at(op.page.key).tried = true;
    medium_->set_faults({.chance = troubles_.medium, .error = dice_.chance(0.5) ? EIO : ENOSPC, .shorten = dice_.chance(0.3)});
    Completion done = shelf_->execute(op, row);
    medium_->set_faults({});
    if (op.kind == OpKind::write && done.status == OpStatus::ok) prove_write(op);
    if (op.kind != OpKind::read) return done;
    if (dice_.chance(troubles_.odd)) done.status = dice_.chance(0.5) ? OpStatus::stale : OpStatus::conflict;
    const PageFacts& page = book_.at(op.page.key);
    if (done.status == OpStatus::ok)
        require(std::memcmp(row, page.bytes.data(), row_bytes_) == 0, "the shelf served wrong bytes");
    else
        scribble(op);
    return done;
}

// What an operation borrows must be there until it completes: the page's content, and the row that it writes.
void SimIo::check_source(const Op& op) const {
    require(page_key(op.page.space, op.page.parent, op.page.content) == op.page.key, "an operation's page changed under it");
    if (op.kind == OpKind::write)
        require(std::memcmp(slab_->row(op.row), book_.at(op.page.key).bytes.data(), row_bytes_) == 0,
                "a row changed before it was written to disk");
}

void SimIo::prove_write(const Op& op) {
    AlignedBuffer row(slab_->row_stride());
    Op read = op;
    read.kind = OpKind::read;
    PageFacts& page = book_.at(op.page.key);
    require(shelf_->execute(read, row.data()).status == OpStatus::ok, "a page cannot be read back right after it was written");
    require(std::memcmp(row.data(), page.bytes.data(), row_bytes_) == 0, "other bytes were written to disk");
    page.written = true;
}

void SimIo::scribble(const Op& op) const { std::memset(slab_->row(op.row), 0x5A, row_bytes_); }

void SimIo::find_overdue(const std::function<void(const Key& page)>& late) {
    for (auto& [id, running] : running_)
        if (running.op.kind == OpKind::read && !running.overdue && running.deadline <= agenda_.now()) {
            running.overdue = true;
            late(running.op.page.key);
        }
}

bool SimIo::reading(const Key& page) const {
    return std::any_of(running_.begin(), running_.end(),
                       [&](const auto& entry) { return entry.second.op.kind == OpKind::read && entry.second.op.page.key == page; });
}

std::size_t SimIo::clearing(const std::function<bool(SlotRef)>& which) const {
    return static_cast<std::size_t>(std::count_if(running_.begin(), running_.end(), [&](const auto& entry) {
        return entry.second.op.kind == OpKind::clear && which(entry.second.op.slot);
    }));
}

double SimIo::next_deadline() const {
    double next = kNever;
    for (const auto& [id, running] : running_)
        if (running.op.kind == OpKind::read && !running.overdue) next = std::min(next, running.deadline);
    return next;
}

void SimIo::drain() {
    troubles_ = {};
    for (auto& [id, running] : running_)
        if (running.hangs && !running.happened) perform(id);
}

void SimIo::tear_one() {
    for (auto& [id, running] : running_) {
        if (running.happened || running.op.kind == OpKind::read || !dice_.chance(0.5)) continue;
        if (running.op.kind == OpKind::write) book_.at(running.op.page.key).tried = true;
        medium_->set_faults({.fail_at = dice_.between(1, 6), .and_after = true});
        shelf_->execute(running.op, running.op.row == kNoRow ? nullptr : slab_->row(running.op.row));
        medium_->set_faults({});
        return;
    }
}

}  // namespace kvstrata::testing
