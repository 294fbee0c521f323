#include "guard.hpp"

#ifdef KVSTRATA_UNGUARDED

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace kvstrata {
namespace {

constexpr std::array<std::string_view, 18> kNames{
    "publish_after_place", "completion_generation", "pins",        "copy_holds",   "leaf_first",        "reserve_before_write",
    "join_moves",          "first_writer",          "deadline",    "name_space",   "release_on_cancel", "ready_fence",
    "room_first",          "half_the_slab",         "no_cpu_tier", "failed_write", "found_slots",       "written_once",
};

// The one that is left out; kNames.size(): none.
std::size_t left_out() {
    const char* name = std::getenv("KVSTRATA_UNGUARDED");
    if (!name) return kNames.size();
    for (std::size_t i = 0; i < kNames.size(); ++i)
        if (kNames[i] == name) return i;
    std::fprintf(stderr, "KVSTRATA_UNGUARDED=%s: there is no such guard\n", name);
    std::abort();
}

}  // namespace

bool guarded(Guard guard) {
    static const std::size_t without = left_out();
    return static_cast<std::size_t>(guard) != without;
}

}  // namespace kvstrata

#endif
