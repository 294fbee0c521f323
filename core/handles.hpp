// Open files by path, a bounded number of them: a directory of many terabytes has more segments than a process may have open files.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "file.hpp"

namespace kvstrata {

class Handles {
   public:
    static constexpr std::size_t kDefaultLimit = 256;

    explicit Handles(std::shared_ptr<Disk> disk, std::size_t limit = kDefaultLimit) : disk_(std::move(disk)), limit_(limit) {}

    // The open file, or nullptr and -errno. The file stays open as long as the caller holds it, even when it leaves this table.
    std::shared_ptr<File> get(const std::string& path, OpenMode mode, int& result);
    void forget(const std::string& path);

   private:
    using Name = std::pair<std::string, OpenMode>;
    using Recent = std::list<std::pair<Name, std::shared_ptr<File>>>;

    std::shared_ptr<Disk> disk_;
    std::size_t limit_;
    std::mutex mutex_;
    Recent recent_;  // most recently used first
    std::map<Name, Recent::iterator> table_;
};

}  // namespace kvstrata
