// A directory that other processes live in too: reading what they hold, taking over what they leave, keeping to one cap, each to its share.
//
// Who guards what: news_mutex_ what we know of others (one thread does this), grow_mutex_ our shelves and our record. Taken in that order.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <thread>

#include "purge.hpp"
#include "segments.hpp"

namespace kvstrata {
namespace {

constexpr unsigned kPollsPerLook = 4;           // a look takes the directory's lock and asks who lives
constexpr int kWantPolls = 40;                  // so long a wish is heard that nobody repeats
constexpr std::size_t kPagesPerPoll = 1 << 15;  // told of at once, on top of one segment
constexpr int kTellAgain = 3;  // half a record tells nothing, and with it goes the limit that others are to keep to
constexpr std::chrono::milliseconds kPollPatience{50};
constexpr std::chrono::milliseconds kAwaitStep{10};

// What stands for a page in a slot; 0: none.
std::uint64_t mark(const Key& key) { return key.prefix() | 1; }

}  // namespace

bool Segments::precedes(const SlotRef& one, const SlotRef& other) const {
    const std::shared_lock lock(mutex_);
    const auto shelf = [&](const SlotRef& slot) -> std::string_view {
        if (slot.segment >= segments_.size() || !segments_[slot.segment]) return {};
        const std::string_view path = segments_[slot.segment]->path();
        return path.substr(0, path.rfind('/'));
    };
    return shelf(one) < shelf(other);
}

// --- our own record

// A shelf to tell others from, and to put segments in. Without one (a full disk, or no room within the cap just now) we are nobody to
// them, until one can be made.
void Segments::take_home() {
    if (owned_.empty()) {
        std::vector<Neighbour> neighbours;
        if (directory_.look(owned_, neighbours) != 0) return;
        // A cap that is lower than what ruled until now has to be told before it can be kept.
        std::uint64_t cap = 0, taken = 0;
        for (const Neighbour& one : neighbours) cap = one.alive && one.record.home != 0 ? std::max(cap, one.record.seen) : cap;
        if (cap == 0) cap = config_.cap_bytes;
        OwnedShelf made;
        if (directory_.taken_bytes(taken) != 0 || taken + Directory::kShelfBytes > cap) return;
        if (directory_.make_shelf(made) != 0) return;
        owned_.push_back(std::move(made));
    }
    record_ = {};
    write_record();
}

void Segments::write_record() {
    if (owned_.empty()) return;
    const OwnerRecord now{.pid = std::uint32_t(getpid()),
                          .home = owned_.front().id(),
                          .cap = config_.cap_bytes,
                          .seen = keeps_to_,
                          .holds = allocated_bytes(),
                          .wants = wants_,
                          .answer = answer_};
    if (now == record_) return;
    for (const OwnedShelf& shelf : owned_) {
        // Elsewhere it only says where to look for it.
        if (&shelf != &owned_.front() && now.home == record_.home) break;
        int error = 0;
        for (int attempt = 0; attempt < kTellAgain && (error = write_owner(*shelf.owner, now)) != 0; ++attempt) {
        }
        if (error != 0) return;
        shelf.changes->bump(0);
    }
    record_ = now;
}

Segments::Owners Segments::owners_of(const std::vector<Neighbour>& neighbours) const {
    Owners owners{.cap = config_.cap_bytes};
    const std::uint64_t holds = allocated_bytes();
    const std::uint64_t home = owned_.empty() ? std::numeric_limits<std::uint64_t>::max() : owned_.front().id();
    for (const Neighbour& neighbour : neighbours) {
        const OwnerRecord& record = neighbour.record;
        if (!neighbour.alive || record.home == 0 || neighbour.path != "shelves/" + hex64(record.home)) continue;
        ++owners.count;
        owners.cap = std::min(owners.cap, record.cap);
        owners.wants += record.wants;
        owners.holds_most &= std::pair(record.holds, record.home) < std::pair(holds, home);
    }
    return owners;
}

// A lower cap than others keep to: they are given a while to give back what they hold too much.
void Segments::await_others() {
    const auto end = std::chrono::steady_clock::now() + config_.await_others;
    for (;;) {
        std::uint64_t missing = 0;
        {
            const Directory::Hold hold(directory_, kAwaitStep);
            std::vector<Neighbour> neighbours;
            const int error = hold.error == 0 ? directory_.look(owned_, neighbours) : hold.error;
            if (error != 0 && error != -EWOULDBLOCK) return;  // not to be known on this disk
            missing = std::uint64_t(error != 0) + std::uint64_t(std::ranges::count_if(neighbours, [&](const Neighbour& one) {
                          return one.alive && one.record.home != 0 && one.path == "shelves/" + hex64(one.record.home) &&
                                 one.record.seen > config_.cap_bytes;
                      }));
        }
        if (missing == 0 || std::chrono::steady_clock::now() >= end) {
            stats_.unacknowledged = missing;
            return;
        }
        std::this_thread::sleep_for(kAwaitStep);
    }
}

// --- what others do

ShelfNews Segments::poll() {
    ShelfNews news;
    std::unique_lock work(news_mutex_, std::defer_lock);
    poll_due_ = true;
    for (const auto end = std::chrono::steady_clock::now() + kPollPatience; !work.try_lock();) {
        if (std::chrono::steady_clock::now() >= end) break;
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
    poll_due_ = false;
    const Grip grip(*this, std::chrono::milliseconds{0});
    if (!work || !grip || closed()) return news;
    bool look = look_due_ || directory_.generation() != generation_;
    for (auto& [shelf, other] : others_shelves_) look |= count_changes(shelf, other);
    look |= (owned_.empty() || !others_shelves_.empty()) && ++polls_ % kPollsPerLook == 0;
    if (wants_ > 0 && ++wanted_for_ > kWantPolls) {
        wants_ = 0;
        write_record();
    }
    if (look) look_round(news);
    read_again(kPagesPerPoll, news);
    return news;
}

ShelfNews Segments::take_first() {
    const std::lock_guard guard(news_mutex_);
    ShelfNews first = std::exchange(first_, {});
    count_left();
    return first;
}

// Which segments of the shelf are to be read again. True: its owner's record has changed too.
bool Segments::count_changes(const std::string& shelf, Other& other) {
    int error = 0;
    if (!other.changes) other.changes = File::open(disk_, shelf + "/changes", OpenMode::read, error);
    if (!other.changes) return false;  // nothing has changed ever since
    std::vector<std::uint64_t> now = read_counters(*other.changes, other.counters.size());
    other.counters.resize(std::max(other.counters.size(), now.size()));
    bool record = false;
    for (std::size_t number = 0; number < now.size(); ++number) {
        if (now[number] == other.counters[number]) continue;
        other.counters[number] = now[number];
        record |= number == 0;
        if (number > 0) changed_.emplace(shelf, std::uint32_t(number));
    }
    count_left();
    return record;
}

void Segments::count_left() { changed_left_ = changed_.size() + !first_.nothing(); }

// A shelf seen for the first time. Its counters are read before its tables are: nothing that happens meanwhile is missed.
void Segments::meet(const std::string& shelf) {
    count_changes(shelf, others_shelves_[shelf]);
    std::vector<DirEntry> entries;
    disk_->list(shelf, entries);
    for (const DirEntry& entry : entries)
        if (!entry.directory && segment_number(entry.name) != 0) changed_.emplace(shelf, segment_number(entry.name));
    count_left();
}

void Segments::look_round(ShelfNews& news) {
    const Directory::Hold hold(directory_, std::chrono::milliseconds{0});
    look_due_ = hold.error != 0;
    std::vector<Neighbour> neighbours;
    const std::uint64_t generation = directory_.generation();
    if (look_due_ || directory_.look(owned_, neighbours) != 0) return;
    generation_ = generation;
    if (owned_.empty()) take_home();
    std::erase_if(others_shelves_, [&](auto& item) {
        if (std::ranges::any_of(neighbours, [&](const Neighbour& one) { return one.path == item.first; })) return false;
        forget(item.second, news);
        return true;
    });
    bool adopted = false;
    for (const Neighbour& one : neighbours) {
        if (!one.alive)
            adopted |= adopt_now(one.path, news);
        else if (!others_shelves_.contains(one.path))
            meet(one.path);
    }
    keep_to(owners_of(neighbours), news);
    if (PurgeRequest asked = read_request(disk_); asked.id != 0 && asked.id != request_) {
        request_ = asked.id;
        // What we ask others we do ourselves, but for shelves that were others' when we asked.
        const bool ours = !owned_.empty() && asked.from == owned_.front().id();
        if (!ours || adopted) news.purge = std::move(asked);
    }
}

void Segments::forget(const Other& other, ShelfNews& news) {
    const std::unique_lock lock(mutex_);
    if (closed_) return;
    for (const auto& [number, told] : other.segments) {
        if (told.index == kNoSegment || !segments_[told.index]) continue;
        segments_[told.index].reset();
        news.vanished.push_back(told.index);
    }
}

// Segments of others whose tables changed, until so many pages were told.
void Segments::read_again(std::size_t pages, ShelfNews& news) {
    std::string listed;
    std::map<std::string, DirEntry> files;
    while (!changed_.empty() && news.shared.size() < pages) {
        const auto [shelf, number] = *changed_.begin();
        changed_.erase(changed_.begin());
        if (std::exchange(listed, shelf) != shelf) {
            std::vector<DirEntry> entries;
            files.clear();
            disk_->list(shelf, entries);
            for (DirEntry& entry : entries) files.emplace(entry.name, entry);
        }
        const auto file = files.find(segment_name(number));
        read_shared(shelf, number, file == files.end() ? nullptr : &file->second, news);
    }
    count_left();
}

// What the table of another process's segment says now, against what we told of it.
void Segments::read_shared(const std::string& shelf, std::uint32_t number, const DirEntry* file, ShelfNews& news) {
    const auto other = others_shelves_.find(shelf);
    if (other == others_shelves_.end()) return;
    Told& told = other->second.segments[number];
    const std::string path = shelf + "/" + segment_name(number);
    handles_->forget(path);  // the name may belong to another file now
    const auto segment = std::make_shared<Segment>(handles_, nullptr, path, file ? file->size : 0);
    std::vector<std::pair<std::uint32_t, Record>> pages;
    const auto sink = [&](std::uint32_t slot, RecordState state, const Record& record) {
        if (state == RecordState::page && segment->shape() == shape_) pages.emplace_back(slot, record);
    };
    const int error = file ? segment->load(sink) : -ENOENT;
    if (error != 0 && error != -ENOENT) return;  // not readable now: what is known of it is proven at each read

    const std::unique_lock lock(mutex_);
    if (closed_) return;
    if (told.index != kNoSegment && !segments_[told.index]) told = {};  // its file was missed before
    if (pages.empty() && told.index == kNoSegment) return;
    if (pages.empty()) {
        segments_[told.index].reset();
        news.vanished.push_back(told.index);
        told = {};
        return;
    }
    if (told.index == kNoSegment) {
        told.index = std::uint32_t(segments_.size());
        segments_.push_back(segment);
    } else if (segments_[told.index]->epoch() != segment->epoch()) {
        segments_[told.index] = segment;
    }
    std::vector<std::uint64_t> now(segment->slots(), 0);
    for (const auto& [slot, record] : pages) now[slot] = mark(record.key);
    for (std::uint32_t slot = 0; slot < told.pages.size(); ++slot)
        if (told.pages[slot] != 0 && (slot >= now.size() || now[slot] != told.pages[slot])) news.gone.push_back({told.index, slot});
    told.pages.resize(now.size(), 0);
    for (const auto& [slot, record] : pages)
        if (now[slot] != told.pages[slot])
            news.shared.push_back(
                {{told.index, slot}, record.key, record.parent, record.space, record.uses + record.since.uses, record.used()});
    told.pages = std::move(now);
}

// The owner is gone: what it left is ours.
bool Segments::adopt_now(const std::string& shelf, ShelfNews& news) {
    OwnedShelf owned;
    if (directory_.take(shelf, owned) != 0) return false;
    auto other = others_shelves_.extract(shelf);
    std::erase_if(changed_, [&](const auto& item) { return item.first == shelf; });
    owned_.push_back(owned);
    load(owned, other ? std::move(other.mapped().segments) : ToldSegments{}, news);
    record_.home = 0;  // written again, there too
    request_ = 0;      // what is asked just now was not carried out on this shelf
    answer_ = {};
    write_record();
    return true;
}

// --- one cap, fair shares

void Segments::keep_to(const Owners& owners, ShelfNews& news) {
    {
        const std::unique_lock lock(mutex_);
        stats_.owners = owners.count;
        stats_.cap_bytes = owners.cap;
    }
    news.room |= wants_ > 0;  // somebody's record changed: it may be that
    std::uint64_t taken = 0;
    if (owners.count == 1 || directory_.taken_bytes(taken) != 0) taken = 0;
    const auto give = [&] {
        const std::uint64_t freed = give_back(news);
        taken -= std::min(taken, freed);
        return freed;
    };
    while (taken > owners.cap && allocated_bytes() > owners.share() && give() > 0) {
    }
    // One gives at a time, and never its last segment: of what others want of their shares, and for whoever comes next.
    std::uint64_t wanted = owners.wants;
    if (taken + Directory::kShelfBytes > owners.cap) wanted = std::max<std::uint64_t>(wanted, 1);
    while (wanted > 0 && owners.holds_most && allocated_bytes() > std::max(owners.share(), plan_.bytes)) {
        const std::uint64_t freed = give();
        if (freed == 0) break;
        wanted -= std::min(wanted, freed);
    }
    keeps_to_ = owners.cap;
    write_record();
}

// The least valuable of our segments. Operations that use it end on a file without a name. Bytes, or 0: nothing could be given.
std::uint64_t Segments::give_back(ShelfNews& news, PurgeReport* report) {
    std::shared_ptr<Segment> victim;
    List* from = nullptr;
    std::uint32_t index = kNoSegment;
    {
        const std::unique_lock lock(mutex_);
        std::shared_ptr<Segment>* least = nullptr;
        for (List* list : {&others_, &damaged_, &segments_}) {
            for (auto& segment : *list) {
                if (!segment || !segment->ours() || rank(segment).first == 2 || (least && rank(segment) >= rank(*least))) continue;
                least = &segment;
                from = list;
            }
        }
        if (!least) return 0;
        victim = *least;
        if (from == &segments_) index = std::uint32_t(least - segments_.data());
        if (from == &segments_)
            least->reset();
        else
            std::erase(*from, victim);
    }
    PurgeReport pages;
    if (report) count_pages(*victim, pages);
    if (remove(victim) == 0) {
        if (report) {
            report->pages += pages.pages;
            report->bytes += pages.bytes;
        }
        if (index != kNoSegment) news.vanished.push_back(index);
        return victim->file_bytes();
    }
    // It keeps its file, and so its pages.
    const std::unique_lock lock(mutex_);
    if (closed_) return 0;
    if (index != kNoSegment)
        segments_[index] = victim;
    else
        from->push_back(victim);
    return 0;
}

}  // namespace kvstrata
