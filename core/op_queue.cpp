#include "op_queue.hpp"

#include <algorithm>

namespace kvstrata {

std::vector<Op> OpQueue::take(std::size_t most) {
    const Op& first = ops_.front();
    std::vector<std::size_t> near;  // positions, of one operation per slot
    if (most > 1 && (first.kind == OpKind::read || first.kind == OpKind::write)) {
        const std::uint64_t least = first.slot.slot - std::min<std::uint64_t>(first.slot.slot, most - 1);
        for (std::size_t i = 0; i < ops_.size(); ++i) {
            const Op& op = ops_[i];
            if (op.kind == first.kind && op.slot.segment == first.slot.segment && op.slot.slot >= least &&
                op.slot.slot < first.slot.slot + most)
                near.push_back(i);
        }
        const auto slot = [&](std::size_t i) { return ops_[i].slot.slot; };
        std::ranges::stable_sort(near, {}, slot);  // of equal slots the one that waited longest
        near.erase(std::unique(near.begin(), near.end(), [&](std::size_t a, std::size_t b) { return slot(a) == slot(b); }),
                   near.end());
        // The stretch without gaps around the first, upwards first: prefixes are read from their beginning.
        auto begin = std::ranges::find(near, std::size_t{0});
        auto end = begin + 1;
        while (end != near.end() && std::size_t(end - begin) < most && slot(*end) == slot(*(end - 1)) + 1) ++end;
        while (begin != near.begin() && std::size_t(end - begin) < most && slot(*(begin - 1)) + 1 == slot(*begin)) --begin;
        near = {begin, end};
    } else {
        near = {0};
    }
    std::vector<Op> taken;
    taken.reserve(near.size());
    for (const std::size_t i : near) taken.push_back(ops_[i]);
    std::ranges::sort(near);
    std::size_t next = 0, kept = near.front();
    for (std::size_t i = kept; i < ops_.size(); ++i) {
        if (next < near.size() && near[next] == i)
            ++next;
        else
            ops_[kept++] = ops_[i];
    }
    ops_.erase(ops_.begin() + std::ptrdiff_t(kept), ops_.end());
    return taken;
}

}  // namespace kvstrata
