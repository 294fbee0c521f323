// What an eviction policy is told and asked. The ledger decides what may go; a policy only orders those candidates.
//
// Ids are forest pages in the tiers gpu and cpu, key index entries in the tier disk. Every call is constant or logarithmic in the
// number of candidates. No I/O, no clock: times are seconds as the caller gives them.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "types.hpp"

namespace kvstrata {

inline constexpr std::uint32_t kNobody = ~std::uint32_t{0};

class Policy {
   public:
    virtual ~Policy() = default;

    // `id` was used as the deepest of a chain: its ancestors count as used with it.
    virtual void used(Tier tier, std::uint32_t id, double now) = 0;
    // `id` came into or left the tier; `parent` is its parent there, or kNobody.
    virtual void inserted(Tier tier, std::uint32_t id, std::uint32_t parent, double now) = 0;
    virtual void removed(Tier tier, std::uint32_t id, std::uint32_t parent) = 0;
    // From now on `id` may be evicted from the tier; from now on it may not. Alternating for each id and tier.
    virtual void enter(Tier tier, std::uint32_t id) = 0;
    virtual void leave(Tier tier, std::uint32_t id) = 0;
    // The candidate to evict next, or kNobody when there is none.
    virtual std::uint32_t victim(Tier tier, double now) = 0;
    virtual std::size_t candidates(Tier tier) const = 0;
};

std::unique_ptr<Policy> make_lru();

}  // namespace kvstrata
