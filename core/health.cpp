#include "health.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvstrata {
namespace {

std::string cause(DiskHealth::Trouble trouble, int error, const char* operations) {
    switch (trouble) {
        case DiskHealth::Trouble::full:
            return error == 0 || error == EDQUOT ? "no room within the limits, and nothing that could go" : std::strerror(error);
        case DiskHealth::Trouble::stalled:
            return std::string(operations) + " do not come back";
        default:
            return error != 0 ? std::strerror(error) : std::string(operations) + " fail";
    }
}

}  // namespace

void DiskHealth::ill(Side side, Trouble trouble, int error, double now) {
    State& state = at(side);
    if (state.trouble == trouble && state.error == error) return;
    if (state.trouble == Trouble::none) state.since = now;
    state.trouble = trouble;
    state.error = error;
    ++changes_;
}

void DiskHealth::well(Side side) {
    State& state = at(side);
    if (state.trouble == Trouble::none) return;
    state = {};
    ++changes_;
}

double DiskHealth::since() const {
    const auto& [reads, writes] = states_;
    if (reads.trouble == Trouble::none) return writes.since;
    return writes.trouble == Trouble::none ? reads.since : std::min(reads.since, writes.since);
}

std::string DiskHealth::sentence() const {
    const auto& [reads, writes] = states_;
    std::string text;
    if (writes.trouble != Trouble::none) text = "no new pages: " + cause(writes.trouble, writes.error, "writes");
    if (reads.trouble != Trouble::none)
        text += (text.empty() ? "" : "; ") + ("pages are not read: " + cause(reads.trouble, reads.error, "reads"));
    return text.empty() ? "ok" : text;
}

}  // namespace kvstrata
