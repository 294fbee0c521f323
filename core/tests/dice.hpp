// Chance that replays: the same seed throws the same dice on every machine, which standard distributions do not promise.
#pragma once

#include <cstdint>
#include <vector>

namespace kvstrata::testing {

class Dice {
   public:
    explicit Dice(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {  // splitmix64
        std::uint64_t value = state_ += 0x9e3779b97f4a7c15ull;
        value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
        value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
        return value ^ (value >> 31);
    }
    std::uint32_t below(std::uint64_t bound) { return static_cast<std::uint32_t>(next() % bound); }
    std::uint32_t between(std::uint32_t least, std::uint32_t most) { return least + below(std::uint64_t{most} - least + 1); }
    double real(double least, double most) { return least + (most - least) * static_cast<double>(next() >> 11) * 0x1p-53; }
    bool chance(double probability) { return real(0, 1) < probability; }
    template <class T>
    const T& pick(const std::vector<T>& from) {
        return from[below(from.size())];
    }

   private:
    std::uint64_t state_;
};

}  // namespace kvstrata::testing
