// The root directory as all processes share it: the lock, the shelves and who owns them, what everything in it takes, the namespaces.
//
//   lock                                flock, held briefly by whoever takes space or shelves; counts changes of the list of shelves
//   shelves/<16 hex>/owner              flock, held by the owner of that shelf for its life; what it tells others
//   shelves/<16 hex>/changes            what others should read again
//   shelves/<16 hex>/seg-000001.kvs     segments
//   namespaces/<64 hex>.json            what a namespace is, in clear
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "owner.hpp"
#include "types.hpp"

namespace kvstrata {

struct OwnedShelf {
    std::string path;             // shelves/<id>
    std::shared_ptr<File> owner;  // its flock; whoever holds it owns the shelf
    std::shared_ptr<Changes> changes = {};
    std::uint64_t id() const;
};

struct Neighbour {  // a shelf that somebody else owns
    std::string path;
    bool alive = false;
    OwnerRecord record;  // of a living owner; home 0: it tells nothing
};

class Directory {
   public:
    // What directories, small files and a file system's own blocks may add before anybody counts again.
    static constexpr std::uint64_t kSlackBytes = 16 * 1024;
    static constexpr std::size_t kMostNamespaces = 1000;  // that are described: tenants may come without end
    // What a process needs to tell others of itself: its shelf's directory and files. Room for the next one is kept free.
    static constexpr std::uint64_t kShelfBytes = 16 * 1024;

    Directory(std::shared_ptr<Disk> disk, std::uint64_t seed);

    int open();  // makes lock, shelves/ and namespaces/ where missing; 0 or -errno

    // The lock over space and shelves, by scope. `error` is -EWOULDBLOCK when others did not let go in time.
    class Hold {
       public:
        Hold(Directory& directory, std::chrono::milliseconds patience) : Hold(directory.standing_lock(), patience) {}
        Hold(std::shared_ptr<File> lock, std::chrono::milliseconds patience);  // of an open lock file
        ~Hold();
        Hold(const Hold&) = delete;
        Hold& operator=(const Hold&) = delete;
        int error = 0;

       private:
        std::shared_ptr<File> lock_;
    };

    // Counts the changes of the list of shelves: one small read. Another number: look again.
    std::uint64_t generation() const;

    // All below: only under Hold.
    int adopt(std::vector<OwnedShelf>& into);                                           // every shelf whose owner is gone
    int take(const std::string& path, OwnedShelf& into);                                // this one; -EWOULDBLOCK: its owner lives
    int make_shelf(OwnedShelf& into);                                                   // a new one, owned by us
    int look(const std::vector<OwnedShelf>& ours, std::vector<Neighbour>& into) const;  // at all others
    void shelves_changed();                                                             // another generation: all look again
    void remove_shelf(OwnedShelf& shelf);                                               // if no segment is left in it
    int taken_bytes(std::uint64_t& into) const;                                         // by everything under the root
    // 0 when it is there already, or as many as may be.
    int write_namespace(const Key& space, const std::string& json);

    std::uint64_t random();

   private:
    std::shared_ptr<File> standing_lock();

    std::shared_ptr<Disk> disk_;
    std::shared_ptr<File> lock_;
    std::uint64_t state_;
};

std::string hex(const Key& key);
std::string hex64(std::uint64_t value);
bool is_shelf_name(const std::string& name);  // of 16 hex digits
bool is_shelf_file(const std::string& name);  // of those beside the segments
// seg-000001.kvs; 0 when the name is not of that form.
std::string segment_name(std::uint32_t number);
std::uint32_t segment_number(const std::string& name);

}  // namespace kvstrata
