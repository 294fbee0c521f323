// A directory of its own for a test, removed at the end.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace kvstrata::testing {

struct Folder {
    Folder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "kvstrata-XXXXXX").string();
        path = mkdtemp(pattern.data());
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::string path;
};

}  // namespace kvstrata::testing
