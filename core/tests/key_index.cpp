#include "../key_index.hpp"

#include <doctest/doctest.h>

#include <map>
#include <string>

#include "dice.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// A key whose place in a table of 64 is `home`; `number` makes it different from others of the same place.
Key key_at(std::uint64_t home, std::uint8_t number) {
    Key key;
    const std::uint64_t prefix = home + 64 * 1000;
    std::memcpy(key.bytes.data(), &prefix, sizeof prefix);
    key.bytes[20] = number;
    return key;
}

void check(const KeyIndex& index) {
    std::string fault;
    CHECK_MESSAGE(index.check_integrity(fault), fault);
}

}  // namespace

TEST_CASE("key index: keys of the same place are told apart, over the end of the table too") {
    KeyIndex index;
    std::vector<std::pair<Key, EntryId>> added;
    for (const std::uint64_t home : {62, 63, 0})
        for (std::uint8_t number = 1; number <= 4; ++number) {
            const Key key = key_at(home, number);
            added.emplace_back(key, index.insert(key, key_of(0xFF), {1, number}));
        }
    for (const auto& [key, entry] : added) CHECK(index.find(key) == entry);
    CHECK(index.find(key_at(63, 9)) == kNoEntry);
    // Whatever goes, what is behind it moves up and is found.
    for (std::size_t gone = 0; gone < added.size(); ++gone) {
        KeyIndex copy = index;
        copy.erase(added[gone].second);
        check(copy);
        for (std::size_t i = 0; i < added.size(); ++i) CHECK(copy.find(added[i].first) == (i == gone ? kNoEntry : added[i].second));
    }
}

TEST_CASE("key index: an entry knows its parent where that is on disk") {
    KeyIndex index;
    const EntryId top = index.insert(key_of(1), key_of(0x77), {0, 0});
    const EntryId child = index.insert(key_of(2), key_of(1), {0, 1});
    const EntryId other = index.insert(key_of(3), key_of(1), {0, 2});
    CHECK(index.at(top).parent == kNoEntry);
    CHECK(index.at(child).parent == top);
    CHECK(index.at(top).children == 2);
    index.erase(other);
    CHECK(index.at(top).children == 1);
    index.erase(top);  // damaged: its child stays, without a parent
    CHECK(index.at(child).parent == kNoEntry);
    const EntryId again = index.insert(key_of(1), key_of(0x77), {0, 3});
    CHECK(index.at(again).children == 0);
    check(index);
    index.erase(child);
    check(index);
}

TEST_CASE("key index: pages of an earlier run are linked in whatever order they were found") {
    KeyIndex index;
    const EntryId grandchild = index.insert(key_of(3), key_of(2), {0, 0});
    const EntryId child = index.insert(key_of(2), key_of(1), {0, 1});
    const EntryId top = index.insert(key_of(1), key_of(0), {0, 2});
    CHECK(index.at(child).children == 0);
    index.link(grandchild, key_of(2));
    index.link(child, key_of(1));
    index.link(top, key_of(0));
    index.link(child, key_of(1));  // again: nothing changes
    CHECK(index.at(grandchild).parent == child);
    CHECK(index.at(child).parent == top);
    CHECK(index.at(top).children == 1);
    CHECK(index.at(top).parent == kNoEntry);
    check(index);
}

TEST_CASE("key index: a key that names itself as its parent has none") {
    KeyIndex index;
    const EntryId entry = index.insert(key_of(1), key_of(1), {0, 0});
    CHECK(index.at(entry).parent == kNoEntry);
    CHECK(index.at(entry).children == 0);
    index.erase(entry);
    check(index);
}

TEST_CASE("key index: entries come and go as in a plain map") {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CAPTURE(seed);
        Dice dice(seed);
        KeyIndex index;
        const std::uint32_t homes = seed % 2 == 0 ? 3 : 64;
        std::map<std::pair<std::uint32_t, std::uint8_t>, EntryId> model;
        for (int step = 0; step < 3000; ++step) {
            const std::uint32_t home = 63 - dice.below(homes);
            const auto number = static_cast<std::uint8_t>(dice.below(seed % 2 == 0 ? 10 : 4));
            const Key key = key_at(home, number), parent = key_at(63 - dice.below(homes), static_cast<std::uint8_t>(dice.below(4)));
            const auto found = model.find({home, number});
            REQUIRE(index.find(key) == (found == model.end() ? kNoEntry : found->second));
            if (found != model.end()) {
                index.erase(found->second);
                model.erase(found);
            } else {
                model[{home, number}] = index.insert(key, parent, {home, number});
            }
            if (step % 50 == 0) check(index);
        }
        CHECK(index.size() == model.size());
        for (const auto& [name, entry] : model) CHECK(index.find(key_at(name.first, name.second)) == entry);
    }
}
