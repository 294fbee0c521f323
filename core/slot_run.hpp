// Reads, or writes, of adjacent slots of one segment, carried by one request to the file. Every page is still proven, and answered, by
// itself; a request that fails as a whole is made again page by page.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "segment.hpp"

namespace kvstrata {

// What the kernel is asked in one call.
struct Transfer {
    std::shared_ptr<File> file;
    bool write = false;
    std::vector<iovec> parts;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;

    std::int64_t run() const;  // on this thread: bytes moved, or -errno
};

class SlotRun {
   public:
    // `ops`: all reads or all writes, their slots rising by one; `rows`: the slab rows. What they borrow is borrowed until finish() returns.
    SlotRun(std::shared_ptr<Segment> segment, std::span<const Plane> planes, std::vector<Op> ops, std::vector<std::byte*> rows);

    // Before the request: of writes, headers are made and records freed. 0, or -errno: there is no request, and finish() gets that.
    int prepare();
    const Transfer& transfer() const { return transfer_; }
    // After it: of reads, pages are proven; of writes, records are set. `moved`: what came of the request. One that did not do all it was
    // to do is made again page by page, on this thread; a run of one page only if `again`.
    std::vector<Completion> finish(std::int64_t moved, bool again = false);
    // All of it, on this thread.
    std::vector<Completion> run();

    const std::vector<Op>& ops() const { return ops_; }
    const std::shared_ptr<Segment>& segment() const { return segment_; }
    bool writes() const { return transfer_.write; }
    // What was asked of the file for slots, all tries together.
    std::uint64_t requests() const { return requests_; }
    std::uint64_t bytes() const { return bytes_; }

   private:
    std::byte* header(std::size_t index) const { return headers_.data() + index * segment_->shape().header_bytes; }
    std::vector<Completion> one_by_one();
    Completion prove(std::size_t index, std::int64_t moved) const;

    const std::shared_ptr<Segment> segment_;
    const std::span<const Plane> planes_;
    const std::vector<Op> ops_;
    const std::vector<std::byte*> rows_;
    AlignedBuffer headers_;
    Transfer transfer_;
    std::uint64_t requests_ = 0, bytes_ = 0;
};

}  // namespace kvstrata
