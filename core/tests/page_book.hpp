// The oracle: what a correct cache holds and must find, kept by watching. It learns from the driver's events, each of which is checked
// against the bytes, and from the simulation, which knows what it broke.
#pragma once

#include <limits>
#include <unordered_map>
#include <vector>

#include "prompt.hpp"

namespace kvstrata::testing {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

struct PageFacts {
    PageName name;
    std::vector<std::byte> bytes;
    bool in[kTiers] = {};
    bool written = false;       // a write of it reached the medium and was proven by reading it back
    bool tried = false;         // a write of it was begun
    double trouble_at = -1e18;  // when something that should have brought it failed, or its copy on disk went
    double unreadable_until = -1e18;
    double awaited_since = kNever;  // somebody has waited for it to come from disk
};

struct Expectation {  // of a lookup, in pages
    std::uint32_t least = 0;
    std::uint32_t most = 0;
};

class PageBook {
   public:
    explicit PageBook(std::size_t row_bytes) : row_bytes_(row_bytes) {}

    void note(const PageName& name);
    PageFacts& at(const Key& key);
    const PageFacts& at(const Key& key) const;

    Expectation lookup(const Prompt& prompt, std::uint32_t limit, double now) const;
    void await(const Key& key, double now);
    void read_failed(const Key& key, double now, double retry_after);
    void read_overdue(const Key& key, double now, double retry_after);  // given up, and nobody asks again while it hangs
    void read_came_late(const Key& key, double now);
    bool any_in(Tier tier, const Key& parent) const;  // a child of `parent` is there
    std::size_t count(Tier tier) const;
    void lose_memory();  // the process died
    template <class F>
    void for_each(F&& see) {
        for (auto& [prefix, facts] : pages_) see(facts);
    }

   private:
    std::size_t row_bytes_;
    std::unordered_map<std::uint64_t, PageFacts> pages_;  // by the first bytes of the key
    std::unordered_map<std::uint64_t, Key> keys_;         // by chain
    int hanging_reads_ = 0;
    double doubtful_until_ = -1e18;  // reads went overdue: the driver may have paused the tier
};

}  // namespace kvstrata::testing
