#include "../keys.hpp"

#include <doctest/doctest.h>

#include <set>
#include <thread>
#include <vector>

#include "../directory.hpp"
#include "fingerprint.hpp"

using namespace kvstrata;
using kvstrata::testing::key_of;

// Computed with Python's hashlib and struct over the format that keys.hpp states.
TEST_CASE("page keys: golden vectors") {
    Key space;
    for (int i = 0; i < 32; ++i) space.bytes[std::size_t(i)] = std::uint8_t(i);
    const std::vector<std::int32_t> tokens{1, 2, 3, -4};
    const std::vector<MediaItem> media{{-2, key_of(0x55)}, {1, space}};
    CHECK(hex(page_key(space, space, {tokens, {}})) == "7d7706921a44d7e48956d435fde008280768b5692ecb00d588cec411c75d9e35");
    CHECK(hex(page_key(space, key_of(0xee), {tokens, {}})) == "f7631208aa3019256089e08c7c7438b3ef86002b6f29427ba8f845070d9bee74");
    CHECK(hex(page_key(space, space, {tokens, media})) == "30e629f1c965b635a126adc474a6842e32469ff5c07d0b4bf5070df4b92e7893");
    CHECK(hex(page_key(space, space, {})) == "b83e19d8758620d4e3384f05144f88b486b81217a22b6aa38805b9245c393602");
}

TEST_CASE("page keys: whatever differs gives another key") {
    const Key space = key_of(1);
    const std::vector<std::int32_t> tokens{5, 6, 7, 8};
    const std::vector<std::int32_t> neighbours{5 + 31, 6 - 1, 7, 8};  // the additive trick against polynomial hashes
    const std::vector<std::int32_t> shorter{5, 6, 7};
    const std::vector<MediaItem> media{{0, key_of(9)}};
    const std::vector<MediaItem> moved{{1, key_of(9)}};
    const std::vector<MediaItem> other{{0, key_of(8)}};
    std::set<std::string> keys;
    for (const Content& content : {Content{tokens, {}}, Content{neighbours, {}}, Content{shorter, {}}, Content{tokens, media},
                                   Content{tokens, moved}, Content{tokens, other}}) {
        keys.insert(hex(page_key(space, space, content)));
        keys.insert(hex(page_key(space, key_of(2), content)));
        keys.insert(hex(page_key(key_of(2), space, content)));
    }
    CHECK(keys.size() == 18);
}

TEST_CASE("page keys: many random pages, no two alike, from several threads") {
    std::vector<std::vector<std::uint64_t>> prefixes(4);
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 4; ++t) {
        threads.emplace_back([t, &mine = prefixes[t]] {
            for (std::int32_t i = 0; i < 25000; ++i) {
                const std::int32_t tokens[4] = {i, std::int32_t(t), i ^ 31, 1 - i};
                mine.push_back(page_key(key_of(1), key_of(1), {tokens, {}}).prefix());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::set<std::uint64_t> all;
    for (const auto& some : prefixes) all.insert(some.begin(), some.end());
    CHECK(all.size() == 100000);
}

TEST_CASE("content hash sees tokens and media") {
    const std::vector<std::int32_t> tokens{1, 2, 3};
    const std::vector<MediaItem> media{{0, key_of(9)}};
    CHECK(content_hash({tokens, {}}) == content_hash({std::vector<std::int32_t>(tokens), {}}));
    CHECK(content_hash({tokens, {}}) != content_hash({tokens, media}));
}
