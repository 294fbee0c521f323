// A process as far as the disk tier is concerned, on one thread and a logical clock: the shipped driver over the shipped shelf on a
// simulated disk. It serves prompts from first to last operation; one operation of all, told by its number, may be late or hang.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "../disk_sim.hpp"
#include "../driver.hpp"
#include "../shelf.hpp"
#include "../slab.hpp"

namespace kvstrata::testing {

using Tokens = std::vector<std::int32_t>;

// What several processes, one after the other or at once, have in common.
struct World {
    enum class Delay { none, answer, effect, end };  // the answer comes late; the effect too; both only when the process ends

    std::shared_ptr<SimMedium> medium;
    std::uint64_t cap_bytes = 0;
    Delay delay = Delay::none;
    std::uint64_t delayed = 0;                            // which operation
    std::uint64_t operations = 0;                         // of shelves, so far
    std::set<std::array<std::uint8_t, 32>> acknowledged;  // keys that a shelf stored, and that nobody removed
    std::uint64_t shelves = 0;
    std::uint64_t evicted = 0, loaded = 0;  // pages, so that a scenario can prove that it does something
};

class Process {
   public:
    static constexpr std::uint32_t kTokens = 4;  // of a page
    static constexpr std::uint64_t kRow = 4096;

    explicit Process(World& world);
    ~Process();

    bool alive() const { return shelf_ != nullptr; }  // a process whose disk tier does not open serves nothing here
    const std::string& error() const { return error_; }
    std::uint32_t serve(const Tokens& tokens);  // pages of the hit; all of them are compared, the others computed and saved
    bool knows(const Key& key) const { return driver_.ledger().find_entry(key) != kNoEntry; }
    void pass(double seconds);  // time, and whatever is due in it
    void close();
    void kill();

    static std::vector<Key> keys(const Tokens& tokens);

   private:
    struct Held {
        Op op;
        std::unique_ptr<Completion> done;  // where only the answer is late
        double until = 0;
    };

    bool turn();  // one thing happens; false: nothing is left that would without time passing
    void perform(Op op);
    Completion execute(const Op& op);
    void step(std::vector<Completion> done);
    void release_held(double now);
    void listen();
    void check();

    World& world_;
    double now_ = 1000;
    Driver driver_;
    std::shared_ptr<Slab> slab_;
    std::shared_ptr<SimDisk> disk_;
    std::unique_ptr<Shelf> shelf_;
    std::string error_;
    std::deque<Op> queue_;
    std::vector<Held> held_;
};

}  // namespace kvstrata::testing
