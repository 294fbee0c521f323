// The lines that keep a fault from happening, one guard each. In the core that is shipped they are constants. A build for the tests
// alone (KVSTRATA_UNGUARDED) leaves out the one that the environment names: so the tests prove that the line is needed, and that
// they would see the fault.
#pragma once

#include <cstdint>

namespace kvstrata {

enum class Guard : std::uint8_t {
    publish_after_place,    // a copy is findable when its bytes are there, not before
    completion_generation,  // what ends after its deadline is not taken for the move that is expected now
    pins,                   // what a request uses is nobody's victim
    copy_holds,             // nor is what is being copied
    leaf_first,             // nor what others in its tier are below of
    reserve_before_write,   // a slot belongs to one page from before it is written
    join_moves,             // a page that is on its way is not sent for again
    first_writer,           // who publishes a page that is there keeps its own row to itself
    deadline,               // what hangs is given up
    name_space,             // tokens of another model, adapter or tenant are other tokens
    release_on_cancel,      // a lease that ends early gives up what it waits for
    ready_fence,            // a copy from the device waits for the batch that wrote the pages
    room_first,             // nothing is evicted for a request that does not fit in the end
    half_the_slab,          // rows that wait for the disk leave some to others
    no_cpu_tier,            // without one nothing is saved there
    failed_write,           // a write that failed stored nothing
    found_slots,            // what an earlier process stored is not free
    written_once,           // what the disk has is not written again
};

#ifdef KVSTRATA_UNGUARDED
bool guarded(Guard guard);
#else
constexpr bool guarded(Guard) { return true; }
#endif

}  // namespace kvstrata
