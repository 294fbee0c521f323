// Purging the segments that this process uses.
#include <map>

#include "purge.hpp"
#include "segments.hpp"

namespace kvstrata {
namespace {

constexpr std::chrono::milliseconds kLockPatience{1500};
constexpr std::chrono::milliseconds kGripPatience{1000};

// Slots by file, as the purge of a shelf names them. Of files that hold no slots of ours nobody uses any.
class Claims final : public SlotClaims {
   public:
    Claims(std::map<std::string, std::uint32_t> numbers, bool known, ShelfClaims& claims)
        : numbers_(std::move(numbers)), known_(known), claims_(claims) {}

    bool claim(const std::string& segment, std::uint32_t slot, const Key* page) override {
        const auto number = numbers_.find(segment);
        return number == numbers_.end() ? known_ : claims_.claim({number->second, slot}, page);
    }
    void done(const std::string& segment, std::uint32_t slot) override {
        if (const auto number = numbers_.find(segment); number != numbers_.end()) claims_.done({number->second, slot});
    }

   private:
    const std::map<std::string, std::uint32_t> numbers_;
    const bool known_;  // a segment of ours: of another shape, where it has no number
    ShelfClaims& claims_;
};

}  // namespace

void Segments::purge(PurgeOrder order, ShelfClaims& claims, PurgeReport& report) {
    write_uses();
    if (order.kind == PurgeOrder::Kind::prefix) add_continuations(disk_, survey(disk_, std::chrono::milliseconds{100}), order);
    const auto go_on = [&] { return !claims.over() && !closed(); };
    if (order.kind == PurgeOrder::Kind::to_size) {
        const Grip grip(*this, kGripPatience);
        if (!grip) return report.failed(-EBUSY, "a shelf that is busy");
        give_back_to(order.bytes, claims, report);
        report.cancelled |= !go_on();
        return;
    }
    std::unique_lock one(purge_mutex_, std::defer_lock);
    while (!one.try_lock()) {
        report.cancelled = !go_on();
        if (report.cancelled) return;
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
    finish_rebuilding(claims, go_on);
    std::vector<OwnedShelf> shelves;  // ours to the end of this, though they are given up meanwhile
    {
        const Grip grip(*this, kGripPatience);
        if (!grip) return report.failed(-EBUSY, "a shelf that is busy");
        shelves = owned_;
    }
    for (const OwnedShelf& shelf : shelves) {
        std::vector<DirEntry> entries;
        if (const int error = disk_->list(shelf.path, entries); error != 0) report.failed(error, shelf.path);
        for (const DirEntry& entry : entries) {
            if (report.cancelled || !go_on()) {
                report.cancelled = true;
                return;
            }
            if (!entry.directory && segment_number(entry.name) != 0) purge_one(shelf, entry, order, claims, report, go_on);
        }
    }
    report.cancelled |= !go_on();  // then they may not have been ours any more
}

// The segment is neither formatted nor given back meanwhile; everything else goes on.
void Segments::purge_one(const OwnedShelf& shelf, const DirEntry& file, const PurgeOrder& order, ShelfClaims& claims,
                         PurgeReport& report, const std::function<bool()>& go_on) {
    const std::string path = shelf.path + "/" + file.name;
    struct Purged {  // whatever becomes of it
        ~Purged() {
            const std::unique_lock lock(segments.mutex_);
            segments.purged_.reset();
        }
        Segments& segments;
    } purged{*this};
    std::map<std::string, std::uint32_t> number;
    std::shared_ptr<Segment> segment;
    const auto end = std::chrono::steady_clock::now() + kGripPatience;
    const auto being_made = [&] {  // it is about to become another segment, or none
        const std::shared_lock lock(mutex_);
        return made_ == path;
    };
    for (;;) {
        while (being_made()) {
            if (!go_on() || std::chrono::steady_clock::now() >= end) return report.failed(-EBUSY, path);
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
        const std::unique_lock lock(mutex_);
        if (made_ == path) continue;
        for (const List* list : {&segments_, &others_, &damaged_}) {
            for (std::uint32_t i = 0; i < list->size() && !segment; ++i) {
                if (!(*list)[i] || (*list)[i]->path() != path) continue;
                segment = (*list)[i];
                if (list == &segments_) number.emplace(path, i);
            }
        }
        purged_ = segment;
        break;
    }
    Claims by_file(std::move(number), segment != nullptr, claims);
    purge_segment(disk_, shelf, file, order, &by_file, report, go_on);
    if (segment) segment->tell();
}

// What waits to be rebuilt holds pages that nobody can name before.
void Segments::finish_rebuilding(ShelfClaims& claims, const std::function<bool()>& go_on) {
    while (has_news() && go_on()) {
        ShelfNews news = next_news();
        if (news.nothing())
            std::this_thread::sleep_for(std::chrono::milliseconds{1});  // another thread is at it
        else
            claims.heard(std::move(news));
        if (poll_due_) std::this_thread::sleep_for(std::chrono::milliseconds{2});  // others wait for that
    }
}

// The least valuable segments, until everybody together takes so much, or we alone our share of it.
void Segments::give_back_to(std::uint64_t bytes, ShelfClaims& claims, PurgeReport& report) {
    const Directory::Hold hold(directory_, kLockPatience);
    std::vector<Neighbour> neighbours;
    std::uint64_t taken = 0;
    int error = hold.error;
    if (error == 0) error = directory_.look(owned_, neighbours);
    if (error == 0) error = directory_.taken_bytes(taken);
    if (error != 0) return report.failed(error, ".");
    std::uint64_t held = allocated_bytes();
    for (const Neighbour& one : neighbours) {
        if (one.alive && one.path == "shelves/" + hex64(one.record.home)) held += one.record.holds;
    }
    const std::uint64_t rest = taken - std::min(taken, held);  // what is no segment of anybody stays
    const std::uint64_t share = (bytes - std::min(bytes, rest)) / owners_of(neighbours).count;
    while (taken > bytes && allocated_bytes() > share && !claims.over()) {
        ShelfNews news;
        const std::uint64_t freed = give_back(news, &report);
        if (freed == 0) return;
        for (const std::uint32_t segment : news.vanished) claims.retired(segment);
        ++report.segments;
        report.freed += freed;
        taken -= std::min(taken, freed);
    }
}

void Segments::count_pages(const Segment& segment, PurgeReport& into) const {
    SegmentFile file(disk_, segment.path(), segment.file_bytes());
    if (file.open() != 0 || file.state() != HeaderState::sound) return;
    file.for_each([&](std::uint32_t, RecordState state, const Record&, std::uint32_t) {
        into.pages += state == RecordState::page;
        into.bytes += state == RecordState::page ? file.shape().slot_bytes() : 0;
        return true;
    });
}

// Carried out a second time, on shelves that were taken over since: who asked hears of both together.
void Segments::answer(PurgeAnswer answer) {
    const Grip grip(*this, kGripPatience);
    if (!grip) return;  // who asked counts what he finds
    if (answer.request == answered_.request) answer.also_did(answered_);
    answer_ = answered_ = answer;
    write_record();
}

std::vector<std::string> Segments::own_shelves() {
    const Grip grip(*this, kGripPatience);
    std::vector<std::string> names;
    if (!grip) return names;
    for (const OwnedShelf& shelf : owned_) names.push_back(shelf.path.substr(shelf.path.rfind('/') + 1));
    return names;
}

}  // namespace kvstrata
