// Purging a directory: shelf by shelf, then what belongs to no shelf.
#include "purge.hpp"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "survey.hpp"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLockPatience{1500}, kLeastLockPatience{100};  // with those who hold the directory's lock, in all

// Whether no page of any namespace can have been overlooked.
bool knows_all_pages(const Survey& all) {
    return all.error == 0 && std::ranges::all_of(all.shelves, [](const ShelfSurvey& shelf) {
               return shelf.error == 0 && std::ranges::all_of(shelf.segments, [](const SegmentSurvey& segment) {
                          return segment.error == 0 && segment.damaged_records == 0 && segment.state != HeaderState::damaged;
                      });
           });
}

class Purge {
   public:
    Purge(std::shared_ptr<Disk> disk, PurgeOrder&& order, const Progress& progress, const std::vector<std::string>& ours,
          milliseconds patience, const std::function<void()>& meanwhile)
        : disk_(std::move(disk)),
          order_(std::move(order)),
          progress_(progress),
          ours_(ours),
          meanwhile_(meanwhile),
          end_(Clock::now() + patience),
          lock_left_(std::clamp(patience, kLeastLockPatience, kLockPatience)),
          directory_(disk_, 0) {}

    PurgeReport run() {
        if (const int error = directory_.open(); error != 0) {
            report_.failed(error, ".");
            return report_;
        }
        // One at a time, before any shelf is taken: who holds shelves of the dead is waited for as their owner.
        const int asking = begin_asking();
        if (asking == -EWOULDBLOCK) {
            report_.failed(asking, PurgeRequest::kPath);
            return report_;
        }
        const Survey before = survey(disk_, lock_left_);
        if (before.error != 0) {
            report_.failed(before.error, ".");
            return report_;
        }
        PurgeRequest request = new_request();
        request.order = order_;
        if (order_.kind == PurgeOrder::Kind::prefix) add_continuations(disk_, before, order_);
        for (const ShelfSurvey& shelf : before.shelves) take(shelf);
        const bool to_size = order_.kind == PurgeOrder::Kind::to_size;
        if (!to_size) ask(request, asking);
        if (meanwhile_) meanwhile_();
        if (to_size) {
            shrink();
            std::uint64_t taken = 0;
            if (directory_.taken_bytes(taken) == 0 && taken > order_.bytes) ask(request, asking);
        } else {
            const SlotDone done = [this] { return step(); };
            for (const OwnedShelf& shelf : owned_) {
                if (!report_.cancelled) purge_shelf(disk_, shelf, order_, nullptr, report_, done);
            }
        }
        await_answers(request.id);
        ask_for_the_rest();
        take_back();
        for (const auto& [owner, answer] : answers_) add(answer);
        if (!to_size || asked_) report_.unanswered = used_.size();
        for (const ShelfSurvey* shelf : used_) count_used(*shelf);
        if (partly_asked_) report_.used_pages += pages_among(disk_, before, order_.keys).size();
        drop_what_is_empty();
        directory_.taken_bytes(report_.allocated);
        return report_;
    }

   private:
    void take(const ShelfSurvey& shelf) {
        if (std::ranges::find(ours_, shelf.id) != ours_.end()) return;
        OwnedShelf owned;
        const std::string path = "shelves/" + shelf.id;
        int error = -EWOULDBLOCK;
        if (!shelf.alive) error = with_lock([&] { return directory_.take(path, owned); });
        if (error == 0) {
            owned_.push_back(std::move(owned));
            for (const SegmentSurvey& segment : shelf.segments) total_ += segment.slots;
        } else if (error == -EWOULDBLOCK) {
            used_.push_back(&shelf);
        } else {
            report_.failed(error, path);
        }
    }

