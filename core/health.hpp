// What is wrong with the disk tier, as far as operations tell: told as one sentence, and told again only when it changes.
#pragma once

#include <cstdint>
#include <string>

namespace kvstrata {

class DiskHealth {
   public:
    enum class Side : std::uint8_t { reads, writes };
    enum class Trouble : std::uint8_t {
        none,
        full,     // no room, and nothing that could go
        failing,  // the system reports errors
        stalled,  // operations do not come back
    };

    void ill(Side side, Trouble trouble, int error, double now);  // error: errno, 0: none known
    void well(Side side);

    std::uint64_t changes() const { return changes_; }  // counts what the sentence was before
    double since() const;                               // seconds since 1970; 0: all is well
    std::string sentence() const;                       // "ok", or what does not work and why

   private:
    struct State {
        Trouble trouble = Trouble::none;
        int error = 0;
        double since = 0;
    };
    State& at(Side side) { return states_[static_cast<int>(side)]; }

    State states_[2];
    std::uint64_t changes_ = 0;
};

}  // namespace kvstrata
