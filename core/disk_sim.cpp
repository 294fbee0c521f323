#include "disk_sim.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvstrata {
namespace {

constexpr std::size_t kSector = SimMedium::kSector;

std::string parent_of(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    return slash == std::string::npos ? std::string{} : path.substr(0, slash);
}

std::uint64_t blocks(std::uint64_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

std::uint64_t total_bytes(std::span<const iovec> parts) {
    std::uint64_t bytes = 0;
    for (const iovec& part : parts) bytes += part.iov_len;
    return bytes;
}

}  // namespace

SimDisk::SimDisk(std::shared_ptr<SimMedium> medium) : medium_(std::move(medium)), alive_(std::make_shared<bool>(true)) {
    const std::lock_guard lock(medium_->mutex_);
    medium_->views_.push_back(alive_);
}

void SimDisk::kill() {
    const std::lock_guard lock(medium_->mutex_);
    *alive_ = false;
    for (auto& [number, handle] : handles_) {
        if (handle.node->locked_by == number) handle.node->locked_by = 0;
    }
    handles_.clear();
    medium_->released_.notify_all();
}

SimDisk::Handle* SimDisk::find(int file) {
    const auto found = handles_.find(file);
    return *alive_ && found != handles_.end() ? &found->second : nullptr;
}

bool SimDisk::aligned(const Handle& handle, std::span<const iovec> parts, std::uint64_t offset) {
    if (handle.mode != OpenMode::update_direct && handle.mode != OpenMode::read_direct) return true;
    return offset % kSector == 0 && std::ranges::all_of(parts, [](const iovec& part) {
               return part.iov_len % kSector == 0 && reinterpret_cast<std::uintptr_t>(part.iov_base) % kSector == 0;
           });
}

int SimDisk::open(const std::string& path, OpenMode mode) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    auto found = medium_->nodes_.find(path);
    const bool makes = mode == OpenMode::create || mode == OpenMode::create_new;
    if (found != medium_->nodes_.end() && mode == OpenMode::create_new) return -EEXIST;
    if (found == medium_->nodes_.end()) {
        if (!makes || !medium_->parent_exists(path)) return -ENOENT;
        found = medium_->nodes_.emplace(path, std::make_shared<SimMedium::Node>()).first;
        medium_->undo_.push_back([medium = medium_.get(), path] { medium->nodes_.erase(path); });
    }
    if (found->second->directory) return -EISDIR;
    const int number = medium_->next_handle_++;
    handles_.emplace(number, Handle{found->second, mode});
    return number;
}

int SimDisk::close(int file) {
    const std::lock_guard lock(medium_->mutex_);
    const auto found = handles_.find(file);
    if (found == handles_.end()) return -EBADF;
    if (found->second.node->locked_by == file) found->second.node->locked_by = 0;
    handles_.erase(found);
    return 0;
}

std::int64_t SimDisk::preadv(int file, std::span<const iovec> parts, std::uint64_t offset) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, true, shorten); error != 0) return error;
    const Handle* handle = find(file);
    if (!handle) return -EBADF;
    if (!aligned(*handle, parts, offset)) return -EINVAL;
    const auto& data = handle->node->data;
    std::uint64_t left = shorten ? total_bytes(parts) / 2 : total_bytes(parts);
    left = std::min<std::uint64_t>(left, data.size() - std::min<std::uint64_t>(offset, data.size()));
    std::uint64_t done = 0;
    for (const iovec& part : parts) {
        const std::size_t bytes = std::min<std::uint64_t>(part.iov_len, left - done);
        if (bytes > 0) std::memcpy(part.iov_base, data.data() + offset + done, bytes);
        done += bytes;
    }
    return std::int64_t(done);
}

std::int64_t SimDisk::pwritev(int file, std::span<const iovec> parts, std::uint64_t offset) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    const int error = medium_->begin(lock, alive_, true, shorten);
    const Handle* handle = find(file);
    if (!handle) return error != 0 ? error : -EBADF;
    if (handle->mode == OpenMode::read || handle->mode == OpenMode::read_direct) return -EBADF;
    if (!aligned(*handle, parts, offset)) return -EINVAL;
    std::vector<std::byte> all(total_bytes(parts));
    std::size_t at = 0;
    for (const iovec& part : parts) {
        std::memcpy(all.data() + at, part.iov_base, part.iov_len);
        at += part.iov_len;
    }
    if (shorten) all.resize(all.size() / 2);
    // A write that fails may have reached some of its sectors.
    const bool cut = error != 0 && error != -ESHUTDOWN;
    if (error != 0 && !cut) return error;
    if (const int full =
            cut ? 0 : medium_->resize(handle->node, std::max<std::uint64_t>(handle->node->data.size(), offset + all.size()));
        full != 0) {
        return full;
    }
    for (at = 0; at < all.size();) {
        const std::size_t bytes = std::min(all.size() - at, kSector - (offset + at) % kSector);
        const bool inside = offset + at + bytes <= handle->node->data.size();
        if (!cut || (inside && medium_->random_() % 2 == 0)) medium_->put(*handle->node, all.data() + at, offset + at, bytes);
        at += bytes;
    }
    return cut ? error : std::int64_t(all.size());
}

