#include "../forest.hpp"

#include <doctest/doctest.h>

#include <map>
#include <string>

#include "dice.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint32_t kSize = 4;  // tokens of a page

std::vector<std::int32_t> tokens_of(std::int32_t number) { return {number, number + 1, -number, 7}; }

void check(const Forest& forest) {
    std::string fault;
    CHECK_MESSAGE(forest.check_integrity(fault), fault);
}

// Adds the page with the tokens of `number`.
PageId add(Forest& forest, PageId parent, std::int32_t number, std::span<const MediaItem> media = {}) {
    return forest.insert(parent, {tokens_of(number), media}, key_of(static_cast<std::uint8_t>(number)));
}
PageId find(const Forest& forest, PageId parent, std::int32_t number, std::span<const MediaItem> media = {}) {
    return forest.child(parent, {tokens_of(number), media});
}

}  // namespace

TEST_CASE("forest: a page is found below its parent by its content, and nowhere else") {
    Forest forest(kSize);
    const PageId root = forest.root(key_of(1));
    const PageId one = add(forest, root, 1);
    const PageId two = add(forest, one, 2);
    CHECK(find(forest, root, 1) == one);
    CHECK(find(forest, one, 2) == two);
    CHECK(find(forest, root, 2) == kNoPage);
    CHECK(find(forest, two, 1) == kNoPage);
    CHECK(forest.at(two).depth == 2);
    CHECK(forest.space(two) == key_of(1));
    CHECK(forest.pages() == 2);
    check(forest);
}

TEST_CASE("forest: namespaces are worlds of their own, also when their names begin alike") {
    Forest forest(kSize);
    Key like = key_of(1);
    like.bytes[31] = 2;  // the first eight bytes, which tables use, are the same
    const PageId first = forest.root(key_of(1)), second = forest.root(like);
    CHECK(first != second);
    const PageId page = add(forest, first, 5);
    CHECK(find(forest, second, 5) == kNoPage);
    CHECK(forest.root(key_of(1)) == first);
    forest.erase(page);
    forest.erase(first);
    CHECK(forest.root(like) == second);
    CHECK(forest.root(key_of(1)) != second);
    check(forest);
}

TEST_CASE("forest: media are part of a page's content, with their place in it") {
    Forest forest(kSize);
    const PageId root = forest.root(key_of(1));
    const MediaItem here{.offset = 1, .digest = key_of(0x55)}, there{.offset = 2, .digest = key_of(0x55)},
        other{.offset = 1, .digest = key_of(0x56)}, before{.offset = -3, .digest = key_of(0x55)};
    const PageId plain = add(forest, root, 1);
    std::map<PageId, std::vector<MediaItem>> pages;
    for (const auto& media :
         {std::vector{here}, std::vector{there}, std::vector{other}, std::vector{before}, std::vector{before, here}})
        pages[add(forest, root, 1, media)] = media;
    CHECK(pages.size() == 5);
    CHECK(find(forest, root, 1) == plain);
    for (const auto& [page, media] : pages) {
        CHECK(find(forest, root, 1, media) == page);
        CHECK(forest.content(page).media.size() == media.size());
    }
    check(forest);
    const PageId gone = find(forest, root, 1, std::vector{here});
    forest.erase(gone);
    CHECK(find(forest, root, 1, std::vector{here}) == kNoPage);
    CHECK(add(forest, root, 1) == gone);  // a record's next life does not inherit its media
    CHECK(forest.content(gone).media.empty());
}

TEST_CASE("forest: the first child is only a hint") {
    Forest forest(kSize);
    const PageId root = forest.root(key_of(1));
    const PageId one = add(forest, root, 1), two = add(forest, root, 2), three = add(forest, root, 3);
    CHECK(forest.at(root).first_child == one);
    forest.erase(one);
    CHECK(find(forest, root, 1) == kNoPage);
    CHECK(find(forest, root, 2) == two);
    CHECK(find(forest, root, 3) == three);
    const PageId again = add(forest, root, 1);
    CHECK(find(forest, root, 1) == again);
    CHECK(find(forest, root, 3) == three);
    CHECK(forest.at(root).children == 3);
    check(forest);
}

TEST_CASE("forest: a record counts its lives") {
    Forest forest(kSize);
    const PageId root = forest.root(key_of(1));
    const PageId page = add(forest, root, 1);
    const std::uint32_t life = forest.at(page).generation;
    forest.at(page).pins = 3;
    forest.erase(page);
    CHECK(add(forest, root, 2) == page);
    CHECK(forest.at(page).generation == life + 1);
    CHECK(forest.at(page).pins == 0);
}

// The table starts with 64 places and is at most half full: probe sequences collide, cross the end of the table, and are closed again.
TEST_CASE("forest: pages come and go as in a plain map") {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CAPTURE(seed);
        Dice dice(seed);
        Forest forest(kSize);
        const std::size_t most = seed % 2 == 0 ? 32 : 3000;  // at the edge of the smallest table, or growing
        std::map<std::pair<PageId, std::int32_t>, PageId> model;
        std::vector<PageId> parents;
        for (std::uint8_t space = 0; space < 3; ++space) parents.push_back(forest.root(key_of(space)));
        for (int step = 0; step < 4000; ++step) {
            const PageId parent = dice.pick(parents);
            const auto number = static_cast<std::int32_t>(dice.below(most));
            const auto found = model.find({parent, number});
            CHECK(find(forest, parent, number) == (found == model.end() ? kNoPage : found->second));
            if (found != model.end()) {
                forest.erase(found->second);
                model.erase(found);
            } else if (model.size() < most) {
                model[{parent, number}] = add(forest, parent, number);
            }
            if (step % 100 == 0) check(forest);
        }
        for (const auto& [place, page] : model) CHECK(find(forest, place.first, place.second) == page);
        CHECK(forest.pages() == model.size());
    }
}
