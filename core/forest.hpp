// The page forest: one record per page that this process knows with its tokens. A root stands for a namespace.
//
// A page is found through its parent and its content; contents are compared, never trusted by hash. The forest knows structure and
// content; what the residency fields mean is decided by the ledger, their only writer.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "types.hpp"

namespace kvstrata {

enum class Residency : std::uint8_t {
    none,
    incoming,  // a row is reserved, its bytes are not there yet
    resident,  // the bytes are there: findable
};

// First what every match reads, within one line of the processor's cache.
struct PageRecord {
    PageId first_child = kNoPage;   // a hint, tried before the table
    std::uint32_t children = 0;     // records below this one
    Row row[2] = {kNoRow, kNoRow};  // gpu / cpu
    Residency state[2] = {};
    bool candidate[2] = {};  // the policy may name it a victim
    bool alive = false;
    bool load_queued = false;  // waits in the driver's queue for a slab row
    bool spilling = false;     // waits to be written to disk, or is being written
    EntryId entry = kNoEntry;  // its copy on disk
    std::uint32_t noted = 0;   // when that copy's use was noted, or looked at for it, in seconds; 0: not since it is this page's
    PageId parent = kNoPage;   // kNoPage: a root
    PageId root = kNoPage;     // of its namespace; of a root: itself
    std::uint32_t depth = 0;   // pages from the root; a root has 0
    std::uint32_t hash = 0;    // of parent and content
    std::uint32_t pins = 0;    // leases whose deepest page in the serving tier this is
    std::uint32_t tier_children[2] = {};  // of the children, those incoming or resident in gpu / cpu
    std::uint32_t busy[2] = {};           // moves that read this copy now, or wait to
    std::uint32_t generation = 0;         // counts the lives of this record
    std::uint64_t ready = 0;              // the batch that wrote the copy in gpu, where a lease published it
    Key key;                              // page key; of a root: the namespace

    bool is_root() const { return parent == kNoPage; }
};

class Forest {
   public:
    explicit Forest(std::uint32_t page_size);

    // The root of a namespace, made when asked for first.
    PageId root(const Key& space);
    // The child of `parent` with this content, or kNoPage.
    PageId child(PageId parent, const Content& content) const {
        const PageId first = at(parent).first_child;
        if (first != kNoPage) {
            // The caller reads this record next, and the following ones soon: a prefix that was published at once lies in order.
            __builtin_prefetch(&at(first));
            if (first + kAhead < next_) {
                __builtin_prefetch(&at(first + kAhead));
                __builtin_prefetch(tokens(first + kAhead));
            }
            if (same(first, content)) return first;
        }
        return at(parent).children == 0 ? kNoPage : search(parent, content);
    }
    // Adds a child that child() did not find.
    PageId insert(PageId parent, const Content& content, const Key& key);
    // Removes a record without children.
    void erase(PageId page);

    PageRecord& at(PageId page) { return blocks_[page >> kBlockBits]->records[page & kBlockMask]; }
    const PageRecord& at(PageId page) const { return blocks_[page >> kBlockBits]->records[page & kBlockMask]; }
    // Borrowed until the page is erased.
    Content content(PageId page) const;
    const Key& space(PageId page) const { return at(at(page).root).key; }  // the namespace it lives in

    std::uint32_t page_size() const { return page_size_; }
    std::size_t pages() const { return live_; }  // roots not counted
    PageId id_bound() const { return next_; }    // every id ever given is below
    bool check_integrity(std::string& fault) const;

   private:
    static constexpr PageId kAhead = 8;
    static constexpr unsigned kBlockBits = 10;
    static constexpr PageId kBlockMask = (PageId{1} << kBlockBits) - 1;
    struct Block {
        std::array<PageRecord, std::size_t{1} << kBlockBits> records;
        std::unique_ptr<std::int32_t[]> tokens;
    };

    PageId allocate();
    std::int32_t* tokens(PageId page) const {
        return blocks_[page >> kBlockBits]->tokens.get() + std::size_t{page & kBlockMask} * page_size_;
    }
    std::span<const MediaItem> media(PageId page) const;
    PageId search(PageId parent, const Content& content) const;
    bool same(PageId page, const Content& content) const {
        return same_tokens(tokens(page), content.tokens.data(), page_size_) &&
               ((media_.empty() && content.media.empty()) || same_media(page, content));
    }
    bool same_media(PageId page, const Content& content) const;
    static bool same_tokens(const std::int32_t* a, const std::int32_t* b, std::size_t count);
    static std::uint32_t mix(PageId parent, const Content& content);
    struct Place;
    void table_insert(PageId page);
    void table_put(Place place);
    void table_erase(PageId page);
    void table_grow();

    std::uint32_t page_size_;
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<PageId> free_;
    PageId next_ = 0;
    std::size_t live_ = 0;
    // Open addressing, linear probing, no tombstones; at most half full. With the hash beside it, no look at the records of others.
    struct Place {
        PageId page = kNoPage;
        std::uint32_t hash = 0;
    };
    std::vector<Place> table_;
    std::unordered_map<std::uint64_t, std::vector<PageId>> roots_;
    std::unordered_map<PageId, std::vector<MediaItem>> media_;  // of the few pages that have any
};

}  // namespace kvstrata