int SimDisk::allocate(int file, std::uint64_t bytes) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    const Handle* handle = find(file);
    if (!handle) return -EBADF;
    return medium_->resize(handle->node, std::max<std::uint64_t>(handle->node->data.size(), bytes));
}

int SimDisk::truncate(int file, std::uint64_t bytes) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    const Handle* handle = find(file);
    return handle ? medium_->resize(handle->node, bytes) : -EBADF;
}

int SimDisk::sync(int file) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    const Handle* handle = find(file);
    if (!handle) return -EBADF;
    handle->node->unsynced.clear();
    medium_->undo_.clear();  // a journal commits names and sizes in order
    return 0;
}

int SimDisk::lock(int file) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    const Handle* handle = find(file);
    if (!handle) return -EBADF;
    if (handle->node->locked_by != 0 && handle->node->locked_by != file) return -EWOULDBLOCK;
    handle->node->locked_by = file;
    return 0;
}

int SimDisk::unlock(int file) {
    const std::lock_guard lock(medium_->mutex_);
    const Handle* handle = find(file);
    if (!handle) return -EBADF;
    if (handle->node->locked_by == file) handle->node->locked_by = 0;
    return 0;
}

int SimDisk::make_directory(const std::string& path) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    if (const auto found = medium_->nodes_.find(path); found != medium_->nodes_.end())
        return found->second->directory ? 0 : -ENOTDIR;
    if (!medium_->parent_exists(path)) return -ENOENT;
    auto node = std::make_shared<SimMedium::Node>();
    node->directory = true;
    medium_->nodes_.emplace(path, node);
    medium_->undo_.push_back([medium = medium_.get(), path] { medium->nodes_.erase(path); });
    medium_->changed();
    return 0;
}

int SimDisk::remove(const std::string& path) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    const auto found = medium_->nodes_.find(path);
    if (found == medium_->nodes_.end()) return -ENOENT;
    const auto inside = medium_->nodes_.lower_bound(path + "/");
    if (inside != medium_->nodes_.end() && inside->first.starts_with(path + "/")) return -ENOTEMPTY;
    medium_->undo_.push_back([medium = medium_.get(), path, node = found->second] { medium->nodes_[path] = node; });
    medium_->nodes_.erase(found);
    return 0;
}

int SimDisk::rename(const std::string& from, const std::string& to) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    auto& nodes = medium_->nodes_;
    const auto found = nodes.find(from);
    if (found == nodes.end() || !medium_->parent_exists(to)) return -ENOENT;
    const auto old = nodes.find(to);
    medium_->undo_.push_back([&nodes, from, to, node = found->second, before = old == nodes.end() ? nullptr : old->second] {
        nodes[from] = node;
        if (before) {
            nodes[to] = before;
        } else {
            nodes.erase(to);
        }
    });
    nodes[to] = found->second;
    nodes.erase(from);
    return 0;
}

int SimDisk::list(const std::string& path, std::vector<DirEntry>& into) {
    into.clear();
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    const auto found = medium_->nodes_.find(path);
    if (!path.empty() && found == medium_->nodes_.end()) return -ENOENT;
    if (!path.empty() && !found->second->directory) return -ENOTDIR;
    for (const auto& [name, node] : medium_->nodes_) {
        if (parent_of(name) != path) continue;
        const std::uint64_t size = node->directory ? kSector : node->data.size();
        into.push_back({name.substr(path.empty() ? 0 : path.size() + 1), node->directory, blocks(size), size});
    }
    return 0;
}

int SimDisk::free_bytes(std::uint64_t& into) {
    std::unique_lock lock(medium_->mutex_);
    bool shorten = false;
    if (const int error = medium_->begin(lock, alive_, false, shorten); error != 0) return error;
    into = medium_->capacity_ - std::min(medium_->capacity_, medium_->allocated());
    return 0;
}

bool SimDisk::direct() const {
    const std::lock_guard lock(medium_->mutex_);
    return medium_->direct_;
}

}  // namespace kvstrata
