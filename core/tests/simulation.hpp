// Deterministic simulation of the production driver: one seed, one logical clock, the real shelf on a simulated disk, a simulated device,
// many requests at once, and trouble everywhere. After every step everything that can be proven is proven; whatever does not hold is
// thrown as Broken. The same seed does the same again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "page_book.hpp"
#include "sim_device.hpp"
#include "sim_io.hpp"

namespace kvstrata::testing {

class Session;

// What one seed is about.
struct Setup {
    DriverConfig driver;
    std::size_t row_bytes = 0;
    std::uint64_t disk_bytes = 0;  // cap of the directory
    std::uint32_t device_rows = 0;
    std::uint32_t multiple = 0;  // tokens
    std::uint32_t most_pages = 0, spaces = 0, sessions = 0, ticks = 0, lives = 0;
    double patience = 0;  // seconds until a request stops waiting
    DeviceTroubles device;
    IoTroubles io;
    double flip = 0;  // chance per tick that a byte on disk changes
    double full = 0;  // ... that the file system runs full, or gets its room back
    double gone = 0;  // ... that somebody removes a segment

    static Setup draw(Dice& dice);
    bool guest() const { return driver.ledger.gpu_rows == 0; }
    std::uint32_t page_size() const { return driver.ledger.page_size; }
};

// What happened, so that a suite can prove that its seeds reach what they are meant to reach.
struct Tally {
    std::uint64_t leases = 0, full = 0, never = 0, settled = 0, shortened = 0, cancelled = 0, published = 0, saved = 0,
                  rows_lost = 0;
    std::uint64_t kills = 0, crashes = 0, closes = 0, found = 0, flips = 0, steps = 0;
    std::uint64_t vanished = 0, rebuilt = 0;
    std::uint64_t hits[kTiers] = {};
    DriverCounters driver;  // sums over lives
    std::uint64_t evicted[kTiers] = {};
    void add(const Tally& other);
    void add(const Driver& driver);
};

class Simulation {
   public:
    explicit Simulation(std::uint64_t seed);
    ~Simulation();
    void run();
    const Tally& tally() const { return tally_; }

    // A line of what happens, where KVSTRATA_TRACE is set.
    void tell(const char* format, ...) const __attribute__((format(printf, 2, 3)));

    // --- for sessions
    const Setup& setup() const { return setup_; }
    double now() const { return agenda_.now(); }
    Dice& dice() { return dice_; }
    PageBook& book() { return book_; }
    SimDevice& device() { return *device_; }
    const Driver& driver() const { return *driver_; }
    const Slab* slab() const { return slab_.get(); }
    Tally& tally() { return tally_; }
    // Runs a decision and starts what follows from it, as the runtime does.
    template <class F>
    auto decide(F&& decision) {
        auto answer = decision(*driver_, agenda_.now());
        advance({});
        return answer;
    }
    std::uint32_t rows_to_be_had(const std::vector<PageName>& spared) const;  // of the device, by evicting all that may go
    PageId page_of(const Key& key) const;                                     // kNoPage: no record
    bool pause_excuses(double since) const { return last_overdue_ >= since; }
    // Guest mode: blocks of the engine. Given back, they are used again once nothing submitted touches them.
    bool take_blocks(std::size_t count, std::vector<Row>& into);
    // `expected`: what they hold if the copies they were for ended well.
    void give_blocks(const std::vector<Row>& blocks, std::vector<std::uint64_t> tickets, std::vector<SimDevice::RowBytes> expected);

   private:
    void open_life();
    void live();
    void tick();
    void harm_disk();
    void listen();
    std::size_t count_slots() const;
    void rest();
    void quieten();
    void prove_rest() const;
    void prove_alive();
    void prove_evictable();
    void end_life(bool at_rest);
    void happen_next();
    void advance(std::span<Completion> done);
    void deliver(const Op& op, const Completion& done);
    void hear(const Event& event);
    void check();
    void check_pages();
    void check_entries();
    void collect_blocks();
    void poison_free_rows();
    std::vector<Key> pages_of(const CopyBatch& batch) const;
    void find_overdue();
    ShelfConfig shelf_config();

    Dice dice_;
    Setup setup_;
    Agenda agenda_;
    PageBook book_;
    Tally tally_;
    std::shared_ptr<SimMedium> medium_;
    std::shared_ptr<SimDisk> disk_;
    std::shared_ptr<Shelf> shelf_;
    std::shared_ptr<Slab> slab_;
    std::unique_ptr<Driver> driver_;
    std::unique_ptr<SimDevice> device_;
    std::unique_ptr<SimIo> io_;
    std::vector<std::unique_ptr<Session>> sessions_;
    std::uint32_t ticks_left_ = 0;
    std::uint64_t slots_ = 0;  // of the shelf, in use or not
    double last_overdue_ = -1e18;
    bool records_harmed_ = false;             // what a restart finds may be less than was stored
    std::vector<Key> given_up_;               // pages of segments that are gone
    std::vector<Key> condemned_;              // reads that found them damaged were just delivered
    std::vector<std::pair<Key, Key>> links_;  // of the key index after the last step: child, parent
    std::vector<std::uint8_t> device_free_;
    std::vector<Row> blocks_;
    struct Returned {
        std::vector<Row> blocks;
        std::vector<std::uint64_t> tickets;
        std::vector<SimDevice::RowBytes> expected;
    };
    std::vector<Returned> returned_;
    std::map<std::uint64_t, bool> ended_well_;  // copies, by ticket, as far as the driver was told in time
    bool grow_refused_ = false;                 // since it was last cleared
};

}  // namespace kvstrata::testing
