// The driver: the life of every page and lease, as a state machine. It owns the ledger and decides every move; it does no I/O itself,
// has no clock and no thread: step(now, what was finished) -> what to start. The runtime feeds it from real threads, the simulation
// from a seeded queue; both run this very code.
//
// Moves of a page: load (disk -> slab), up (slab -> device), down (device -> slab), spill (slab -> disk). At most one per page and
// target; whoever wants the same page joins. Loads and spills are Ops for the I/O; ups and downs surface as CopyBatches for the device.
#pragma once

#include <deque>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "health.hpp"
#include "io.hpp"
#include "ledger.hpp"
#include "purge_order.hpp"

namespace kvstrata {

using LeaseId = std::uint64_t;  // 0: none
using Fence = std::uint64_t;    // a batch of the engine, counted from 1; 0: nothing to wait for

struct DriverConfig {
    LedgerConfig ledger;
    bool disk = false;
    std::uint32_t copy_rows = 64;       // rows of one copy batch at most
    std::uint32_t saves_at_once = 512;  // rows on their way down: enough to keep a device busy. They cannot be evicted meanwhile
    std::uint32_t reads_at_once = 8;    // disk operations in flight
    std::uint32_t writes_at_once = 4;
    double read_deadline = 5;    // seconds until a load counts as failed and its slab row is quarantined
    double write_deadline = 30;  // seconds until the disk counts as ill
    double copy_deadline = 30;
    double engine_deadline = 600;  // of copies that wait for an engine's step, which may take minutes: engines give up before
    double note_uses_after = 60;   // seconds until another use of a page on disk is noted in its record
    double retry_after = 5;        // seconds that an unreadable page, a failing disk or a full one is left alone
    std::size_t key_bytes = 32;    // tests: fewer, so that different pages get equal keys
};

// A media item of a request: `length` tokens from `offset` on stand for the content with this digest.
struct MediaSpan {
    std::int64_t offset;
    std::int64_t length;
    Key digest;
};

struct LeaseRequest {
    Key space;
    std::span<const std::int32_t> tokens;
    std::span<const MediaSpan> media;
    std::uint64_t reserve = 0;   // tokens beyond `tokens` to hold rows for
    std::uint32_t leave = 1;     // tokens that stay uncached at least
    std::uint32_t multiple = 0;  // the hit is a multiple of this many tokens; 0: of a page
    bool read = true;
    bool write = true;
    bool load = true;  // false: the hit ends before the first page that is not in the home tier yet
};

struct LeaseAnswer {
    LeaseId id = 0;               // 0: the pool is full
    bool never = false;           // full, and no waiting will help
    std::uint32_t needed = 0;     // where it is full: rows of the device pool
    std::uint32_t available = 0;  // and rows that could be had
};

// What a lease holds at the moment.
struct Lease {
    PageId root = kNoPage;
    std::vector<std::int32_t> tokens;  // of the request, behind the first `dropped`
    std::uint64_t dropped = 0;
    std::vector<MediaSpan> media;
    std::vector<PageId> path;       // matched pages, then those it published
    std::vector<Row> rows;          // of the device pool, one per page of tokens + reserve (own mode)
    std::vector<std::uint8_t> own;  // the row is the lease's alone: no page of the forest has it
    std::vector<Tier> source;       // of the matched pages: the fastest tier each was in
    std::array<std::uint32_t, kTiers>
        deepest{};  // of the path: pages up to the last with a copy in the tier, as the lookup found it
    std::uint32_t multiple = 0;
    std::uint32_t matched = 0;  // pages found at the lookup
    std::uint32_t hit = 0;      // of them, pages that can still be served
    std::uint32_t missing = 0;  // of those, pages not in the home tier yet
    PageId pinned = kNoPage;
    bool write = true;
    bool settled = false;
    bool rows_lost = false;  // a failed load cost it rows that could not be replaced: give it back and ask again
    bool used = false;
};

struct CopyBatch {
    std::uint64_t ticket = 0;
    bool up = true;         // slab -> device
    std::vector<Row> slab;  // row by row
    std::vector<Row> device;
    Fence fence = 0;  // up: batches up to it may still read the destination rows; down: batches up to it write the source rows
};

// Rows of the slab that a caller fills himself, and the pages of his prompt, by number, that they are for.
struct RawRows {
    std::uint64_t ticket = 0;  // 0: there are none
    std::vector<Row> pages, rows;
    std::uint32_t next = 0;  // the first page that was not looked at: before it, all are there or among these
};

struct Submissions {
    std::vector<Op> ops;
    std::vector<CopyBatch> copies;
};

// Why a prompt hits as far as it does.
enum class PlaceInTier : std::uint8_t { none, coming, there, left_alone };  // left alone: it could not be read just now
struct Explanation {
    struct Page {
        PlaceInTier gpu = PlaceInTier::none, cpu = PlaceInTier::none, disk = PlaceInTier::none;
        bool nowhere() const { return gpu == PlaceInTier::none && cpu == PlaceInTier::none && disk == PlaceInTier::none; }
    };
    std::vector<Page> pages;  // that are somewhere, from the first on
    // Of the page below the last of them that agrees longest with what the prompt goes on with; empty: none is known.
    std::vector<std::int32_t> closest;
    std::uint32_t same = 0;  // its first tokens that agree
};

struct DriverCounters {
    std::array<std::uint64_t, kTiers> looked_up{};  // pages that lookups found, by tier
    std::array<std::uint64_t, kTiers> loaded{};     // of them, pages that were brought to the home tier in time
    std::array<std::uint64_t, kTiers> used{};       // of those, pages that a computation continued from
    std::uint64_t leases = 0, full = 0, missed_pages = 0;
    std::uint64_t key_conflicts = 0, corrupt = 0, unreadable = 0, stale = 0, timeouts = 0, copy_failures = 0;
    std::uint64_t saves_dropped = 0;   // pages that left the device before they could be saved
    std::uint64_t spills_dropped = 0;  // pages not written to disk: it was full, ill or too slow
    std::uint64_t duplicates = 0;      // pages published twice: the first writer won
    std::uint64_t late_completions = 0;
    std::uint64_t reads = 0, writes = 0, ups = 0, downs = 0;  // moves finished well, in pages
};

class Driver {
   public:
    Driver(const DriverConfig& config, std::unique_ptr<Policy> policy);

