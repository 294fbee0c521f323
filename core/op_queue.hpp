// Operations that wait for a thread, in order, and the adjacent ones among them that can share a request.
#pragma once

#include <deque>
#include <vector>

#include "io.hpp"

namespace kvstrata {

class OpQueue {
   public:
    void push(Op&& op) { ops_.push_back(std::move(op)); }
    bool empty() const { return ops_.empty(); }
    std::size_t size() const { return ops_.size(); }
    // The first operation, and of those behind it the reads (writes) of slots that adjoin its own: `most` at most, by rising slot.
    std::vector<Op> take(std::size_t most);

   private:
    std::deque<Op> ops_;
};

}  // namespace kvstrata
