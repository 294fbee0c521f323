// What happened to pages, for logs, tests and routers: a bounded ring; what nobody fetched in time is counted and lost.
#pragma once

#include <cstdint>
#include <vector>

#include "types.hpp"

namespace kvstrata {

enum class EventKind : std::uint8_t {
    stored,   // the page became findable in `tier`; its bytes came from `source` (the tier itself: computed there)
    removed,  // it is no longer findable in `tier`
    damaged,  // its copy in `tier` was found corrupt and dropped
};

struct Event {
    std::uint64_t sequence = 0;
    double time = 0;
    EventKind kind = EventKind::stored;
    Tier tier = Tier::gpu;
    Tier source = Tier::gpu;
    std::uint32_t depth = 0;  // pages from the start of the prompt, this one included; 0: not known (a page of an earlier run)
    Key key;
};

class EventRing {
   public:
    explicit EventRing(std::size_t capacity) : capacity_(capacity) {}

    void add(Event event) {
        if (capacity_ == 0) return;
        event.sequence = next_++;
        if (ring_.size() < capacity_)
            ring_.push_back(event);
        else
            ring_[event.sequence % capacity_] = event;
    }
    // Everything since the last call, oldest first; `lost` grows by what was overwritten unseen.
    std::vector<Event> drain(std::uint64_t& lost) {
        const std::uint64_t oldest = next_ - ring_.size();
        if (seen_ < oldest) {
            lost += oldest - seen_;
            seen_ = oldest;
        }
        std::vector<Event> out;
        out.reserve(next_ - seen_);
        for (; seen_ < next_; ++seen_) out.push_back(ring_[seen_ % capacity_]);
        return out;
    }

   private:
    std::size_t capacity_;
    std::vector<Event> ring_;
    std::uint64_t next_ = 0;
    std::uint64_t seen_ = 0;
};

}  // namespace kvstrata
