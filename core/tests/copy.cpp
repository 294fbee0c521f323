// Copies: every way of streaming this processor has, at every alignment, moves exactly the bytes it was told to.
#include "../copy.hpp"

#include <doctest/doctest.h>

#include <vector>

using namespace kvstrata;

namespace {

std::vector<std::byte> numbered(std::size_t bytes) {
    std::vector<std::byte> made(bytes);
    for (std::size_t i = 0; i < bytes; ++i) made[i] = std::byte(i % 251 + 1);
    return made;
}

}  // namespace

TEST_CASE("copy: rows and planes between pools of different stride, both ways of storing") {
    for (const Stores stores : {Stores::plain, Stores::streaming}) {
        const std::vector<std::byte> from = numbered(4 * 100);
        std::vector<std::byte> to(6 * 64);
        const std::vector<Row> source{3, 0}, target{1, 5};
        copy_rows({to.data(), 64}, target, {const_cast<std::byte*>(from.data()), 100}, source, 0, 60, stores);
        CHECK(std::memcmp(to.data() + 64, from.data() + 300, 60) == 0);
        CHECK(std::memcmp(to.data() + 5 * 64, from.data(), 60) == 0);
        CHECK(to[64 + 60] == std::byte{0});
        std::fill(to.begin(), to.end(), std::byte{0});
        copy_rows({to.data(), 64}, target, {const_cast<std::byte*>(from.data()), 100}, source, 8, 16, stores);
        CHECK(to[64 + 7] == std::byte{0});
        CHECK(std::memcmp(to.data() + 64 + 8, from.data() + 308, 16) == 0);
        CHECK(to[64 + 24] == std::byte{0});
    }
}

TEST_CASE("copy: streaming at every alignment and size writes these bytes and no others") {
    const std::vector<std::byte> from = numbered(6000);
    for (const CopyBytes copy : streaming_copies())
        for (const std::size_t bytes : {0, 1, 63, 64, 1023, 1024, 1025, 1087, 1088, 1151, 2048, 4096, 5000})
            for (std::size_t to_at = 64; to_at < 128; to_at += 7)
                for (const std::size_t from_at : {0, 1, 8, 33, 64}) {
                    std::vector<std::byte> to(6000);
                    copy(to.data() + to_at, from.data() + from_at, bytes);
                    CAPTURE(bytes);
                    REQUIRE(std::memcmp(to.data() + to_at, from.data() + from_at, bytes) == 0);
                    REQUIRE(to[to_at - 1] == std::byte{0});
                    REQUIRE(to[to_at + bytes] == std::byte{0});
                }
}

TEST_CASE("copy: rows are scattered to the blocks of their layers, and gathered again") {
    constexpr std::size_t kRow = 8192, kRows = 3, kBlocks = 5;
    const std::size_t sizes[] = {1024, 3000, 4096};  // of a layer's block
    std::vector<std::byte> rows = numbered(kRow * kRows);
    std::vector<std::vector<std::byte>> memory;
    std::vector<LayerBlocks> layers;
    std::size_t offset = 8;
    for (const std::size_t size : sizes) {
        memory.emplace_back((size + 32) * kBlocks);
        layers.push_back({{memory.back().data(), size + 32}, offset, size});
        offset += size;
    }
    const std::vector<Row> which{2, 0}, blocks{4, 1};
    for (const Stores stores : {Stores::plain, Stores::streaming}) {
        copy_layers(layers, blocks, {rows.data(), kRow}, which, true, stores);
        for (std::size_t i = 0; i < which.size(); ++i)
            for (const LayerBlocks& layer : layers)
                CHECK(std::memcmp(layer.blocks.base + static_cast<std::size_t>(blocks[i]) * layer.blocks.stride,
                                  rows.data() + static_cast<std::size_t>(which[i]) * kRow + layer.offset, layer.bytes) == 0);
        CHECK(memory[0][0] == std::byte{0});  // block 0 is nobody's
        std::vector<std::byte> back(rows.size());
        copy_layers(layers, blocks, {back.data(), kRow}, which, false, stores);
        for (const Row row : which)
            CHECK(std::memcmp(back.data() + static_cast<std::size_t>(row) * kRow + 8,
                              rows.data() + static_cast<std::size_t>(row) * kRow + 8, offset - 8) == 0);
        CHECK(back[kRow] == std::byte{0});
        for (auto& layer : memory) std::fill(layer.begin(), layer.end(), std::byte{0});
    }
}
