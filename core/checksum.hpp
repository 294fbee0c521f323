// XXH3-64 of a byte range: finds damage, proves nothing against intent (keys are SHA-256).
#pragma once

#ifndef XXH_INLINE_ALL  // header only: no library to find at run time
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

namespace kvstrata {

inline std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed = 0) {
    return XXH3_64bits_withSeed(data, bytes, seed);
}

// The same of bytes that come in pieces.
class RunningChecksum {
   public:
    RunningChecksum() { restart(); }
    void restart() { XXH3_64bits_reset(&state_); }
    void add(const void* data, std::size_t bytes) { XXH3_64bits_update(&state_, data, bytes); }
    std::uint64_t value() const { return XXH3_64bits_digest(&state_); }

   private:
    XXH3_state_t state_;
};

}  // namespace kvstrata
