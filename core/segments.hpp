// The segments this process owns, and those of others that it reads: adopting them, finding them by number, making more within the
// directory's cap, giving back what others have a right to.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "directory.hpp"
#include "purge_order.hpp"
#include "segment.hpp"

namespace kvstrata {

class Segments {
   public:
    Segments(const std::shared_ptr<Disk>& disk, const ShelfConfig& config);

    // Adopts every orphaned shelf, reads the tables, brings the directory under the cap. Empty, or a sentence that says what is wrong.
    std::string open();
    std::vector<FoundPage> take_found() { return std::exchange(found_, {}); }
    std::vector<SlotRef> take_empty() { return std::exchange(empty_, {}); }

    // The segment of a slot, nullptr when there is no such slot. What is returned stays usable, and its shelf owned, while it is held.
    std::shared_ptr<Segment> find(const SlotRef& slot) const;
    // Adds one segment's slots to `into`: a new file, or one of another shape taken over when the cap or the free space forbids that.
    OpStatus grow(std::vector<SlotRef>& into, int& error);

    // In the background (segments_news.cpp), as the shelf says.
    bool has_news() const { return news_left_.load(std::memory_order_relaxed) + changed_left_.load(std::memory_order_relaxed) > 0; }
    ShelfNews next_news();
    void check_files();
    // An operation on the segment found no file. After a few times it is given up.
    void missed(std::uint32_t index, const std::shared_ptr<Segment>& segment);

    void describe(const Key& space, std::string json);
    void note_uses(std::vector<SlotUse> uses);
    // As the shelf says (segments_purge.cpp).
    void purge(PurgeOrder order, ShelfClaims& claims, PurgeReport& report);
    void answer(PurgeAnswer answer);
    bool still_asked(std::uint64_t request) const { return read_request(disk_).id == request; }
    std::vector<std::string> own_shelves();
    // Other processes (segments_shared.cpp), as the shelf says.
    ShelfNews poll();
    ShelfNews take_first();
    bool precedes(const SlotRef& one, const SlotRef& other) const;

    int sync();  // all of them; 0 or -errno of the first that failed

    std::uint64_t allocated_bytes() const;
    ShelfStats stats() const;
    void close();

   private:
    using List = std::vector<std::shared_ptr<Segment>>;
    struct Rebuild {
        std::shared_ptr<Segment> segment;
        std::uint32_t index = kNoSegment;  // in segments_; none: its header block comes first
        std::uint64_t epoch = 0;           // for that one
        std::vector<std::uint32_t> slots;  // still to be looked at, from the back
    };
    static constexpr std::uint32_t kNoSegment = ~std::uint32_t{0};
    struct Told {  // a segment of another process, as we told the driver
        std::uint32_t index = kNoSegment;
        std::vector<std::uint64_t> pages;  // by slot: of the page's key, 0: none
    };
    using ToldSegments = std::map<std::uint32_t, Told>;  // by number
    struct Other {                                       // a shelf of another process
        std::shared_ptr<File> changes;
        std::vector<std::uint64_t> counters;
        ToldSegments segments;
    };
    // grow_mutex_, for whoever works long under it. close() does not wait: who has it then gives up, when done, what we own.
    class Grip {
       public:
        explicit Grip(Segments& segments) : segments_(segments), lock_(segments.grow_mutex_) {}
        // Not had, where somebody has it for longer: a grow that hangs in the file system, for one.
        Grip(Segments& segments, std::chrono::milliseconds patience)
            : segments_(segments), lock_(segments.grow_mutex_, std::defer_lock) {
            const auto end = std::chrono::steady_clock::now() + patience;
            while (!lock_.try_lock() && std::chrono::steady_clock::now() < end)
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
        ~Grip() {
            if (!lock_) return;
            lock_.unlock();
            segments_.give_up();
        }
        explicit operator bool() const { return lock_.owns_lock(); }

       private:
        Segments& segments_;
        std::unique_lock<std::mutex> lock_;
    };
    struct Owners {
        std::uint64_t count = 1;  // processes, this one among them
        std::uint64_t cap = 0;    // the smallest of any
        std::uint64_t wants = 0;  // of others
        bool holds_most = true;   // nobody else holds more than we do
        std::uint64_t share() const { return cap / count; }
    };

