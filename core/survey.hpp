// What a cache directory holds, as its tables tell: shelves, segments, namespaces, files that are not ours. Reads only, beside whoever
// lives there.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "disk.hpp"
#include "segment_format.hpp"

namespace kvstrata {

struct SegmentSurvey {
    std::string name;  // of the file
    std::uint64_t bytes = 0;
    std::uint64_t allocated = 0;
    int error = 0;  // -errno: it could not be read, or not to its end
    HeaderState state = HeaderState::damaged;
    std::uint32_t version = 0;  // that it claims
    // Only where the state is sound:
    Shape shape;
    std::uint32_t slots = 0;
    std::uint32_t pages = 0;
    std::uint32_t damaged_records = 0;
    std::uint32_t cut_pages = 0;  // of the pages, those behind the file's end
    std::uint32_t last_use = 0;
};

struct ShelfSurvey {
    std::string id;
    bool alive = false;  // a process owns it
    int error = 0;       // -errno: it could not be listed
    std::vector<SegmentSurvey> segments;
};

struct SpaceSurvey {
    std::uint32_t page_size = 0;  // tokens
    std::uint64_t pages = 0;
    std::uint64_t bytes = 0;  // of their slots
    std::uint64_t uses = 0;
    std::uint32_t first_use = ~std::uint32_t{0};  // the longest ago of the pages' last uses
    std::uint32_t last_use = 0;                   // in seconds since 1970
};

struct UnknownFile {
    std::string path;
    std::uint64_t bytes = 0;  // allocated
};

struct Survey {
    int error = 0;                // -errno: the directory could not be listed
    std::uint64_t allocated = 0;  // by everything in it, as the cap counts it
    std::uint64_t free = 0;       // on its file system
    std::vector<ShelfSurvey> shelves;
    std::map<Key, SpaceSurvey, KeyOrder> spaces;  // namespaces with pages
    std::vector<std::string> descriptions;        // namespaces/<hex>.json: <hex>
    std::vector<UnknownFile> unknown;             // names that are not ours
};

// `patience`: with somebody who holds the directory's lock, at most; without it the rare race is the lesser evil.
Survey survey(const std::shared_ptr<Disk>& disk, std::chrono::milliseconds patience = std::chrono::milliseconds{1000});

// Which of the shelves have a living owner, asked under the directory's lock: to know, an owner's lock must be taken for a moment, and nobody who
// adopts shelves may take that moment for an owner.
std::map<std::string, bool> living_owners(const std::shared_ptr<Disk>& disk, const std::vector<std::string>& shelves,
                                          std::chrono::milliseconds patience);

// Every page that the tables of a survey name, read again.
void for_each_page(const std::shared_ptr<Disk>& disk, const Survey& all, const std::function<void(const Record&)>& sink);
// Those of the keys that some table names.
std::set<Key, KeyOrder> pages_among(const std::shared_ptr<Disk>& disk, const Survey& all, const std::set<Key, KeyOrder>& keys);

// A page that continues another: whose key, or namespace where it is the first, and its tokens.
struct NextPage {
    Key above;
    std::vector<std::int32_t> tokens;
};
// Those that continue one of the keys, `most` at most, as far as their slots' headers can be read and prove it.
std::vector<NextPage> pages_after(const std::shared_ptr<Disk>& disk, const Survey& all, const std::set<Key, KeyOrder>& keys,
                                  std::size_t most);

}  // namespace kvstrata
