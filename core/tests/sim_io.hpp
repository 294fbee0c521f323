// A simulated Io: the real shelf on a simulated disk, run by an agenda instead of threads. Operations start, touch memory and complete at
// random times and in random order; some come after their deadline, some hang, some complete twice, some are answered wrongly.
#pragma once

#include <functional>
#include <map>

#include "../disk_sim.hpp"
#include "../shelf.hpp"
#include "../slab.hpp"
#include "agenda.hpp"
#include "page_book.hpp"

namespace kvstrata::testing {

struct IoTroubles {
    double late = 0;  // chances per operation: happens after its deadline
    double hang = 0;  // not before drain()
    double odd = 0;   // a read finds another page, as if the slot had changed hands
    double repeat = 0;
    double medium = 0;  // per call of the file system: EIO or ENOSPC
};

class SimIo final : public Io {
   public:
    using Deliver = std::function<void(const Op& op, const Completion& done)>;

    SimIo(Agenda& agenda, Dice& dice, PageBook& book, const Slab* slab, std::size_t row_bytes, double read_deadline,
          const IoTroubles& troubles, Deliver deliver);

    // Where operations run from now on; the medium is asked to fail only while one runs.
    void mount(std::shared_ptr<Shelf> shelf, std::shared_ptr<SimMedium> medium) {
        shelf_ = std::move(shelf);
        medium_ = std::move(medium);
    }
    void submit(std::vector<Op>&& ops) override;
    // Calls `late` once for each read that is past its deadline and not delivered.
    void find_overdue(const std::function<void(const Key& page)>& late);
    bool is_overdue(std::uint64_t id) const { return running_.at(id).overdue; }
    void drain();
    // The process is about to die: one operation gets half-way.
    void tear_one();
    bool busy() const { return !running_.empty(); }
    bool reading(const Key& page) const;
    std::size_t clearing(const std::function<bool(SlotRef)>& which) const;  // slots that wait to be cleared
    double next_deadline() const;                                           // of the reads that are not overdue

   private:
    struct Running {
        Op op;
        double deadline = 0;  // of a read
        bool hangs = false, overdue = false, happened = false;
    };

    void perform(std::uint64_t id);
    Completion execute(const Op& op);
    void check_source(const Op& op) const;
    void prove_write(const Op& op);
    void scribble(const Op& op) const;

    Agenda& agenda_;
    Dice& dice_;
    PageBook& book_;
    const Slab* slab_;
    std::size_t row_bytes_;
    double read_deadline_;
    IoTroubles troubles_;
    Deliver deliver_;
    std::shared_ptr<Shelf> shelf_;
    std::shared_ptr<SimMedium> medium_;
    std::map<std::uint64_t, Running> running_;
};

}  // namespace kvstrata::testing
