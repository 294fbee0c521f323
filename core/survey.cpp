#include "survey.hpp"

#include <algorithm>
#include <array>

#include "directory.hpp"
#include "segment_file.hpp"

namespace kvstrata {
namespace {

constexpr std::array kRootFiles{"lock", "secret", "requests"};
constexpr std::array kShelfFiles{"owner", "changes"};

bool one_of(std::string_view name, std::span<const char* const> names) {
    return std::ranges::any_of(names, [&](const char* known) { return name == known; });
}

// Of a file that a process was about to finish.
bool is_temporary(std::string_view name) { return name.starts_with(".probe-") || name.starts_with(".secret-"); }

void count_pages(const std::shared_ptr<Disk>& disk, const std::string& path, SegmentSurvey& into, Survey& all) {
    SegmentFile file(disk, path, into.bytes);
    into.error = file.open();
    into.state = file.state();
    into.version = file.version();
    if (into.error != 0 || file.state() != HeaderState::sound) return;
    into.shape = file.shape();
    into.slots = file.slots();
    into.error = file.for_each([&](std::uint32_t slot, RecordState state, const Record& record, std::uint32_t) {
        into.damaged_records +=
            state == RecordState::damaged && slot < file.whole_slots();  // behind a cut file's end nothing is lost
        if (state != RecordState::page) return true;
        ++into.pages;
        into.cut_pages += slot >= file.whole_slots();
        into.last_use = std::max(into.last_use, record.used());
        SpaceSurvey& space = all.spaces[record.space];
        space.page_size = into.shape.page_size;
        ++space.pages;
        space.bytes += into.shape.slot_bytes();
        space.uses += record.uses + record.since.uses;
        space.first_use = std::min(space.first_use, record.used());
        space.last_use = std::max(space.last_use, record.used());
        return true;
    });
}

ShelfSurvey look_at(const std::shared_ptr<Disk>& disk, const std::string& id, bool alive, Survey& all) {
    ShelfSurvey shelf{.id = id, .alive = alive, .error = 0, .segments = {}};
    const std::string path = "shelves/" + id;
    std::vector<DirEntry> entries;
    shelf.error = disk->list(path, entries);
    for (const DirEntry& entry : entries) {
        if (!entry.directory && one_of(entry.name, kShelfFiles)) continue;
        if (entry.directory || segment_number(entry.name) == 0) {
            all.unknown.push_back({path + "/" + entry.name, entry.allocated});
            continue;
        }
        SegmentSurvey segment;
        segment.name = entry.name;
        segment.bytes = entry.size;
        segment.allocated = std::max(entry.allocated, entry.size);
        count_pages(disk, path + "/" + entry.name, segment, all);
        if (segment.error != -ENOENT) shelf.segments.push_back(std::move(segment));  // its owner gave it back meanwhile
    }
    return shelf;
}

void look_at_descriptions(Disk& disk, Survey& all) {
    std::vector<DirEntry> entries;
    disk.list("namespaces", entries);
    for (const DirEntry& entry : entries) {
        const std::string name = entry.name.substr(0, entry.name.find('.'));
        const bool hex = name.size() == 64 && name.find_first_not_of("0123456789abcdef") == std::string::npos;
        if (!entry.directory && hex && entry.name == name + ".json") {
            all.descriptions.push_back(name);
        } else if (entry.directory || !(entry.name.ends_with(".tmp") || (hex && entry.name == name + ".version"))) {
            all.unknown.push_back({"namespaces/" + entry.name, entry.allocated});
        }
    }
}

}  // namespace

std::map<std::string, bool> living_owners(const std::shared_ptr<Disk>& disk, const std::vector<std::string>& shelves,
                                          std::chrono::milliseconds patience) {
    std::map<std::string, bool> alive;
    int error = 0;
    const auto lock = File::open(disk, "lock", OpenMode::read, error);
    std::optional<Directory::Hold> hold;
    if (lock) hold.emplace(lock, patience);
    for (const std::string& id : shelves) {
        const auto owner = File::open(disk, "shelves/" + id + "/owner", OpenMode::read, error);
        alive[id] = owner && disk->lock(owner->handle()) == -EWOULDBLOCK;
    }
    return alive;
}

Survey survey(const std::shared_ptr<Disk>& disk, std::chrono::milliseconds patience) {
    Survey all;
    std::vector<DirEntry> entries;
    all.error = disk->list("", entries);
    if (all.error != 0) return all;
    for (const DirEntry& entry : entries) {
        if (entry.directory ? entry.name == "shelves" || entry.name == "namespaces" : one_of(entry.name, kRootFiles)) continue;
        if (entry.directory || !is_temporary(entry.name)) all.unknown.push_back({entry.name, entry.allocated});
    }
    std::vector<std::string> ids;
    if (const int error = disk->list("shelves", entries); error != 0) {
        all.error = error == -ENOENT ? 0 : error;
        return all;
    }
    for (const DirEntry& entry : entries) {
        if (entry.directory && is_shelf_name(entry.name)) {
            ids.push_back(entry.name);
        } else {
            all.unknown.push_back({"shelves/" + entry.name, entry.allocated});
        }
    }
    for (const auto& [id, alive] : living_owners(disk, ids, patience)) all.shelves.push_back(look_at(disk, id, alive, all));
    look_at_descriptions(*disk, all);
    Directory(disk, 1).taken_bytes(all.allocated);
    disk->free_bytes(all.free);
    return all;
}

namespace {

using PageSink = std::function<void(const SegmentFile& segment, std::uint32_t slot, const Record& record)>;

void for_each_slot(const std::shared_ptr<Disk>& disk, const Survey& all, const PageSink& sink) {
    for (const ShelfSurvey& shelf : all.shelves) {
        for (const SegmentSurvey& listed : shelf.segments) {
            SegmentFile segment(disk, "shelves/" + shelf.id + "/" + listed.name, listed.bytes);
            if (segment.open() != 0 || segment.state() != HeaderState::sound) continue;
            segment.for_each([&](std::uint32_t slot, RecordState state, const Record& record, std::uint32_t) {
                if (state == RecordState::page) sink(segment, slot, record);
                return true;
            });
        }
    }
}

}  // namespace

void for_each_page(const std::shared_ptr<Disk>& disk, const Survey& all, const std::function<void(const Record&)>& sink) {
    for_each_slot(disk, all, [&](const SegmentFile&, std::uint32_t, const Record& record) { sink(record); });
}

std::vector<NextPage> pages_after(const std::shared_ptr<Disk>& disk, const Survey& all, const std::set<Key, KeyOrder>& keys,
                                  std::size_t most) {
    std::vector<NextPage> found;
    for_each_slot(disk, all, [&](const SegmentFile& segment, std::uint32_t slot, const Record& record) {
        if (found.size() >= most || !keys.contains(record.parent)) return;
        const std::size_t bytes = segment.shape().header_bytes;
        AlignedBuffer header(bytes);
        int error = 0;
        const auto file = File::open(disk, segment.path(), OpenMode::read, error);
        if (!file || !header.data()) return;
        FoundPage page;
        const bool whole = file->read(header.data(), bytes, segment.slot_offset(slot)) == std::int64_t(bytes);
        if (whole && read_header(header.data(), segment.shape(), page) && page.key == record.key)
            found.push_back({page.parent, header_tokens(header.data(), segment.shape())});
    });
    return found;
}

std::set<Key, KeyOrder> pages_among(const std::shared_ptr<Disk>& disk, const Survey& all, const std::set<Key, KeyOrder>& keys) {
    std::set<Key, KeyOrder> found;
    for_each_page(disk, all, [&](const Record& record) {
        if (keys.contains(record.key)) found.insert(record.key);
    });
    return found;
}

}  // namespace kvstrata
