// A disk in memory for deterministic tests: the medium survives what processes and power do not, and fails on demand.
//
// A SimMedium is what lies on the platter. Each SimDisk attached to it is one process's view: its handles and locks end with it. The same
// seeds and calls give the same faults and the same state after a crash. Thread-safe; deterministic when called from one thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "disk.hpp"

namespace kvstrata {

// Which operations go wrong, counted from the moment set_faults() is called; the first is number 1.
struct SimFaults {
    std::uint64_t fail_at = 0;   // this one; 0: none
    bool and_after = false;      // and every later one
    double chance = 0;           // of each
    int error = 5;               // EIO. A failing write may have written some of its sectors
    bool shorten = false;        // transfers end half-way instead
    std::uint64_t stall_at = 0;  // this one waits for release(); 0: none
};

class SimDisk;

class SimMedium : public std::enable_shared_from_this<SimMedium> {
   public:
    static constexpr std::size_t kSector = 4096;

    static std::shared_ptr<SimMedium> make(std::uint64_t seed, std::uint64_t capacity = 1ull << 40);

    std::shared_ptr<SimDisk> attach();
    void set_faults(const SimFaults& faults);
    std::uint64_t operations() const;  // since set_faults()
    void release();                    // lets stalled operations go on
    std::size_t stalled() const;

    // The power goes: every view dies. Of what was written since the last sync of a file, each sector is kept, lost or torn at random;
    // of the changes of names and sizes since the last sync of any file, the later ones are lost.
    void crash(std::uint64_t seed);

    std::uint64_t allocated_bytes() const;  // by files and directories, as `du` would say
    std::uint64_t peak_bytes() const;       // the most it ever was
    void set_capacity(std::uint64_t bytes);
    void set_direct(bool direct);

    // For tests that do damage by hand.
    std::vector<std::string> files() const;
    void edit(const std::string& path, const std::function<void(std::vector<std::byte>&)>& change);  // makes the file if missing

   private:
    friend class SimDisk;

    struct Node {
        bool directory = false;
        std::vector<std::byte> data;
        std::map<std::uint64_t, std::vector<std::vector<std::byte>>>
            unsynced;       // by sector: what it held before, the synced state first
        int locked_by = 0;  // a handle
    };
    using NodePtr = std::shared_ptr<Node>;

    SimMedium(std::uint64_t seed, std::uint64_t capacity) : random_(seed), capacity_(capacity) {}

    // All under mutex_.
    int begin(std::unique_lock<std::mutex>& lock, const std::shared_ptr<bool>& alive, bool transfer, bool& shorten);
    bool parent_exists(const std::string& path) const;
    std::uint64_t allocated() const;
    int resize(const NodePtr& node, std::uint64_t bytes);
    void put(Node& node, const std::byte* from, std::uint64_t offset, std::size_t bytes);
    void changed() { peak_ = std::max(peak_, allocated()); }

    mutable std::mutex mutex_;
    std::condition_variable released_;
    std::map<std::string, NodePtr> nodes_;     // by path
    std::vector<std::function<void()>> undo_;  // of names and sizes since the last sync
    std::vector<std::weak_ptr<bool>> views_;
    SimFaults faults_;
    std::mt19937_64 random_;
    std::uint64_t operations_ = 0;
    std::uint64_t capacity_;
    std::uint64_t peak_ = 0;
    std::size_t stalled_ = 0;
    std::uint64_t releases_ = 0;
    int next_handle_ = 1;
    bool direct_ = true;
};

class SimDisk final : public Disk {
   public:
    explicit SimDisk(std::shared_ptr<SimMedium> medium);
    ~SimDisk() override { kill(); }

    // The process dies: its handles and locks end, what it wrote stays.
    void kill();

    int open(const std::string& path, OpenMode mode) override;
    int close(int file) override;
    std::int64_t preadv(int file, std::span<const iovec> parts, std::uint64_t offset) override;
    std::int64_t pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) override;
    int allocate(int file, std::uint64_t bytes) override;
    int truncate(int file, std::uint64_t bytes) override;
    int sync(int file) override;
    int lock(int file) override;
    int unlock(int file) override;
    int make_directory(const std::string& path) override;
    int remove(const std::string& path) override;
    int rename(const std::string& from, const std::string& to) override;
    int list(const std::string& path, std::vector<DirEntry>& into) override;
    int free_bytes(std::uint64_t& into) override;
    bool direct() const override;
    std::string where() const override { return "(simulated)"; }

   private:
    struct Handle {
        SimMedium::NodePtr node;
        OpenMode mode;
    };
    Handle* find(int file);
    static bool aligned(const Handle& handle, std::span<const iovec> parts, std::uint64_t offset);

    std::shared_ptr<SimMedium> medium_;
    std::shared_ptr<bool> alive_;  // guarded by the medium's mutex, like everything below
    std::map<int, Handle> handles_;
};

}  // namespace kvstrata
