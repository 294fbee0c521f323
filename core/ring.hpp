// io_uring, where the system and the kernel have it: requests to files that no thread waits for.
#pragma once

#include <memory>

#include "slot_run.hpp"

namespace kvstrata {

class Ring {
   public:
    static constexpr unsigned kEntries = 64;

    // nullptr where it was not built in, or the kernel (or a container's rules) does not allow it.
    static std::unique_ptr<Ring> open();
    virtual ~Ring() = default;

    // One thread at a time. False: not taken (no room, or the file has no descriptor). The transfer, and what it points to, is the
    // kernel's until wait() hands `tag` back.
    virtual bool submit(const Transfer& transfer, void* tag) = 0;
    // Another thread at a time. Blocks until a request ends: its tag and result (bytes moved, or -errno); tag nullptr: somebody woke it.
    virtual void* wait(std::int64_t& result) = 0;
    virtual void wake() = 0;  // as submit()
};

}  // namespace kvstrata