    std::string sentence(const std::string& cause, const std::string& fix) const;
    std::string lock_trouble(int error) const;
    void load(const OwnedShelf& shelf, ToldSegments told, ShelfNews& news);
    int shrink();
    void name_namespace(std::uint64_t taken, std::uint64_t cap);
    void write_descriptions();
    void write_uses();
    void drop_empty_shelves();
    void give_up();
    void leave(std::vector<OwnedShelf> shelves);
    int make(std::shared_ptr<Segment>& into);
    int create(std::string& path);
    int format(Segment& segment);
    int remove(const std::shared_ptr<Segment>& victim);
    std::shared_ptr<Segment> take_other();
    void add(const std::shared_ptr<Segment>& segment, std::vector<SlotRef>& into);
    bool closed() const;
    std::pair<int, std::uint32_t> rank(const std::shared_ptr<Segment>& segment) const;
    List::iterator least_valuable(List& among) const;
    void rebuild_header(Rebuild& rebuild);
    void rebuild_slots(Rebuild& rebuild, ShelfNews& news);
    void vanish(std::uint32_t index);

    // segments_shared.cpp
    Owners owners_of(const std::vector<Neighbour>& neighbours) const;
    void take_home();
    void write_record();
    void await_others();
    bool count_changes(const std::string& shelf, Other& other);
    void meet(const std::string& shelf);
    void look_round(ShelfNews& news);
    void forget(const Other& other, ShelfNews& news);
    void count_left();
    void read_again(std::size_t pages, ShelfNews& news);
    void read_shared(const std::string& shelf, std::uint32_t number, const DirEntry* file, ShelfNews& news);
    bool adopt_now(const std::string& shelf, ShelfNews& news);
    void keep_to(const Owners& owners, ShelfNews& news);
    std::uint64_t give_back(ShelfNews& news, PurgeReport* report = nullptr);
    void count_pages(const Segment& segment, PurgeReport& into) const;
    void give_back_to(std::uint64_t bytes, ShelfClaims& claims, PurgeReport& report);
    void purge_one(const OwnedShelf& shelf, const DirEntry& file, const PurgeOrder& order, ShelfClaims& claims, PurgeReport& report,
                   const std::function<bool()>& go_on);
    void finish_rebuilding(ShelfClaims& claims, const std::function<bool()>& go_on);

    const ShelfConfig config_;
    const Shape shape_;
    const SegmentPlan plan_;  // of the segments made here
    const std::shared_ptr<Disk> disk_;
    const std::shared_ptr<Handles> handles_;

    std::mutex grow_mutex_;  // one grow at a time; guards what only open and grow touch
    Directory directory_;
    std::vector<OwnedShelf> owned_;  // new segments go into the first
    std::uint64_t wants_ = 0;        // what others are asked to make room for
    int wanted_for_ = 0;             // polls since
    std::uint64_t keeps_to_;         // the cap
    OwnerRecord record_;             // as it was written last
    PurgeAnswer answer_;             // as others read it: none, when a shelf was taken over since
    PurgeAnswer answered_;           // the latest that was given
    std::uint64_t request_ = 0;      // the latest that we saw
    std::vector<FoundPage> found_;
    std::vector<SlotRef> empty_;

    mutable std::shared_mutex mutex_;              // guards what follows; held for moments, never during I/O
    List segments_;                                // by SlotRef::segment; of our shape, others' among them; nullptr: removed
    List others_;                                  // of another shape, or blank
    List damaged_;                                 // nobody knows yet
    std::vector<std::weak_ptr<Segment>> leaving_;  // removed; operations may still use them
    std::vector<std::uint32_t> vanished_;
    std::vector<std::pair<Key, std::string>> to_describe_;
    std::vector<SlotUse> uses_;  // not written down yet
    ShelfStats stats_;
    bool closed_ = false;
    bool empty_when_closed_ = false;

    std::mutex purge_mutex_;           // one purge at a time
    std::string made_;                 // the file that a grow makes, formats or removes just now; under mutex_
    std::shared_ptr<Segment> purged_;  // just now; under mutex_

    std::mutex news_mutex_;  // one piece of background work at a time
    std::deque<Rebuild> rebuilds_;
    std::map<std::string, Other> others_shelves_;              // by path
    std::atomic<bool> poll_due_{false};                        // somebody waits for news_mutex_ to look at others
    std::set<std::pair<std::string, std::uint32_t>> changed_;  // segments of theirs to be read again
    std::uint64_t generation_ = 0;                             // of the list of shelves, as we saw it last
    bool look_due_ = true;
    unsigned polls_ = 0;
    ShelfNews first_;                           // what was learnt of others while opening
    std::atomic<std::size_t> news_left_{0};     // rebuilds and vanished segments
    std::atomic<std::size_t> changed_left_{0};  // segments of others to be read again, and what was learnt at first
};

}  // namespace kvstrata
