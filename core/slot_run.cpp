#include "slot_run.hpp"

#include <cerrno>

namespace kvstrata {
namespace {

bool no_room(int error) { return error == -ENOSPC || error == -EDQUOT || error == -EFBIG; }

Completion answer(const Op& op, OpStatus status, int error = 0) {
    Completion completion;
    completion.id = op.id;
    completion.status = status;
    completion.error = error;
    return completion;
}

OpStatus failure(bool write, std::int64_t error) {
    if (!write) return OpStatus::unreadable;
    return no_room(int(error)) ? OpStatus::full : OpStatus::failed;
}

}  // namespace

std::int64_t Transfer::run() const {
    return write ? file->disk().pwritev(file->handle(), parts, offset) : file->disk().preadv(file->handle(), parts, offset);
}

SlotRun::SlotRun(std::shared_ptr<Segment> segment, std::span<const Plane> planes, std::vector<Op> ops, std::vector<std::byte*> rows)
    : segment_(std::move(segment)),
      planes_(planes),
      ops_(std::move(ops)),
      rows_(std::move(rows)),
      headers_(ops_.size() * segment_->shape().header_bytes) {
    transfer_.write = ops_.front().kind == OpKind::write;
    transfer_.offset = segment_->slot_offset(ops_.front().slot.slot);
    transfer_.bytes = ops_.size() * segment_->shape().slot_bytes();
}

int SlotRun::prepare() {
    if (!headers_.data()) return -ENOMEM;
    const Shape& shape = segment_->shape();
    int result = 0;
    transfer_.parts.reserve(2 * ops_.size());
    for (std::size_t i = 0; i < ops_.size(); ++i) {
        transfer_.parts.push_back({header(i), shape.header_bytes});
        transfer_.parts.push_back({rows_[i], shape.row_stride});
        if (transfer_.write && (result = encode_header(header(i), shape, planes_, ops_[i].page, rows_[i])) != 0) return result;
    }
    // Free records, write slots, set records: at no moment does a record name a page whose bytes are not all there.
    if (transfer_.write) result = segment_->free_records(ops_.front().slot.slot, ops_.size());
    if (result == 0) transfer_.file = segment_->open_slots(result);
    return result;
}

std::vector<Completion> SlotRun::run() {
    const int result = prepare();
    return finish(result == 0 ? transfer_.run() : result);
}

std::vector<Completion> SlotRun::finish(std::int64_t moved, bool again) {
    if (transfer_.file) {
        ++requests_;
        bytes_ += std::uint64_t(std::max<std::int64_t>(moved, 0));
    }
    const bool whole = moved == std::int64_t(transfer_.bytes);
    if (!whole && (again || ops_.size() > 1)) return one_by_one();
    std::vector<Completion> done;
    if (!transfer_.write) {
        for (std::size_t i = 0; i < ops_.size(); ++i) done.push_back(prove(i, moved));
        return done;
    }
    int result = whole ? segment_->set_records(ops_.front().slot.slot, ops_) : moved < 0 ? int(moved) : -EIO;
    if (result != 0 && ops_.size() > 1) return one_by_one();
    for (const Op& op : ops_) done.push_back(answer(op, result == 0 ? OpStatus::ok : failure(true, result), -result));
    return done;
}

Completion SlotRun::prove(std::size_t index, std::int64_t moved) const {
    const Op& op = ops_[index];
    const Shape& shape = segment_->shape();
    if (moved < 0) return answer(op, OpStatus::unreadable, int(-moved));
    // The file may end inside the last row's padding, not before.
    if (std::uint64_t(moved) < index * shape.slot_bytes() + shape.header_bytes + shape.row_bytes)
        return answer(op, OpStatus::corrupt);
    const OpStatus status = prove_slot(header(index), shape, planes_, op.page, rows_[index]);
    if (status == OpStatus::ok) segment_->used_at(op.page.last_use);
    return answer(op, status);
}

std::vector<Completion> SlotRun::one_by_one() {
    std::vector<Completion> done;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
        SlotRun one(segment_, planes_, {ops_[i]}, {rows_[i]});
        std::vector<Completion> its = one.run();
        done.push_back(std::move(its.front()));
        requests_ += one.requests_;
        bytes_ += one.bytes_;
    }
    return done;
}

}  // namespace kvstrata
