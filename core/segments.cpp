#include "segments.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "bounded.hpp"

namespace kvstrata {
namespace {

constexpr std::uint64_t kMaxSegment = 256ull << 20;
constexpr std::chrono::milliseconds kGrowPatience{1000};
constexpr std::chrono::milliseconds kLeavePatience{100};
constexpr std::chrono::milliseconds kLeaveBound{1000};  // on a busy machine too, where the disk answers

bool no_room(int error) { return error == -ENOSPC || error == -EDQUOT || error == -EFBIG; }

}  // namespace

Segments::Segments(const std::shared_ptr<Disk>& disk, const ShelfConfig& config)
    : config_(config),
      shape_(Shape::of(config)),
      plan_(SegmentPlan::of(shape_, std::min(config.cap_bytes / 64, kMaxSegment))),
      disk_(disk),
      handles_(std::make_shared<Handles>(disk)),
      directory_(disk, config.seed),
      keeps_to_(config.cap_bytes) {}

// The order of giving up: files without a header, then by last use; removed ones, and the one that is being purged, not at all.
std::pair<int, std::uint32_t> Segments::rank(const std::shared_ptr<Segment>& segment) const {
    if (!segment || segment == purged_) return {2, 0};
    return {segment->kind() == Segment::Kind::pages ? 1 : 0, segment->last_use()};
}

Segments::List::iterator Segments::least_valuable(List& among) const {
    const auto least =
        std::min_element(among.begin(), among.end(), [this](const auto& a, const auto& b) { return rank(a) < rank(b); });
    return least != among.end() && rank(*least).first < 2 ? least : among.end();
}

// Says in clear what the namespace is, before its first page; again whenever a segment is made, since a purge removes what no page uses.
void Segments::name_namespace(std::uint64_t taken, std::uint64_t cap) {
    if (config_.space_json.empty() || taken + Directory::kSlackBytes + config_.space_json.size() > cap) return;
    directory_.write_namespace(config_.space, config_.space_json);
}

std::shared_ptr<Segment> Segments::find(const SlotRef& slot) const {
    const std::shared_lock lock(mutex_);
    if (closed_ || slot.segment >= segments_.size()) return nullptr;
    const auto& segment = segments_[slot.segment];
    return segment && slot.slot < segment->slots() ? segment : nullptr;
}

OpStatus Segments::grow(std::vector<SlotRef>& into, int& error) {
    const Grip grip(*this);
    const auto failed = [&](int result) {
        error = -result;
        return no_room(result) ? OpStatus::full : OpStatus::failed;
    };
    if (closed()) return failed(-ESHUTDOWN);
    struct Made {  // whatever becomes of it
        ~Made() {
            const std::unique_lock lock(segments.mutex_);
            segments.made_.clear();
        }
        Segments& segments;
    } made{*this};
    const Directory::Hold hold(directory_, kGrowPatience);
    if (hold.error != 0) return failed(hold.error);
    std::vector<Neighbour> neighbours;
    if (const int result = directory_.look(owned_, neighbours); result != 0) return failed(result);  // whose cap may be lower
    const Owners owners = owners_of(neighbours);
    for (;;) {
        std::uint64_t taken = 0;
        std::uint64_t free = 0;
        int result = directory_.taken_bytes(taken);
        if (result == 0) result = disk_->free_bytes(free);
        if (result != 0) return failed(result);
        name_namespace(taken, owners.cap);
        // What others want of their shares is not taken from them.
        const std::uint64_t holds = allocated_bytes();
        const bool within_share = holds == 0 || holds + plan_.bytes <= owners.share();
        const std::uint64_t beside = Directory::kSlackBytes + Directory::kShelfBytes + plan_.bytes / 1024;
        const bool allowed = taken + plan_.bytes + beside <= owners.cap && (within_share || owners.wants == 0);
        const bool fits = allowed && free >= plan_.bytes && free - plan_.bytes >= config_.reserve_free_bytes;
        std::shared_ptr<Segment> segment;
        if (fits) {
            result = make(segment);
        } else {
            segment = take_other();
            if (!segment) {
                wants_ = !allowed && within_share && owners.count > 1 ? plan_.bytes : 0;
                wanted_for_ = 0;
                write_record();
                return failed(allowed ? -ENOSPC : -EDQUOT);  // the file system's limit, or our own
            }
            const bool reuse = segment->file_bytes() == plan_.bytes;
            result = reuse ? format(*segment) : remove(segment);
            if (result != 0) {
                const std::unique_lock lock(mutex_);
                if (!closed_) others_.push_back(segment);
            }
            if (result == 0 && !reuse) continue;
        }
        if (result != 0) return failed(result);
        add(segment, into);
        wants_ = 0;
        write_record();
        return OpStatus::ok;
    }
}

int Segments::make(std::shared_ptr<Segment>& into) {
    std::string path;
    int result = create(path);
    if (result != 0) return result;
    handles_->forget(path);  // of a file of this name that is gone: nobody uses it any more
    into = std::make_shared<Segment>(handles_, owned_.front().owner, path, plan_.bytes, owned_.front().changes);
    result = format(*into);
    if (result != 0) remove(into);
    return result;
}

// The smallest number that is free: others read a counter for each. Operations under way on a segment that is gone open its file by name
// when they get there: the name is not free before they have ended.
int Segments::create(std::string& path) {
    int result = 0;
    for (int attempt = 0; attempt < 4; ++attempt) {
        if (owned_.empty()) {
            take_home();
            if (owned_.empty()) return -ENOENT;
        }
        const std::string& shelf = owned_.front().path;
        std::vector<DirEntry> entries;
        std::set<std::string> names;
        result = disk_->list(shelf, entries);
        for (const DirEntry& entry : entries) names.insert(shelf + "/" + entry.name);
        {  // One whose file somebody removed has its name until that is found out.
            const std::unique_lock lock(mutex_);
            for (const List* list : {&segments_, &others_, &damaged_})
                for (const auto& segment : *list)
                    if (segment) names.insert(segment->path());
            std::erase_if(leaving_, [](const auto& segment) { return segment.expired(); });
            for (const auto& left : leaving_)
                if (const auto segment = left.lock()) names.insert(segment->path());
        }
        std::uint32_t number = 1;
        while (names.contains(path = shelf + "/" + segment_name(number))) ++number;
        {
            const std::unique_lock lock(mutex_);
            made_ = path;
        }
        if (result == 0 && File::open(disk_, path, OpenMode::create_new, result)) return 0;
        if (result != -ENOENT) return result;
        owned_.erase(owned_.begin());  // somebody removed our shelf's directory
    }
    return result;
}

int Segments::format(Segment& segment) {
    int result = 0;
    const auto file = handles_->get(segment.path(), OpenMode::update, result);
    if (file) result = disk_->allocate(file->handle(), plan_.bytes);
    return result == 0 ? segment.format(shape_, plan_, directory_.random()) : result;
}

int Segments::remove(const std::shared_ptr<Segment>& victim) {
    {
        const std::unique_lock lock(mutex_);
        leaving_.push_back(victim);
    }
    const int error = disk_->remove(victim->path());
    handles_->forget(victim->path());
    victim->tell();
    if (error != 0 && error != -ENOENT) return error;
    const std::unique_lock lock(mutex_);
    ++stats_.removed_segments;
    return 0;
}

// The least valuable of another shape, out of the list, or nullptr.
std::shared_ptr<Segment> Segments::take_other() {
    const std::unique_lock lock(mutex_);
    const auto victim = least_valuable(others_);
    if (victim == others_.end()) return nullptr;
    std::shared_ptr<Segment> taken = std::move(*victim);
    others_.erase(victim);
    made_ = taken->path();
    return taken;
}

void Segments::add(const std::shared_ptr<Segment>& segment, std::vector<SlotRef>& into) {
    const std::unique_lock lock(mutex_);
    if (closed_) return;  // it would keep the shelf ours; who takes that over finds the segment
    const auto index = std::uint32_t(segments_.size());
    segments_.push_back(segment);
    into.reserve(into.size() + segment->slots());
    for (std::uint32_t slot = 0; slot < segment->slots(); ++slot) into.push_back({index, slot});
}

std::uint64_t Segments::allocated_bytes() const {
    const std::shared_lock lock(mutex_);
    std::uint64_t bytes = 0;
    for (const List* list : {&segments_, &others_, &damaged_}) {
        for (const auto& segment : *list) bytes += segment && segment->ours() ? segment->file_bytes() : 0;
    }
    return bytes;
}

ShelfStats Segments::stats() const {
    const std::shared_lock lock(mutex_);
    ShelfStats stats = stats_;
    stats.segments = std::size_t(std::ranges::count_if(segments_, [](const auto& s) { return s && s->ours(); }));
    stats.other_segments = others_.size();
    stats.direct = disk_->direct();
    return stats;
}

bool Segments::closed() const {
    const std::shared_lock lock(mutex_);
    return closed_;
}

void Segments::close() {
    List segments, others, damaged;
    {
        const std::unique_lock lock(mutex_);
        closed_ = true;
        segments.swap(segments_);
        others.swap(others_);
        damaged.swap(damaged_);
        empty_when_closed_ =
            others.empty() && damaged.empty() && std::ranges::none_of(segments, [](const auto& one) { return one && one->ours(); });
    }
    if (const std::unique_lock guard(news_mutex_, std::try_to_lock); guard) {
        rebuilds_.clear();
        others_shelves_.clear();
    }
    give_up();
}

// Once closed. A grow that hangs in the file system keeps what it needs; its shelf stays ours until it comes back.
void Segments::give_up() {
    do {
        const std::unique_lock guard(grow_mutex_, std::try_to_lock);
        if (!guard) return;  // who has it comes here when he lets go
        if (!closed()) continue;
        try {
            if (empty_when_closed_ && !owned_.empty()) leave(std::move(owned_));
        } catch (...) {  // no thread for it: an empty shelf stays, until somebody takes it over
        }
        owned_.clear();
        return;
    } while (closed());  // since it was asked
}

// Shelves without a segment are no use to anybody. Bounded, since this may be the end of a process on a disk that does not answer.
void Segments::leave(std::vector<OwnedShelf> shelves) {
    const auto directory = std::make_shared<Directory>(directory_);
    const auto work = [directory, shelves = std::make_shared<std::vector<OwnedShelf>>(std::move(shelves))] {
        const Directory::Hold hold(*directory, kLeavePatience);
        if (hold.error != 0) return false;
        for (OwnedShelf& shelf : *shelves) directory->remove_shelf(shelf);
        return true;
    };
    run_bounded(work, kLeaveBound);
}

}  // namespace kvstrata
