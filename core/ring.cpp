#include "ring.hpp"

#ifdef KVSTRATA_LIBURING

#include <liburing.h>

#include <atomic>

namespace kvstrata {
namespace {

class KernelRing final : public Ring {
   public:
    ~KernelRing() override {
        if (open_) io_uring_queue_exit(&ring_);
    }
    bool start() { return open_ = io_uring_queue_init(kEntries, &ring_, 0) == 0; }

    bool submit(const Transfer& transfer, void* tag) override {
        const int file = transfer.file->disk().descriptor(transfer.file->handle());
        io_uring_sqe* entry = file < 0 ? nullptr : io_uring_get_sqe(&ring_);
        if (!entry) return false;
        const auto count = unsigned(transfer.parts.size());
        if (transfer.write)
            io_uring_prep_writev(entry, file, transfer.parts.data(), count, transfer.offset);
        else
            io_uring_prep_readv(entry, file, transfer.parts.data(), count, transfer.offset);
        return send(entry, tag);
    }

    void* wait(std::int64_t& result) override {
        io_uring_cqe* done = nullptr;
        while (io_uring_wait_cqe(&ring_, &done) != 0) {  // interrupted
        }
        handed_over_.load(std::memory_order_acquire);
        void* tag = io_uring_cqe_get_data(done);
        result = done->res;
        io_uring_cqe_seen(&ring_, done);
        return tag;
    }

    void wake() override {
        if (io_uring_sqe* entry = io_uring_get_sqe(&ring_)) {
            io_uring_prep_nop(entry);
            send(entry, nullptr);
        }
    }

   private:
    bool send(io_uring_sqe* entry, void* tag) {
        io_uring_sqe_set_data(entry, tag);
        handed_over_.fetch_add(1, std::memory_order_release);
        if (io_uring_submit(&ring_) > 0) return true;
        // The kernel did not take it, so that it is still the last of the queue: it becomes nothing, and goes with the next one.
        io_uring_prep_nop(entry);
        io_uring_sqe_set_data(entry, nullptr);
        return false;
    }

    io_uring ring_{};
    bool open_ = false;
    // The kernel orders a request before its completion. This says the same to whoever only sees the program (ThreadSanitizer).
    std::atomic<unsigned> handed_over_{0};
};

}  // namespace

std::unique_ptr<Ring> Ring::open() {
    auto ring = std::make_unique<KernelRing>();
    return ring->start() ? std::move(ring) : nullptr;
}

}  // namespace kvstrata

#else

namespace kvstrata {

std::unique_ptr<Ring> Ring::open() { return nullptr; }

}  // namespace kvstrata

#endif
