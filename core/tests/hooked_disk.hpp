// A disk whose transfers can be watched, held up and failed by a test, over another one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "../disk.hpp"

namespace kvstrata::testing {

class HookedDisk final : public Disk {
   public:
    // Before each transfer, on its thread. 0: goes on; below: fails so. May block.
    using Hook = std::function<int(bool write, std::span<const iovec> parts, std::uint64_t offset)>;

    HookedDisk(std::shared_ptr<Disk> inner, Hook hook) : inner_(std::move(inner)), hook_(std::move(hook)) {}

    int open(const std::string& path, OpenMode mode) override { return inner_->open(path, mode); }
    int close(int file) override { return inner_->close(file); }
    std::int64_t preadv(int file, std::span<const iovec> parts, std::uint64_t offset) override {
        const int error = hook_(false, parts, offset);
        return error < 0 ? error : inner_->preadv(file, parts, offset);
    }
    std::int64_t pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) override {
        const int error = hook_(true, parts, offset);
        return error < 0 ? error : inner_->pwritev(file, parts, offset);
    }
    int allocate(int file, std::uint64_t bytes) override { return inner_->allocate(file, bytes); }
    int truncate(int file, std::uint64_t bytes) override { return inner_->truncate(file, bytes); }
    int sync(int file) override { return inner_->sync(file); }
    int lock(int file) override { return inner_->lock(file); }
    int unlock(int file) override { return inner_->unlock(file); }
    int make_directory(const std::string& path) override { return inner_->make_directory(path); }
    int remove(const std::string& path) override { return inner_->remove(path); }
    int rename(const std::string& from, const std::string& to) override { return inner_->rename(from, to); }
    int list(const std::string& path, std::vector<DirEntry>& into) override { return inner_->list(path, into); }
    int free_bytes(std::uint64_t& into) override { return inner_->free_bytes(into); }
    bool direct() const override { return inner_->direct(); }
    std::string where() const override { return inner_->where(); }
    int descriptor(int file) const override {
        const int other = instead.load();
        return other >= 0 ? other : through.load() ? inner_->descriptor(file) : -1;
    }

    std::atomic<bool> through{false};  // io_uring may go round the hook
    std::atomic<int> instead{-1};      // and to this descriptor

   private:
    std::shared_ptr<Disk> inner_;
    Hook hook_;
};

inline std::uint64_t bytes_of(std::span<const iovec> parts) {
    std::uint64_t bytes = 0;
    for (const iovec& part : parts) bytes += part.iov_len;
    return bytes;
}

// Holds threads up until it is opened.
class Gate {
   public:
    void pass() {
        std::unique_lock lock(mutex_);
        ++waiting_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return open_; });
        --waiting_;
    }
    void open() {
        const std::lock_guard lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    void await(int threads) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return waiting_ >= threads; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int waiting_ = 0;
    bool open_ = false;
};

// A disk with hooks where a thread may lose the processor.
class HookedCalls final : public Disk {
   public:
    explicit HookedCalls(std::shared_ptr<Disk> inner) : inner_(std::move(inner)) {}
    int open(const std::string& path, OpenMode mode) override {
        if (const int error = on_open ? on_open(path, mode) : 0; error != 0) return error;
        return inner_->open(path, mode);
    }
    int close(int file) override { return inner_->close(file); }
    std::int64_t preadv(int file, std::span<const iovec> parts, std::uint64_t offset) override {
        if (on_read) on_read();
        return inner_->preadv(file, parts, offset);
    }
    std::int64_t pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) override {
        return inner_->pwritev(file, parts, offset);
    }
    int allocate(int file, std::uint64_t bytes) override {
        if (on_allocate) std::exchange(on_allocate, {})();
        return inner_->allocate(file, bytes);
    }
    int truncate(int file, std::uint64_t bytes) override { return inner_->truncate(file, bytes); }
    int sync(int file) override { return inner_->sync(file); }
    int lock(int file) override { return inner_->lock(file); }
    int unlock(int file) override { return inner_->unlock(file); }
    int make_directory(const std::string& path) override { return inner_->make_directory(path); }
    int remove(const std::string& path) override {
        if (on_remove) std::exchange(on_remove, {})(path);
        return remove_error != 0 && path.ends_with(".kvs") ? remove_error : inner_->remove(path);
    }
    int rename(const std::string& from, const std::string& to) override { return inner_->rename(from, to); }
    int list(const std::string& path, std::vector<DirEntry>& into) override {
        if (path.empty() && on_list) std::exchange(on_list, {})();
        if (path == "shelves" && on_shelves) std::exchange(on_shelves, {})();
        return inner_->list(path, into);
    }
    int free_bytes(std::uint64_t& into) override { return inner_->free_bytes(into); }
    bool direct() const override { return inner_->direct(); }
    std::string where() const override { return inner_->where(); }

    std::function<int(const std::string&, OpenMode)> on_open;
    std::function<void(const std::string&)> on_remove;
    std::function<void()> on_list, on_shelves, on_allocate, on_read;
    int remove_error = 0;  // of segments

   private:
    std::shared_ptr<Disk> inner_;
};

}  // namespace kvstrata::testing