    // -EWOULDBLOCK: another purge is under way, and goes on for longer than we wait. Nobody can be asked after any other error, on a full
    // disk for example, but shelves without an owner can be purged.
    int begin_asking() {
        int error = 0;
        requests_ = File::open(disk_, PurgeRequest::kPath, OpenMode::create, error);
        // Won and emptied in one, under the lock that owners read it under: what a purge that was killed asked must not count as asked.
        const auto win = [&] {
            const int lost = disk_->lock(requests_->handle());
            return lost != 0 ? lost : disk_->truncate(requests_->handle(), 0);
        };
        while (requests_ && (error = with_lock(win)) == -EWOULDBLOCK && left() > milliseconds{0})
            std::this_thread::sleep_for(milliseconds{2});
        if (error != 0) requests_.reset();
        return error;
    }

    PurgeRequest new_request() {
        const std::uint64_t from = ours_.empty() ? 0 : std::strtoull(ours_.front().c_str(), nullptr, 16);
        return {.id = directory_.random() | 1, .from = from, .order = {}};
    }

    // The owners that live. They look within a second, and answer when they have done it.
    void ask(PurgeRequest& request, int error) {
        if (used_.empty()) return;
        if (error == 0) {
            error = with_lock([&] {
                // With all keys, where there is room for them: who drops a page first takes the link to what continues it elsewhere.
                const bool all = has_room(order_.keys.size());
                partly_asked_ = !all && request.order.keys.size() < order_.keys.size();
                if (all) request.order.keys = order_.keys;
                if (!all && !has_room(request.order.keys.size())) return -EDQUOT;
                asked_ = true;  // half a request is taken back too
                const int written = write_request(*requests_, request);
                if (written == 0) directory_.shelves_changed();
                return written;
            });
        }
        if (error != 0) report_.failed(error, PurgeRequest::kPath);
    }

    // Where there was no room to name all pages of a prefix, who looked late found the links to some of them gone: those that are left are
    // asked for by their own names, as many at a time as there is room for, as long as that helps.
    void ask_for_the_rest() {
        for (std::size_t before = order_.keys.size() + 1; partly_asked_ && used_.empty() && !report_.cancelled;) {
            const Survey& now = later_.emplace_back(survey(disk_, lock_left_));
            const std::set<Key, KeyOrder> rest = pages_among(disk_, now, order_.keys);
            partly_asked_ = !rest.empty();
            if (rest.size() >= before || rest.empty() || left() == milliseconds{0}) return;
            before = rest.size();
            for (const ShelfSurvey& shelf : now.shelves) {
                Survey one;
                one.shelves.push_back(shelf);
                if (shelf.alive && !owned_by_us(shelf) && !pages_among(disk_, one, rest).empty()) used_.push_back(&shelf);
            }
            if (used_.empty()) return;
            PurgeRequest request = new_request();
            request.order.kind = PurgeOrder::Kind::prefix;
            const int error = with_lock([&] {
                std::size_t count = rest.size();
                while (!has_room(count)) count /= 2;
                request.order.keys = {rest.begin(), std::next(rest.begin(), std::ptrdiff_t(count))};
                const int written = write_request(*requests_, request);
                if (written == 0) directory_.shelves_changed();
                return written;
            });
            if (error != 0) return report_.failed(error, PurgeRequest::kPath);
            await_answers(request.id);
        }
    }

    bool owned_by_us(const ShelfSurvey& shelf) const {
        return std::ranges::find(ours_, shelf.id) != ours_.end() ||
               std::ranges::any_of(owned_, [&](const OwnedShelf& owned) { return owned.path == "shelves/" + shelf.id; });
    }

    bool has_room(std::size_t keys) {
        std::uint64_t taken = 0;
        std::vector<Neighbour> neighbours;
        if (PurgeRequest::bytes(keys) <= kBlockBytes) return true;  // for one block everybody leaves room
        if (keys > PurgeRequest::kMostKeys || directory_.taken_bytes(taken) != 0 || directory_.look({}, neighbours) != 0)
            return false;
        return std::ranges::all_of(neighbours, [&](const Neighbour& one) {
            return !one.alive || one.record.home == 0 || taken + round_up(PurgeRequest::bytes(keys), kBlockBytes) <= one.record.cap;
        });
    }

