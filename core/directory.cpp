#include "directory.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

namespace kvstrata {
namespace {

constexpr int kReadAgain = 8;  // a block that is not whole
constexpr int kDepth = 16;     // of directories counted; deeper ones are not of our making

std::string join(const std::string& directory, const std::string& name) {
    return directory.empty() ? name : directory + "/" + name;
}

// Segments count in full even where the file system has not given them their blocks yet: they will take them.
int count_bytes(Disk& disk, const std::string& path, int depth, std::uint64_t& total) {
    std::vector<DirEntry> entries;
    if (const int error = disk.list(path, entries); error != 0) return error == -ENOENT ? 0 : error;
    for (const DirEntry& entry : entries) {
        const bool segment = !entry.directory && segment_number(entry.name) != 0;
        total += segment ? std::max(entry.allocated, entry.size) : entry.allocated;
        if (!entry.directory || depth == 0) continue;
        if (const int error = count_bytes(disk, join(path, entry.name), depth - 1, total); error != 0) return error;
    }
    return 0;
}

}  // namespace

std::string hex(const Key& key) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (const std::uint8_t byte : key.bytes) {
        text += digits[byte >> 4];
        text += digits[byte & 15];
    }
    return text;
}

std::string hex64(std::uint64_t value) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
}

bool is_shelf_name(const std::string& name) {
    return name.size() == 16 && name.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool is_shelf_file(const std::string& name) { return name == "owner" || name == "changes"; }

std::uint64_t OwnedShelf::id() const { return std::strtoull(path.c_str() + path.rfind('/') + 1, nullptr, 16); }

std::string segment_name(std::uint32_t number) {
    char text[24];
    std::snprintf(text, sizeof text, "seg-%06u.kvs", number);
    return text;
}

std::uint32_t segment_number(const std::string& name) {
    if (name.size() < 14 || name.size() > 17 || !name.starts_with("seg-") || !name.ends_with(".kvs")) return 0;
    std::uint32_t number = 0;
    for (const char c : name.substr(4, name.size() - 8)) {
        if (c < '0' || c > '9') return 0;
        number = number * 10 + std::uint32_t(c - '0');
    }
    return segment_name(number) == name ? number : 0;
}

Directory::Directory(std::shared_ptr<Disk> disk, std::uint64_t seed) : disk_(std::move(disk)), state_(seed) {
    if (seed == 0) {
        std::random_device device;
        state_ = (std::uint64_t{device()} << 32) | device();
    }
}

std::uint64_t Directory::random() {  // splitmix64
    std::uint64_t value = state_ += 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

int Directory::open() {
    int error = 0;
    for (const char* path : {"shelves", "namespaces"}) {
        if (error = disk_->make_directory(path); error != 0) return error;
    }
    lock_ = File::open(disk_, "lock", OpenMode::create, error);
    return lock_ ? 0 : error;
}

std::uint64_t Directory::generation() const {
    std::uint64_t value = 0;
    if (disk_->removed(lock_->handle())) return ~value;
    return lock_->read(&value, sizeof value, 0) == sizeof value ? value : 0;
}

void Directory::shelves_changed() {
    const std::uint64_t value = generation() + 1;
    lock_->write(&value, sizeof value, 0);
}

// One that somebody removed keeps nobody out: those who come later make another, and so do we.
std::shared_ptr<File> Directory::standing_lock() {
    int error = 0;
    if (disk_->removed(lock_->handle())) {
        if (auto made = File::open(disk_, "lock", OpenMode::create, error)) lock_ = std::move(made);
    }
    return lock_;
}

Directory::Hold::Hold(std::shared_ptr<File> lock, std::chrono::milliseconds patience) : lock_(std::move(lock)) {
    const auto end = std::chrono::steady_clock::now() + patience;
    for (;;) {
        error = lock_->disk().lock(lock_->handle());
        if (error != -EWOULDBLOCK || std::chrono::steady_clock::now() >= end) return;
        std::this_thread::sleep_for(std::chrono::milliseconds{2});
    }
}

Directory::Hold::~Hold() {
    if (error == 0) lock_->disk().unlock(lock_->handle());
}

int Directory::adopt(std::vector<OwnedShelf>& into) {
    std::vector<DirEntry> entries;
    if (const int error = disk_->list("shelves", entries); error != 0) return error;
    for (const DirEntry& entry : entries) {
        if (!entry.directory || !is_shelf_name(entry.name)) continue;
        OwnedShelf shelf;
        if (take("shelves/" + entry.name, shelf) == 0) into.push_back(std::move(shelf));
    }
    return 0;
}

int Directory::take(const std::string& path, OwnedShelf& into) {
    int result = 0;
    auto owner = File::open(disk_, path + "/owner", OpenMode::create, result);
    if (owner) result = disk_->lock(owner->handle());
    if (result == 0) into = {path, std::move(owner), std::make_shared<Changes>(disk_, path + "/changes")};
    return result;
}

int Directory::look(const std::vector<OwnedShelf>& ours, std::vector<Neighbour>& into) const {
    std::vector<DirEntry> entries;
    if (const int error = disk_->list("shelves", entries); error != 0)
        return error == -ENOENT ? 0 : error;  // removed: nobody is there
    for (const DirEntry& entry : entries) {
        if (!entry.directory || !is_shelf_name(entry.name)) continue;
        Neighbour neighbour{.path = "shelves/" + entry.name, .record = {}};
        if (std::ranges::any_of(ours, [&](const OwnedShelf& shelf) { return shelf.path == neighbour.path; })) continue;
        int error = 0;
        const auto owner = File::open(disk_, neighbour.path + "/owner", OpenMode::read, error);
        if (!owner && error == -ENOENT) continue;
        if (!owner) return error;
        error = disk_->lock(owner->handle());                   // ends with the file
        if (error != 0 && error != -EWOULDBLOCK) return error;  // nobody knows whether it lives, and what limit it keeps to
        neighbour.alive = error != 0;
        std::array<std::byte, 4096> block;
        for (int attempt = 0; attempt < kReadAgain; ++attempt) {
            if (attempt > 0) std::this_thread::sleep_for(std::chrono::milliseconds{1});
            const std::int64_t got = owner->read(block.data(), block.size(), 0);
            if (got < 0) return int(got);
            const auto record = parse_owner({block.data(), std::size_t(got)});
            if (record) neighbour.record = *record;
            if (record || got == 0 || !neighbour.alive) break;  // else it is being written just now
        }
        into.push_back(std::move(neighbour));
    }
    return 0;
}

int Directory::make_shelf(OwnedShelf& into) {
    for (int attempt = 0; attempt < 16; ++attempt) {
        const std::string path = "shelves/" + hex64(random());
        int result = disk_->make_directory("shelves");
        if (result == 0) result = disk_->make_directory(path);
        if (result != 0) return result;
        auto owner = File::open(disk_, path + "/owner", OpenMode::create_new, result);
        if (result == -EEXIST) continue;
        if (owner) result = disk_->lock(owner->handle());
        if (result != 0) {  // it is tried again every second: nothing is left of each attempt
            if (owner) disk_->remove(path + "/owner");
            disk_->remove(path);
            return result;
        }
        into = {path, std::move(owner), std::make_shared<Changes>(disk_, path + "/changes")};
        shelves_changed();
        return 0;
    }
    return -EEXIST;
}

void Directory::remove_shelf(OwnedShelf& shelf) {
    std::vector<DirEntry> entries;
    if (disk_->list(shelf.path, entries) != 0) return;
    if (!std::ranges::all_of(entries, [](const DirEntry& entry) { return !entry.directory && is_shelf_file(entry.name); })) return;
    disk_->remove(shelf.path + "/changes");
    disk_->remove(shelf.path + "/owner");
    disk_->remove(shelf.path);
    shelf.owner.reset();
    shelves_changed();
}

int Directory::taken_bytes(std::uint64_t& into) const {
    into = 4096;  // the root itself, which no listing names
    return count_bytes(*disk_, "", kDepth, into);
}

int Directory::write_namespace(const Key& space, const std::string& json) {
    std::vector<DirEntry> entries;
    const std::string name = hex(space) + ".json";
    if (const int error = disk_->list("namespaces", entries); error != 0) return error;
    bool there = false;
    for (const DirEntry& entry : entries) {
        there |= entry.name == name && entry.size == json.size();
        if (entry.name.ends_with(".tmp")) disk_->remove("namespaces/" + entry.name);  // its writer died: we hold the lock
    }
    if (there || entries.size() >= kMostNamespaces) return 0;
    const std::string temporary = "namespaces/" + hex64(random()) + ".tmp";
    int error = 0;
    if (auto file = File::open(disk_, temporary, OpenMode::create, error); file) {
        error = file->write(json.data(), json.size(), 0);
        if (error == 0) error = disk_->sync(file->handle());  // a name must not survive a power loss without its content
    }
    if (error == 0) error = disk_->rename(temporary, "namespaces/" + name);
    if (error != 0) disk_->remove(temporary);
    return error;
}

}  // namespace kvstrata
