// Opening: taking over what the dead left, reading the tables, coming under the cap.
#include <algorithm>
#include <cstring>

#include "segments.hpp"

namespace kvstrata {
namespace {

constexpr std::chrono::milliseconds kOpenPatience{1500};
constexpr std::uint64_t kLeastBeside = 3 * Directory::kSlackBytes + Directory::kShelfBytes;  // a segment
constexpr std::size_t kPagesWhileOpening = 1 << 18;
constexpr const char* kOtherDirectory = "make it readable and writable for this user or choose another directory";

}  // namespace

std::string Segments::sentence(const std::string& cause, const std::string& fix) const {
    return "disk_path " + disk_->where() + ": " + cause + "; " + fix;
}

std::string Segments::lock_trouble(int error) const {
    if (error == -EWOULDBLOCK) {
        return sentence("another process has held its lock for too long", "stop that process or choose another directory");
    }
    return sentence(std::string("its file system has no locks: ") + std::strerror(-error), "choose a local file system");
}

std::string Segments::open() {
    const std::uint64_t least = plan_.bytes + kLeastBeside;
    if (config_.cap_bytes < least) {
        return sentence("a limit of " + std::to_string(config_.cap_bytes) + " bytes cannot hold four pages of this model",
                        "raise disk_size_GB to at least " + std::to_string(least) + " bytes or use smaller pages");
    }
    const std::lock_guard guard(grow_mutex_);
    int error = directory_.open();
    if (error != 0) return sentence(std::string("cannot be used: ") + std::strerror(-error), kOtherDirectory);
    std::size_t adopted = 0;
    {
        const Directory::Hold hold(directory_, kOpenPatience);
        if (hold.error != 0) return lock_trouble(hold.error);
        error = directory_.adopt(owned_);
        adopted = owned_.size();
        // What is asked just now was meant for those who were there. Their shelves are ours now, if we took over any.
        if (adopted == 0) request_ = read_request(disk_).id;
        if (error == 0) take_home();
    }
    if (error != 0) return sentence(std::string("its shelves cannot be listed: ") + std::strerror(-error), kOtherDirectory);
    ShelfNews news;
    // They are ours by now: the lock would only make others wait.
    for (std::size_t i = 0; i < adopted; ++i) load(owned_[i], {}, news);
    found_ = std::move(news.found);
    empty_ = std::move(news.empty);
    {
        const Directory::Hold hold(directory_, kOpenPatience);
        if (hold.error != 0) return lock_trouble(hold.error);
        error = shrink();
        if (error != 0)
            return sentence(std::string("cannot be brought under its limit: ") + std::strerror(-error), kOtherDirectory);
        drop_empty_shelves();
        write_record();
    }
    await_others();
    look_round(first_);
    if (first_.purge.id != 0) {  // nobody hears it before the end of this: it is found again at the first look
        first_.purge = {};
        request_ = 0;
        look_due_ = true;
    }
    read_again(kPagesWhileOpening, first_);
    return {};
}

// `told`: of a shelf that was another process's: what the driver knows of its segments, which keep their places.
void Segments::load(const OwnedShelf& shelf, ToldSegments told, ShelfNews& news) {
    std::vector<DirEntry> entries;
    if (disk_->list(shelf.path, entries) != 0) ++stats_.unknown_files;
    std::uint64_t bytes = 0;
    for (const DirEntry& entry : entries) bytes += entry.size;
    news.found.reserve(news.found.size() + bytes / shape_.slot_bytes());  // room that is not touched costs nothing, growing would
    for (const DirEntry& entry : entries) {
        if (!entry.directory && is_shelf_file(entry.name)) continue;
        const std::uint32_t number = segment_number(entry.name);
        if (number == 0 || entry.directory) {
            const std::unique_lock lock(mutex_);
            ++stats_.unknown_files;
            continue;
        }
        const auto segment =
            std::make_shared<Segment>(handles_, shelf.owner, shelf.path + "/" + entry.name, entry.size, shelf.changes);
        const auto known = told.extract(number);
        std::uint32_t index = known ? known.mapped().index : kNoSegment;
        const auto was_told = [&](std::uint32_t slot) {
            return known && slot < known.mapped().pages.size() && known.mapped().pages[slot] != 0;
        };
        if (index == kNoSegment) {
            const std::shared_lock lock(mutex_);
            index = std::uint32_t(segments_.size());
        }
        Rebuild rebuild{segment, index, 0, {}};
        const auto sink = [&](std::uint32_t slot, RecordState state, const Record& record) {
            if (segment->shape() != shape_) return;
            if (was_told(slot) && (state != RecordState::page || (record.key.prefix() | 1) != known.mapped().pages[slot]))
                news.gone.push_back({index, slot});
            if (state == RecordState::page) {
                news.found.push_back(
                    {{index, slot}, record.key, record.parent, record.space, record.uses + record.since.uses, record.used()});
            } else if (state == RecordState::free) {
                news.empty.push_back({index, slot});
            } else {
                rebuild.slots.push_back(slot);
            }
        };
        const int error = segment->load(sink);
        const std::unique_lock lock(mutex_);
        if (closed_) return;  // the lists are gone, and nobody hears the news
        const bool pages = segment->kind() == Segment::Kind::pages && segment->shape() == shape_;
        if (known && known.mapped().index != kNoSegment) {
            if (pages) {
                segments_[index] = segment;
                news.adopted.push_back(index);
            } else {
                segments_[index].reset();
                news.vanished.push_back(index);
            }
        } else if (pages) {
            segments_.push_back(segment);
        }
        if (segment->kind() == Segment::Kind::unknown || (segment->kind() == Segment::Kind::blank && error != 0)) {
            ++stats_.unknown_files;  // not ours to touch, or not readable now
        } else if (segment->kind() == Segment::Kind::damaged) {
            ++stats_.damaged_segments;
            damaged_.push_back(segment);
            rebuilds_.push_back({segment, kNoSegment, directory_.random(), {}});
            ++news_left_;
        } else if (pages) {
            stats_.damaged_records += rebuild.slots.size();
            stats_.unproven_slots += rebuild.slots.size();
            if (rebuild.slots.empty()) continue;
            rebuilds_.push_back(std::move(rebuild));
            ++news_left_;
        } else {
            others_.push_back(segment);
        }
    }
    for (const auto& [number, known] : told)
        if (known.index != kNoSegment) news.vanished.push_back(known.index);
    const std::unique_lock lock(mutex_);
    if (closed_) return;
    for (const std::uint32_t index : news.vanished) segments_[index].reset();
    ++stats_.adopted_shelves;
}

// At the start only, when nobody knows a slot yet. Where others live, they have shares of the limit too.
int Segments::shrink() {
    std::uint64_t taken = 0;
    if (const int error = directory_.taken_bytes(taken); error != 0) return error;
    std::vector<Neighbour> neighbours;
    if (const int error = directory_.look(owned_, neighbours); error != 0) return error;
    const Owners owners = owners_of(neighbours);
    keeps_to_ = stats_.cap_bytes = owners.cap;
    stats_.owners = owners.count;
    bool removed = false;
    while (taken > owners.cap && (owners.count == 1 || allocated_bytes() > owners.share())) {
        std::shared_ptr<Segment>* victim = nullptr;
        for (List* list : {&others_, &damaged_, &segments_}) {
            const auto least = least_valuable(*list);
            if (least != list->end() && (!victim || rank(*least) < rank(*victim))) victim = &*least;
        }
        if (!victim) break;  // what is left belongs to others
        if (const int error = remove(*victim); error != 0) return error;
        taken -= std::min(taken, (*victim)->file_bytes());
        std::erase_if(rebuilds_, [&](const Rebuild& rebuild) {
            if (rebuild.segment != *victim) return false;
            stats_.unproven_slots -= rebuild.slots.size();
            return true;
        });
        victim->reset();
        removed = true;
    }
    std::erase(others_, nullptr);
    std::erase(damaged_, nullptr);
    if (removed) {
        std::erase_if(found_, [&](const FoundPage& page) { return !segments_[page.slot.segment]; });
        std::erase_if(empty_, [&](const SlotRef& slot) { return !segments_[slot.segment]; });
    }
    news_left_.store(rebuilds_.size(), std::memory_order_relaxed);
    name_namespace(taken, owners.cap);
    return 0;
}

void Segments::drop_empty_shelves() {
    for (std::size_t i = owned_.size(); i-- > 0 && owned_.size() > 1;) {  // also the first: then another is our home
        directory_.remove_shelf(owned_[i]);
        if (!owned_[i].owner) owned_.erase(owned_.begin() + std::ptrdiff_t(i));
    }
}

}  // namespace kvstrata
