// The real Io: threads that run a shelf's operations, reads before writes, adjacent slots in one request, and background work last.
//
// With io_uring the threads only prepare requests and prove what they brought; without it, or where a request needs a second try, they
// make the requests themselves. Everything a thread or a request touches is held by it: shelf, slab and queue live on with one that hangs in
// the file system, so that close() can leave it behind.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "io.hpp"
#include "shelf.hpp"
#include "slab.hpp"

namespace kvstrata {

struct IoPoolConfig {
    unsigned threads = 4;        // without io_uring also the number of requests at once
    unsigned requests = 8;       // at once, with io_uring
    bool ring = true;            // io_uring where it is allowed
    unsigned spare_threads = 8;  // at most so many stand in for threads that hang
    std::chrono::milliseconds hangs_after{2000};
};

struct IoStats {
    std::uint64_t read_requests = 0, read_pages = 0, read_bytes = 0;  // slots only, all tries; bytes that were moved
    std::uint64_t write_requests = 0, write_pages = 0, write_bytes = 0;
    std::uint64_t hanging = 0;   // threads and requests, now
    std::uint64_t replaced = 0;  // threads that others had to stand in for
    bool ring = false;
};

struct IoWorkers;

class IoPool final : public Io {
   public:
    // Called on an I/O thread, from several at once. What they throw is lost. Kept alive, never called again, by a thread that hangs:
    // let them own what the operations borrow.
    using Sink = std::function<void(std::span<Completion>)>;  // operations of one request, together
    using NewsSink = std::function<void(ShelfNews&&)>;        // none: no background work is done

    IoPool(std::shared_ptr<Shelf> shelf, std::shared_ptr<Slab> slab, const IoPoolConfig& config, Sink sink, NewsSink news = {});
    ~IoPool() override;  // close() without patience
    IoPool(const IoPool&) = delete;
    IoPool& operator=(const IoPool&) = delete;

    // After close() operations are dropped without a completion.
    void submit(std::vector<Op>&& ops) override;
    // Has the shelf look after its files when nothing else is to be done; what it finds comes as news. For every few seconds.
    void look();
    // Has it look what other processes did, whatever else is to be done. For a few times a second.
    void poll();
    // Runs something that takes long beside the operations, in a thread of its own, one such thing at a time. close() drops what has not begun, and leaves what is
    // under way to itself if it does not end: let it own what it uses, and end soon after.
    void errand(std::function<void()> work);

    // Runs what is queued and then makes everything written safe from a power loss, for as long as `patience` allows; hands back the rest
    // as failed with ECANCELED, and returns: no sink call is running or will ever come. Threads and requests that hang are left to
    // themselves; the result is how many. Not to be called from a sink, nor while holding a lock that one takes. Again: 0.
    std::size_t close(std::chrono::milliseconds patience);

    std::size_t queued() const;
    IoStats stats() const;

   private:
    std::shared_ptr<IoWorkers> workers_;
};

}  // namespace kvstrata
