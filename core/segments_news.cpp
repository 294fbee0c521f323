// What happens to segments in the background: rebuilding those that were damaged, giving up those whose files are gone.
#include <algorithm>
#include <map>
#include <set>

#include "segments.hpp"

namespace kvstrata {
namespace {

constexpr std::size_t kSlotsAtOnce = 32;

}  // namespace

ShelfNews Segments::next_news() {
    ShelfNews news;
    {
        const std::unique_lock lock(mutex_);
        news.vanished = std::exchange(vanished_, {});
        news_left_ -= news.vanished.size();
    }
    const std::unique_lock guard(news_mutex_, std::try_to_lock);
    if (!guard) return news;
    if (changed_left_ > 0) {
        if (first_.nothing()) {
            read_again(1, news);
        } else {
            first_.vanished.insert(first_.vanished.end(), news.vanished.begin(), news.vanished.end());
            news = std::exchange(first_, {});
            count_left();
        }
        return news;
    }
    if (rebuilds_.empty()) return news;
    Rebuild& rebuild = rebuilds_.front();
    if (rebuild.index == kNoSegment)
        rebuild_header(rebuild);
    else
        rebuild_slots(rebuild, news);
    if (rebuild.slots.empty()) {
        rebuilds_.pop_front();
        --news_left_;
    }
    return news;
}

// The segment gets its place in the lists; where it is one of ours, its slots come next.
void Segments::rebuild_header(Rebuild& rebuild) {
    const auto& segment = rebuild.segment;
    {
        const std::shared_lock lock(mutex_);
        if (closed_) return;
    }
    if (segment->recover_header(shape_, rebuild.epoch) != 0) return;  // not readable now: left for the next start
    const std::unique_lock lock(mutex_);
    if (closed_ || std::erase(damaged_, segment) == 0) return;
    if (segment->kind() == Segment::Kind::unknown) {
        ++stats_.unknown_files;
    } else if (segment->kind() == Segment::Kind::pages && segment->shape() == shape_) {
        rebuild.index = std::uint32_t(segments_.size());
        segments_.push_back(segment);
        for (std::uint32_t slot = segment->slots(); slot-- > 0;) rebuild.slots.push_back(slot);
        stats_.unproven_slots += segment->slots();
    } else {
        others_.push_back(segment);
    }
}

void Segments::rebuild_slots(Rebuild& rebuild, ShelfNews& news) {
    const std::size_t count = std::min(kSlotsAtOnce, rebuild.slots.size());
    for (std::size_t i = 0; i < count; ++i) {
        FoundPage page;
        page.slot = {rebuild.index, rebuild.slots[rebuild.slots.size() - 1 - i]};
        if (find(page.slot) != rebuild.segment) continue;  // given up meanwhile
        const int result = rebuild.segment->recover_slot(page.slot.slot, page);
        if (result > 0) news.found.push_back(page);
        if (result == 0) news.empty.push_back(page.slot);
    }
    rebuild.slots.resize(rebuild.slots.size() - count);
    const std::unique_lock lock(mutex_);
    stats_.unproven_slots -= count;
    stats_.rebuilt_pages += news.found.size();
    // Nobody is told of slots that were given up while they were looked at.
    if (closed_ || segments_[rebuild.index] != rebuild.segment) {
        news.found.clear();
        news.empty.clear();
    }
}

void Segments::missed(std::uint32_t index, const std::shared_ptr<Segment>& segment) {
    if (!segment || !segment->miss()) return;
    const std::unique_lock lock(mutex_);
    if (!closed_ && segments_[index] == segment) vanish(index);
}

// Under mutex_. Operations under way keep the segment until they end.
void Segments::vanish(std::uint32_t index) {
    handles_->forget(segments_[index]->path());
    leaving_.push_back(segments_[index]);
    stats_.vanished_segments += segments_[index]->ours();  // another process may remove what is its own
    segments_[index].reset();
    vanished_.push_back(index);
    ++news_left_;
}

void Segments::describe(const Key& space, std::string json) {
    const std::unique_lock lock(mutex_);
    to_describe_.emplace_back(space, std::move(json));
}

void Segments::write_descriptions() {
    decltype(to_describe_) left;
    {
        const std::unique_lock lock(mutex_);
        left = std::exchange(to_describe_, {});
    }
    if (left.empty()) return;
    const Grip grip(*this);
    const Directory::Hold hold(directory_, std::chrono::milliseconds{1500});
    std::uint64_t taken = 0;
    std::vector<Neighbour> neighbours;
    if (hold.error != 0 || directory_.taken_bytes(taken) != 0 || directory_.look(owned_, neighbours) != 0) return;
    const std::uint64_t cap = owners_of(neighbours).cap;
    for (const auto& [space, json] : left) {
        taken += Directory::kSlackBytes;
        if (taken <= cap) directory_.write_namespace(space, json);
    }
}

void Segments::note_uses(std::vector<SlotUse> uses) {
    const std::unique_lock lock(mutex_);
    uses_.insert(uses_.end(), uses.begin(), uses.end());
}

// A slot that holds another page by now is none the worse for it.
void Segments::write_uses() {
    std::vector<SlotUse> left;
    List segments;
    {
        const std::unique_lock lock(mutex_);
        left = std::exchange(uses_, {});
        if (!left.empty()) segments = segments_;
    }
    std::ranges::stable_sort(left, {}, [](const SlotUse& use) { return std::pair(use.slot.segment, use.slot.slot); });
    for (auto first = left.begin(); first != left.end();) {
        const std::uint32_t number = first->slot.segment;
        const auto last = std::find_if(first, left.end(), [&](const SlotUse& use) { return use.slot.segment != number; });
        if (number < segments.size() && segments[number] && segments[number]->ours()) segments[number]->note_uses({first, last});
        first = last;
    }
}

// A file that was removed while it is open goes on working, but its pages are lost at the next start and its space is not counted. One that
// was cut off is no better.
void Segments::check_files() {
    write_descriptions();
    write_uses();
    std::set<std::string> directories;
    List before;
    {
        const std::shared_lock lock(mutex_);
        before = segments_;
    }
    for (const auto& segment : before) {
        if (segment) directories.insert(segment->path().substr(0, segment->path().rfind('/')));
    }
    std::map<std::string, std::uint64_t> there;
    for (const std::string& directory : directories) {
        std::vector<DirEntry> entries;
        const int error = disk_->list(directory, entries);
        if (error != 0 && error != -ENOENT && error != -ENOTDIR) return;  // not known
        for (const DirEntry& entry : entries) {
            if (!entry.directory) there.emplace(directory + "/" + entry.name, entry.size);
        }
    }
    List cut;
    {
        const std::unique_lock lock(mutex_);
        for (std::uint32_t index = 0; index < before.size() && index < segments_.size(); ++index) {
            if (!before[index] || segments_[index] != before[index]) continue;
            const auto file = there.find(before[index]->path());
            const bool short_now = file != there.end() && before[index]->ours() && file->second < before[index]->file_bytes();
            if (short_now) cut.push_back(before[index]);
            if (short_now || file == there.end()) vanish(index);
        }
    }
    // What is left of a file that was cut off would only be damage at the next start.
    for (const auto& segment : cut) disk_->remove(segment->path());
}

int Segments::sync() {
    write_uses();
    List segments;
    {
        const std::shared_lock lock(mutex_);
        segments = segments_;
    }
    int result = 0;
    for (const auto& segment : segments) {
        const int error = segment && segment->ours() ? segment->sync() : 0;
        if (result == 0) result = error;
    }
    return result;
}

}  // namespace kvstrata