    void await_answers(std::uint64_t request) {
        std::map<std::uint64_t, PurgeAnswer> answers;  // by home. Who takes another's shelf over meanwhile answers again, for both
        for (bool last = !asked_; !used_.empty() && !report_.cancelled && !last;) {
            last = left() == milliseconds{0};  // what was done meanwhile may have taken longer than the patience: look once
            if (!last) std::this_thread::sleep_for(milliseconds{10});
            report_.cancelled = progress_ && !progress_(std::min(done_, total_), total_);
            std::vector<Neighbour> neighbours;
            if (with_lock([&] { return directory_.look({}, neighbours); }) != 0) continue;
            std::map<std::string, const Neighbour*> all;
            for (const Neighbour& one : neighbours) all.emplace(one.path, &one);
            std::erase_if(used_, [&](const ShelfSurvey* shelf) {
                const auto at = all.find("shelves/" + shelf->id);
                if (at == all.end()) return true;  // it was given back
                const std::uint64_t owner = at->second->record.home;
                const auto home = all.find("shelves/" + hex64(owner));
                if (home == all.end() || home->second->record.answer.request != request)
                    return !at->second->alive && inherit(*shelf);
                answers[owner] = home->second->record.answer;
                return true;
            });
        }
        for (const auto& [owner, answer] : answers) {
            const PurgeAnswer before = std::exchange(answers_[owner], answer);
            answers_[owner].also_did(before);
        }
    }

    void take_back() {
        if (asked_) disk_->truncate(requests_->handle(), 0);
    }

    // Its owner ended before it answered. False: somebody else took the shelf over, and is waited for.
    bool inherit(const ShelfSurvey& shelf) {
        OwnedShelf owned;
        if (order_.kind == PurgeOrder::Kind::to_size) return false;
        if (with_lock([&] { return directory_.take("shelves/" + shelf.id, owned); }) != 0) return false;
        purge_shelf(disk_, owned_.emplace_back(std::move(owned)), order_, nullptr, report_, [this] { return step(); });
        return true;
    }

    void add(const PurgeAnswer& answer) {
        report_.pages += answer.pages;
        report_.bytes += answer.bytes;
        report_.leftovers += answer.leftovers;
        report_.segments += answer.segments;
        report_.freed += answer.freed;
        report_.used_pages += answer.used_pages;
        report_.used_bytes += answer.used_bytes;
        report_.used_shelves += answer.used_pages > 0;
        if (answer.failures > 0) report_.failed(-EIO, "a shelf that is in use");
    }

    void count_used(const ShelfSurvey& shelf) {
        ++report_.used_shelves;
        for (const SegmentSurvey& listed : shelf.segments) {
            if (order_.kind == PurgeOrder::Kind::to_size) {
                report_.used_pages += listed.pages;
                report_.used_bytes += listed.allocated;
                continue;
            }
            SegmentFile segment(disk_, "shelves/" + shelf.id + "/" + listed.name, listed.bytes);
            if (segment.open() != 0 || segment.state() != HeaderState::sound) continue;
            segment.for_each([&](std::uint32_t, RecordState state, const Record& record, std::uint32_t) {
                const bool named = state == RecordState::page && order_.drops(record.key, record.space, record.used());
                report_.used_pages += named;
                report_.used_bytes += named ? segment.shape().slot_bytes() : 0;
                return true;
            });
        }
    }

    // Whole segments: nothing is gained while one page is left in one.
    void shrink() {
        struct Candidate {
            const OwnedShelf* shelf;
            DirEntry file;
            std::uint32_t last_use;
        };
        std::vector<Candidate> candidates;
        for (const OwnedShelf& shelf : owned_) {
            std::vector<DirEntry> entries;
            if (const int error = disk_->list(shelf.path, entries); error != 0) report_.failed(error, shelf.path);
            for (const DirEntry& entry : entries) {
                if (entry.directory || segment_number(entry.name) == 0) continue;
                candidates.push_back({&shelf, entry, last_use(shelf, entry)});
            }
        }
        std::ranges::stable_sort(candidates, {}, &Candidate::last_use);
        std::uint64_t taken = 0;
        if (const int error = directory_.taken_bytes(taken); error != 0) return report_.failed(error, ".");
        const PurgeOrder everything{};
        for (const Candidate& candidate : candidates) {
            if (taken <= order_.bytes || report_.cancelled) return;
            const std::uint64_t before = report_.freed;
            purge_segment(disk_, *candidate.shelf, candidate.file, everything, nullptr, report_, [this] { return step(); });
            taken -= std::min(taken, report_.freed - before);
        }
    }