    // --- leases (leases.cpp, hits.cpp, guests.cpp). None blocks, none fails on an unknown or released id: that is a no-op.
    LeaseAnswer lease(double now, const LeaseRequest& request);
    const Lease* find(LeaseId id) const;
    void append(LeaseId id, std::span<const std::int32_t> tokens);
    bool grow(double now, LeaseId id, std::uint64_t tokens);  // rows for so many more tokens, or false and nothing changed
    void settle(double now, LeaseId id);                      // give up what is not on its way to the device yet
    std::uint32_t publish(double now, LeaseId id, std::uint64_t tokens, Fence ready);  // pages published by this lease and its hit
    void release(double now, LeaseId id, Fence fence);
    // Guest mode: copies between pages of the lease and device blocks that the engine owns. A ticket, or 0: nothing to copy.
    std::uint64_t load(double now, LeaseId id, std::uint32_t first_page, std::span<const Row> blocks);
    std::uint64_t save(double now, LeaseId id, std::uint32_t first_page, std::span<const Row> blocks, Fence ready);

    // --- pages that a caller carries to and from the slab himself, without the device, in either mode (raw.cpp)
    // Rows for the pages from `first` on that neither slab nor disk hold, as many as there is room for; copied(ticket) when they are
    // written, or will not be.
    RawRows put(double now, const Key& space, std::span<const std::int32_t> tokens, std::uint32_t first);
    bool room_to_put() const;
    bool writes_paused() const { return writes_again_at_ > now_; }  // the disk is full, ill or hangs: nothing that waits is written
    std::uint32_t cold_pages(double now, const Key& space, std::span<const std::int32_t> tokens);  // from the first on
    // Brings at most `most` pages from `first` on to the slab, and keeps them there until end_fetch(). 0: slab and disk do not have the
    // first of them.
    std::uint64_t fetch(double now, const Key& space, std::span<const std::int32_t> tokens, std::uint32_t first,
                        std::uint32_t most);
    bool fetched(std::uint64_t id) const;                   // none of them is on its way any more
    std::vector<Row> fetched_rows(std::uint64_t id) const;  // of those that came, from the first on
    void end_fetch(double now, std::uint64_t id);

