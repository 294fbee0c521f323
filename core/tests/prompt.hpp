// Requests that share prefixes, and what their pages are called and contain.
//
// A page's bytes follow from its namespace and everything before it, by a way of their own (not through page keys): so a page that is
// served under a wrong name is seen by its bytes.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../driver.hpp"
#include "dice.hpp"

namespace kvstrata::testing {

// A promise of the core was broken.
struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};
inline void require(bool holds, const char* what) {
    if (!holds) throw Broken(what);
}

struct PageName {
    Key key, parent;          // as the core calls it
    std::uint64_t chain = 0;  // what its bytes follow from
};

inline unsigned name(const Key& key) { return static_cast<unsigned>(key.prefix() & 0xffff); }  // for people

// The row of a page: `bytes` bytes from its chain.
std::vector<std::byte> row_of(std::uint64_t chain, std::size_t bytes);

class Prompt {
   public:
    // Few contents and namespaces, so that prompts meet.
    static Prompt draw(Dice& dice, std::uint32_t page_size, std::uint32_t most_pages, std::uint32_t spaces);

    // One that no drawn prompt shares a page with.
    static Prompt apart(std::uint32_t page_size, std::uint32_t tokens);

    void extend(Dice& dice, std::uint32_t tokens);  // as if generated
    const Key& space() const { return space_; }
    const std::vector<std::int32_t>& tokens() const { return tokens_; }
    const std::vector<MediaSpan>& media() const { return media_; }
    const std::vector<PageName>& pages() const { return pages_; }  // the full ones

   private:
    void name_pages();

    std::uint32_t page_size_ = 1;
    Key space_;
    std::vector<std::int32_t> tokens_;
    std::vector<MediaSpan> media_;
    std::int32_t content_ = 0;  // of the page that the next token falls into
    std::vector<PageName> pages_;
};

}  // namespace kvstrata::testing
