// What lies on the platter of a simulated disk, and what faults and power losses do to it.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "disk_sim.hpp"

namespace kvstrata {

std::shared_ptr<SimMedium> SimMedium::make(std::uint64_t seed, std::uint64_t capacity) {
    return std::shared_ptr<SimMedium>(new SimMedium(seed, capacity));  // the constructor is private; owned at once
}

std::shared_ptr<SimDisk> SimMedium::attach() { return std::make_shared<SimDisk>(shared_from_this()); }

void SimMedium::set_faults(const SimFaults& faults) {
    const std::lock_guard lock(mutex_);
    faults_ = faults;
    operations_ = 0;
}

std::uint64_t SimMedium::operations() const {
    const std::lock_guard lock(mutex_);
    return operations_;
}

void SimMedium::release() {
    const std::lock_guard lock(mutex_);
    ++releases_;
    released_.notify_all();
}

std::size_t SimMedium::stalled() const {
    const std::lock_guard lock(mutex_);
    return stalled_;
}

// Counts the operation and says how it goes wrong: -errno, -ESHUTDOWN for a dead view, or 0 with `shorten` set.
int SimMedium::begin(std::unique_lock<std::mutex>& lock, const std::shared_ptr<bool>& alive, bool transfer, bool& shorten) {
    if (!*alive) return -ESHUTDOWN;
    const std::uint64_t number = ++operations_;
    if (number == faults_.stall_at) {
        ++stalled_;
        released_.wait(lock, [&, before = releases_] { return releases_ != before || !*alive; });
        --stalled_;
        if (!*alive) return -ESHUTDOWN;
    }
    bool fails = faults_.fail_at != 0 && (number == faults_.fail_at || (faults_.and_after && number > faults_.fail_at));
    if (faults_.chance > 0) fails = fails || std::uniform_real_distribution<>(0, 1)(random_) < faults_.chance;
    if (!fails) return 0;
    shorten = faults_.shorten && transfer;
    return shorten ? 0 : -faults_.error;
}

bool SimMedium::parent_exists(const std::string& path) const {
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return true;
    const auto found = nodes_.find(path.substr(0, slash));
    return found != nodes_.end() && found->second->directory;
}

std::uint64_t SimMedium::allocated() const {
    std::uint64_t bytes = kSector;  // the root
    for (const auto& [path, node] : nodes_)
        bytes += node->directory ? kSector : (node->data.size() + kSector - 1) / kSector * kSector;
    return bytes;
}

int SimMedium::resize(const NodePtr& node, std::uint64_t bytes) {
    const std::uint64_t before = node->data.size();
    if (bytes == before) return 0;
    if (bytes > before && allocated() + (bytes - before) > capacity_) return -ENOSPC;
    undo_.push_back([node, before] { node->data.resize(before); });
    node->data.resize(bytes);
    changed();
    return 0;
}

// Within one sector, inside the file.
void SimMedium::put(Node& node, const std::byte* from, std::uint64_t offset, std::size_t bytes) {
    const std::uint64_t sector = offset / kSector;
    const std::size_t begin = sector * kSector;
    const std::size_t end = std::min<std::size_t>(begin + kSector, node.data.size());
    auto& versions = node.unsynced[sector];
    if (versions.size() == 4) versions.erase(versions.begin() + 1);
    versions.emplace_back(node.data.begin() + std::ptrdiff_t(begin), node.data.begin() + std::ptrdiff_t(end));
    std::memcpy(node.data.data() + offset, from, bytes);
}

void SimMedium::crash(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::lock_guard lock(mutex_);
    for (const auto& view : views_) {
        if (const auto alive = view.lock()) *alive = false;
    }
    views_.clear();
    ++releases_;
    released_.notify_all();
    // Half the time the file system had just written its journal.
    for (std::size_t lost = undo_.empty() || random() % 2 == 0 ? 0 : random() % (undo_.size() + 1); lost > 0; --lost) {
        undo_.back()();
        undo_.pop_back();
    }
    undo_.clear();
    const std::uint64_t rarity = std::uint64_t{2} << (random() % 3 * 2);  // one sector in 2, 8 or 32 did not make it
    for (const auto& [path, node] : nodes_) {
        node->locked_by = 0;
        for (auto& [sector, versions] : node->unsynced) {
            const std::size_t begin = sector * kSector;
            if (begin >= node->data.size()) continue;
            const std::size_t size = std::min(kSector, node->data.size() - begin);
            const std::uint64_t dice = random();
            if (dice % rarity != 0) continue;  // kept
            auto& old = versions[(dice / 64) % versions.size()];
            old.resize(kSector);
            const std::size_t torn = (dice / 256) % 8 == 0 ? (dice / 2048) % 8 * 512 : kSector;  // rarely within the sector
            std::memcpy(node->data.data() + begin, old.data(), std::min(size, torn));
        }
        node->unsynced.clear();
    }
}

std::uint64_t SimMedium::allocated_bytes() const {
    const std::lock_guard lock(mutex_);
    return allocated();
}

std::uint64_t SimMedium::peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_;
}

void SimMedium::set_capacity(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    capacity_ = bytes;
}

void SimMedium::set_direct(bool direct) {
    const std::lock_guard lock(mutex_);
    direct_ = direct;
}

std::vector<std::string> SimMedium::files() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> paths;
    for (const auto& [path, node] : nodes_) {
        if (!node->directory) paths.push_back(path);
    }
    return paths;
}

void SimMedium::edit(const std::string& path, const std::function<void(std::vector<std::byte>&)>& change) {
    const std::lock_guard lock(mutex_);
    NodePtr& node = nodes_[path];
    if (!node) node = std::make_shared<Node>();
    change(node->data);
    node->unsynced.clear();
}

}  // namespace kvstrata
