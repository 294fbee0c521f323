// One request in a simulation: it leases, waits, computes, publishes, grows, gives up or goes on, and checks all the while that what it
// was promised is what it has. In guest mode it owns device blocks and has pages copied to and from them.
#pragma once

#include <vector>

#include "simulation.hpp"

namespace kvstrata::testing {

class Session {
   public:
    // `plain`: reads and writes all it can, and reserves nothing.
    Session(Simulation& world, Prompt prompt, bool plain = false);

    LeaseId id() const { return id_; }
    bool refused() const { return id_ == 0; }
    bool settled() const { return settled_; }
    bool over() const { return over_; }
    std::uint32_t hit() const { return hit_; }  // pages
    void act();                                 // something a request may do now
    void look();                                // after every step
    void compute_all();                         // computes, and publishes or saves, all that is left
    void publish_all();
    void release();
    const std::vector<Row>& rows() const;  // of the device, that it holds
    bool uses(const Key& page) const;      // its copy in the home tier may not go

   private:
    void settle_in();
    void check_excuse() const;
    void check_lease(const LeaseAnswer& answer, const Expectation& expected, std::uint64_t total);
    void check_rows(const Lease& lease) const;
    void act_unsettled();
    void act_own();
    void act_guest();
    void compute(std::uint32_t tokens);
    void compute_guest(std::uint32_t first, std::uint32_t pages);
    void publish(std::uint64_t tokens);
    void generate();
    void load();
    void save();
    void check_loads();
    const Lease& lease() const;
    std::uint32_t full_pages() const { return static_cast<std::uint32_t>(computed_ / world_.setup().page_size()); }

    Simulation& world_;
    Prompt prompt_;
    LeaseId id_ = 0;
    double born_ = 0;
    std::uint32_t matched_ = 0, hit_ = 0;  // pages
    std::uint64_t rows_ = 0;               // own mode: rows it asked for
    std::uint64_t computed_ = 0;           // tokens whose states are, or will be when what was submitted has run, in its rows
    std::uint32_t published_ = 0;          // pages
    Fence fence_ = 0;                      // its last batch
    bool write_ = true, gave_up_ = false, settled_ = false, over_ = false;

    struct Loading {
        std::uint64_t ticket;
        std::uint32_t first;
        std::vector<Row> blocks;
    };
    std::vector<SimDevice::RowBytes> expected(const Loading& loading) const;
    std::vector<Loading> loads_;
    std::vector<Row> blocks_;  // guest mode: of the pages it computed itself, from first_block_ on
    std::uint32_t first_block_ = 0;
    std::vector<std::uint64_t> saves_;
};

}  // namespace kvstrata::testing