    // --- moves (moves.cpp, completions.cpp, deadlines.cpp, discovery.cpp)
    Submissions step(double now, std::span<Completion> done);
    void copied(double now, std::uint64_t ticket, bool ok);
    // Neither reported nor given up.
    bool copying(std::uint64_t ticket) const {
        const auto copy = copies_.find(ticket);
        return copy != copies_.end() && !copy->second.abandoned;
    }
    // The device copies that bring what the lease still misses. False: something it misses is not being copied yet.
    bool copies_of(LeaseId id, std::vector<std::uint64_t>& tickets) const;
    double next_deadline() const;  // when step() should be called even if nothing finished; infinity: no need
    bool idle() const;             // nothing is moving and nothing waits that could move

    // Pages and slots that the shelf held when it was opened; oldest first.
    void expect_found(std::size_t pages) { ledger_.expect_found(pages); }
    bool add_found(const Key& key, const Key& parent, SlotRef slot);  // false: its parent is not known yet
    void link_found(const Key& key, const Key& parent);
    void add_slot(SlotRef slot) { ledger_.add_slot(slot); }
    // The segment's file is gone: its pages are forgotten, those that are being read or written when that ends. Pages that are in memory
    // too are written again when they are used.
    void retire_segment(std::uint32_t segment) { ledger_.retire_segment(segment); }
    // A page in another process's slot; `first`: where we have it too, theirs is the copy that is kept. False: its parent is not known yet.
    bool add_shared(const Key& key, const Key& parent, SlotRef slot, bool first);
    void slot_gone(SlotRef slot) { ledger_.slot_gone(slot); }                      // of another process: it holds something else
    void adopt_segment(std::uint32_t segment) { ledger_.adopt_segment(segment); }  // of another process: it is ours now
    void try_again();                                                              // there may be room now

    // Pages on disk that were used since the last call, each at most once in note_uses_after seconds.
    std::vector<SlotUse> take_uses() { return std::exchange(uses_, {}); }

    // --- dropping what people name (drops.cpp)
    // Copies in memory. Orders by age or size name none of them.
    MemoryDrops drop_pages(double now, const PurgeOrder& order);
    // Takes a slot out of use, so that it can be overwritten, and forgets its page. `page`: what its record names, nullptr: nothing.
    // False: it is being read or written, or holds something else by now. add_slot() gives it back.
    bool claim_slot(double now, SlotRef slot, const Key* page);

    // For people (explain.cpp); costs a look at every page in memory.
    Explanation explain(double now, const Key& space, std::span<const std::int32_t> tokens, std::span<const MediaSpan> media);

    const Ledger& ledger() const { return ledger_; }
    Ledger& ledger() { return ledger_; }
    const DriverCounters& counters() const { return counters_; }
    const DiskHealth& health() const { return health_; }
    std::size_t leases() const { return leases_.size(); }
    bool check_integrity(std::string& fault) const;

   private:
    struct DiskMove {
        OpKind kind;
        PageId page = kNoPage;
        EntryId entry = kNoEntry;
        SlotRef slot;
        Row row = kNoRow;
        double deadline = 0;
        bool abandoned = false;  // given up; what it borrowed stays quarantined until it completes after all
    };
    struct CopyMove {
        bool up = true;
        bool guest = false;  // the device rows are the engine's
        std::vector<PageId> pages;
        std::vector<Row> slab, device;
        double deadline = 0;
        bool abandoned = false;
    };
    struct Waiting {  // a queued page; stale when the record began another life
        PageId page;
        std::uint32_t generation;
        double since;
    };

    void find_closest(PageId above, std::span<const std::int32_t> rest, Explanation& found) const;
    bool own_mode() const { return ledger_.home() == Tier::gpu; }
    bool may_dirty(std::size_t more) const;
    bool cpu_tier() const { return ledger_.capacity(Tier::cpu) > 0; }
    bool valid(const Waiting& item) const;
    Waiting waiting(PageId page) const { return {page, ledger_.forest().at(page).generation, now_}; }