    // Of its most recently used page; 0: it has none.
    std::uint32_t last_use(const OwnedShelf& shelf, const DirEntry& file) const {
        std::uint32_t last = 0;
        SegmentFile segment(disk_, shelf.path + "/" + file.name, file.size);
        if (segment.open() != 0 || segment.state() != HeaderState::sound) return 0;
        segment.for_each([&](std::uint32_t, RecordState state, const Record& record, std::uint32_t) {
            if (state == RecordState::page) last = std::max(last, record.used());
            return true;
        });
        return last;
    }

    void drop_what_is_empty() {
        const Survey left = survey(disk_, lock_left_);
        with_lock([&] {
            for (OwnedShelf& shelf : owned_) directory_.remove_shelf(shelf);
            drop_descriptions(left);
            return 0;
        });
    }

    void drop_descriptions(const Survey& left) {
        // Another process that lives may be about to write the first page of a namespace that it has described.
        const auto alive = std::ranges::count_if(left.shelves, &ShelfSurvey::alive);  // ours among them
        if (std::size_t(alive) > owned_.size() + ours_.size() || !knows_all_pages(left)) return;
        for (const std::string& name : left.descriptions) {
            const bool used = std::ranges::any_of(left.spaces, [&](const auto& space) { return hex(space.first) == name; });
            if (!used) report_.namespaces += disk_->remove("namespaces/" + name + ".json") == 0;
        }
    }

    // Under the directory's lock: what `work` returns, or -errno where the lock is not to be had.
    template <class Work>
    int with_lock(Work work) {
        const auto began = Clock::now();
        const Directory::Hold hold(directory_, lock_left_);
        lock_left_ -= std::min(lock_left_, std::chrono::duration_cast<milliseconds>(Clock::now() - began));
        return hold.error != 0 ? hold.error : work();
    }

    // Of the patience with others.
    milliseconds left() const { return std::max(std::chrono::duration_cast<milliseconds>(end_ - Clock::now()), milliseconds{0}); }

    bool step() { return !progress_ || progress_(std::min(++done_, total_), total_); }

    const std::shared_ptr<Disk> disk_;
    PurgeOrder order_;
    const Progress& progress_;
    const std::vector<std::string>& ours_;
    const std::function<void()>& meanwhile_;
    const Clock::time_point end_;
    milliseconds lock_left_;
    Directory directory_;
    std::vector<OwnedShelf> owned_;
    std::vector<const ShelfSurvey*> used_;          // of processes that live
    std::shared_ptr<File> requests_;                // locked, to the end
    std::deque<Survey> later_;                      // `used_` may be of these
    std::map<std::uint64_t, PurgeAnswer> answers_;  // of all that was asked, by home
    bool asked_ = false;
    bool partly_asked_ = false;  // some keys of the order were not written down
    std::uint64_t done_ = 0, total_ = 0;
    PurgeReport report_;
};

}  // namespace

void add_continuations(const std::shared_ptr<Disk>& disk, const Survey& all, PurgeOrder& order) {
    std::multimap<Key, Key, KeyOrder> children;
    for_each_page(disk, all, [&](const Record& record) { children.emplace(record.parent, record.key); });
    std::vector<Key> left(order.keys.begin(), order.keys.end());
    while (!left.empty()) {
        const auto [first, last] = children.equal_range(left.back());
        left.pop_back();
        for (auto child = first; child != last; ++child) {
            if (order.keys.insert(child->second).second) left.push_back(child->second);
        }
    }
}

PurgeReport purge(const std::shared_ptr<Disk>& disk, PurgeOrder order, const Progress& progress,
                  const std::vector<std::string>& ours, milliseconds patience, const std::function<void()>& meanwhile) {
    return Purge(disk, std::move(order), progress, ours, patience, meanwhile).run();
}

}  // namespace kvstrata
