// A simulated device: rows of memory, one compute queue, a queue of copies each way. Everything is submitted now and happens later, in
// the order of its queue; copies also fail, come late, hang, and are reported twice.
//
// Whoever computes says what each batch must find in the rows it reads; that is checked when the batch runs, not when it is submitted.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "../slab.hpp"
#include "agenda.hpp"
#include "page_book.hpp"

namespace kvstrata::testing {

struct DeviceTroubles {
    double fail = 0;  // chances per copy
    double late = 0;  // reported after its deadline
    double hang = 0;  // not before drain()
    double repeat = 0;
};

class SimDevice {
   public:
    using RowBytes = std::pair<Row, std::uint64_t>;  // what a row holds or is to hold: the chain of a page
    using Report = std::function<void(std::uint64_t ticket, bool ok, const std::vector<Key>& pages)>;

    SimDevice(Agenda& agenda, Dice& dice, const Slab* slab, std::uint32_t rows, std::size_t row_bytes, double copy_deadline,
              const DeviceTroubles& troubles, Report report);

    Fence run(std::vector<RowBytes> reads, std::vector<RowBytes> writes);
    void start(const CopyBatch& copy, std::vector<Key> pages);
    // Calls `late` once for each copy that is past its deadline without a report.
    void find_overdue(const std::function<void(const std::vector<Key>& pages)>& late);
    void drain();  // what hangs happens now, and nothing hangs from here on

    bool quiet(Row row) const { return pending_writes_[static_cast<std::size_t>(row)] == 0; }
    bool untouched(Row row) const { return quiet(row) && pending_reads_[static_cast<std::size_t>(row)] == 0; }
    bool holds(Row row, const std::vector<std::byte>& bytes) const { return rows_[static_cast<std::size_t>(row)] == bytes; }
    void poison(Row row);
    bool has_run(Fence fence) const { return fence <= done_; }
    bool copying(std::uint64_t ticket) const {  // it may still touch memory
        const auto found = copies_.find(ticket);
        return found != copies_.end() && !found->second.happened;
    }
    double next_deadline() const;  // of the copies that are not overdue
    bool busy() const { return !batches_.empty() || !copies_.empty(); }

   private:
    struct Batch {
        std::vector<RowBytes> reads, writes;
    };
    struct Copy {
        CopyBatch batch;
        std::vector<Key> pages;
        double deadline = 0;
        bool hangs = false, overdue = false, happened = false;
    };

    void run_batch();
    void try_copy(std::uint64_t ticket);
    void perform(std::uint64_t ticket);
    void touch(const std::vector<Row>& rows, bool write, int by);

    Agenda& agenda_;
    Dice& dice_;
    const Slab* slab_;
    std::size_t row_bytes_;
    double copy_deadline_;
    DeviceTroubles troubles_;
    Report report_;
    std::vector<std::vector<std::byte>> rows_;
    std::vector<int> pending_writes_, pending_reads_;
    std::deque<Batch> batches_;
    double last_batch_at_ = 0;
    Fence submitted_ = 0, done_ = 0;
    std::map<std::uint64_t, Copy> copies_;  // by ticket, until reported
    std::deque<std::uint64_t> queue_[2];    // downs, ups
};

}  // namespace kvstrata::testing
