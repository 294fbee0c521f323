#include "handles.hpp"

namespace kvstrata {

std::shared_ptr<File> Handles::get(const std::string& path, OpenMode mode, int& result) {
    const Name name{path, mode};
    {
        const std::lock_guard lock(mutex_);
        if (const auto found = table_.find(name); found != table_.end()) {
            recent_.splice(recent_.begin(), recent_, found->second);
            result = 0;
            return found->second->second;
        }
    }
    // Opened without the lock: one file that does not answer must not hold up the others.
    std::shared_ptr<File> file = File::open(disk_, path, mode, result);
    if (!file) return nullptr;
    std::shared_ptr<File> dropped;  // closed after the lock is gone
    const std::lock_guard lock(mutex_);
    if (const auto found = table_.find(name); found != table_.end()) {
        dropped = std::exchange(file, found->second->second);
        return file;
    }
    recent_.emplace_front(name, file);
    table_.emplace(name, recent_.begin());
    if (recent_.size() > limit_) {
        dropped = std::move(recent_.back().second);
        table_.erase(recent_.back().first);
        recent_.pop_back();
    }
    return file;
}

void Handles::forget(const std::string& path) {
    Recent dropped;
    const std::lock_guard lock(mutex_);
    for (const OpenMode mode : {OpenMode::read, OpenMode::read_direct, OpenMode::update, OpenMode::update_direct}) {
        const auto found = table_.find({path, mode});
        if (found == table_.end()) continue;
        dropped.splice(dropped.begin(), recent_, found->second);
        table_.erase(found);
    }
}

}  // namespace kvstrata