    // leases.cpp, hits.cpp
    Content content(std::span<const std::int32_t> tokens, std::int64_t begin, const std::vector<MediaSpan>& media);
    Content content(const Lease& lease, std::uint32_t page);
    Key key_below(const Lease& lease, PageId above, const Content& content) const;
    struct Found {
        bool all_home = true;                   // every page of the path is in the home tier
        std::vector<std::uint32_t> look_again;  // pages of the path whose copy on disk is missing, or to be noted as used
    };
    Found find_path(Lease& lease, std::span<const std::int32_t> tokens, std::uint32_t limit, bool load);
    void cut_path(Lease& lease, std::uint32_t pages);
    bool take_rows(Lease& lease, std::uint32_t total, bool all_home, LeaseAnswer& answer);
    void used(const Lease& lease);
    static void tally(const Lease& lease, std::array<std::uint64_t, kTiers>& counter);
    void expect_all(Lease& lease, LeaseId id);
    std::vector<PageId> in_use() const;
    void shorten(Lease& lease, LeaseId id, std::uint32_t pages);
    Row give_up_page(const Lease& lease, LeaseId id, std::uint32_t index);
    void move_pin(Lease& lease);
    void arrived_home(PageId page);
    void fail_page(PageId page);
    void check_settled(Lease& lease);

    // raw.cpp
    Lease prompt_of(const Key& space, std::span<const std::int32_t> tokens);
    PageId cold_child(const Lease& prompt, PageId above, std::uint32_t index);

    // moves.cpp, completions.cpp, deadlines.cpp
    void want(PageId page);  // start, queue or join what brings the page to the home tier
    void queue_load(PageId page);
    void queue_up(PageId page);
    void queue_down(PageId page);
    void queue_spill(PageId page);
    void save_instead(PageId page);
    void save_again(PageId page);
    void note_use_of(EntryId entry);
    void note_use(PageId page);
    bool on_disk(PageId page);
    bool disk_moving() const;
    void pump_loads();
    void drop_load(PageId page);
    void pump_ups();
    void pump_downs();
    void pump_spills();
    std::uint64_t start_copy(CopyMove&& move, Fence fence);
    void submit(DiskMove&& move, double deadline);
    PageImage image(PageId page) const;
    void finish(Completion& done);
    void finish_read(const DiskMove& move, const Completion& done);
    void finish_write(const DiskMove& move, const Completion& done);
    void finish_grow(const Completion& done);
    void finish_copy(CopyMove& move, bool ok);
    void end_use(const DiskMove& move);
    bool moved_away(const DiskMove& move) const;
    void give_up_load(const DiskMove& move, const Completion& done);
    void clear(SlotRef slot);
    void finish_late(const DiskMove& move, const Completion& done);
    void expire();
    void abandon(DiskMove& move);
    void abandon(CopyMove& move);
    void pause_writes(DiskHealth::Trouble trouble, int error);

    DriverConfig config_;
    Ledger ledger_;
    double now_ = 0;
    std::unordered_map<LeaseId, Lease> leases_;
    std::unordered_map<PageId, std::vector<LeaseId>> waiters_;  // of pages that are not in the home tier yet
    std::unordered_map<std::uint64_t, std::vector<PageId>> fetches_;
    std::unordered_map<PageId, std::uint32_t> readers_;  // how many fetches have the page
    std::map<std::uint64_t, DiskMove> disk_moves_;       // by id: what expires together fails in the order it was started
    std::map<std::uint64_t, CopyMove> copies_;
    std::unordered_set<PageId> uploading_;  // an up is queued or under way: the slab copy is held
    std::deque<Waiting> loads_, ups_, downs_, spills_;
    std::uint32_t reads_in_flight_ = 0, writes_in_flight_ = 0;  // those that hang included: no more than so many rows can be stuck
    std::uint32_t stuck_reads_ = 0, stuck_writes_ = 0;          // of them, abandoned ones
    std::uint32_t dirty_ = 0;                                   // slab rows that wait to be written, or are being
    std::uint32_t saving_ = 0;                                  // slab rows that are being filled
    bool no_row_to_load_ = false;                               // the first load waits for a slab row
    bool growing_ = false;
    double grow_again_at_ = 0, writes_again_at_ = 0;
    std::uint32_t timeouts_in_a_row_ = 0;
    DiskHealth health_;
    Fence released_ = 0;  // the latest batch that a released lease may still be read by
    std::uint64_t next_id_ = 1;
    Submissions out_;
    std::vector<SlotUse> uses_;
    std::vector<MediaItem> media_scratch_;
    DriverCounters counters_;
};

}  // namespace kvstrata
