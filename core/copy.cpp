#include "copy.hpp"

#include <algorithm>
#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvstrata {
namespace {

#if defined(__x86_64__)

constexpr std::size_t kLine = 64;
constexpr std::size_t kLeast = 1024;  // less is not worth the two ends that are copied otherwise

// `lines` whole lines; `to` is aligned to one.
using CopyLines = void (*)(std::byte* to, const std::byte* from, std::size_t lines);

template <CopyLines copy_lines>
void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes < kLeast) {
        std::memcpy(to, from, bytes);
        return;
    }
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(to) % kLine;
    const std::size_t lines = (bytes - before) / kLine;
    const std::size_t done = before + lines * kLine;
    std::memcpy(to, from, before);
    copy_lines(to + before, from + before, lines);
    std::memcpy(to + done, from + done, bytes - done);
}

void lines_sse2(std::byte* to, const std::byte* from, std::size_t lines) {
    for (; lines > 0; --lines, to += kLine, from += kLine) {
        const auto* source = reinterpret_cast<const __m128i*>(from);
        auto* target = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
}

[[gnu::target("avx2")]] void lines_avx2(std::byte* to, const std::byte* from, std::size_t lines) {
    for (; lines > 0; --lines, to += kLine, from += kLine) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
    }
}

[[gnu::target("avx512f")]] void lines_avx512(std::byte* to, const std::byte* from, std::size_t lines) {
    for (; lines >= 4; lines -= 4, to += 4 * kLine, from += 4 * kLine) {
        const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + kLine);
        const __m512i c = _mm512_loadu_si512(from + 2 * kLine), d = _mm512_loadu_si512(from + 3 * kLine);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 2 * kLine), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 3 * kLine), d);
    }
    for (; lines > 0; --lines, to += kLine, from += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

struct Streams {
    std::array<CopyBytes, 3> known{stream<lines_sse2>};
    std::size_t count = 1;

    Streams() {
        if (__builtin_cpu_supports("avx2")) known[count++] = stream<lines_avx2>;
        if (__builtin_cpu_supports("avx512f")) known[count++] = stream<lines_avx512>;
    }
};

// Streamed stores are ordered with nothing that follows until this.
void end_stores(Stores stores) {
    if (stores == Stores::streaming) _mm_sfence();
}

#else

void copy_plainly(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

struct Streams {
    std::array<CopyBytes, 1> known{copy_plainly};
    std::size_t count = 1;
};

void end_stores(Stores) {}

#endif

// The one place where bytes move.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, Stores stores) {
    if (stores == Stores::plain)
        std::memcpy(to, from, bytes);
    else
        streaming_copies().back()(to, from, bytes);
}

std::byte* at(RowPool pool, Row row, std::size_t offset) {
    return pool.base + static_cast<std::size_t>(row) * pool.stride + offset;
}

}  // namespace

std::span<const CopyBytes> streaming_copies() {
    static const Streams streams;
    return {streams.known.data(), streams.count};
}

void copy_rows(RowPool to, std::span<const Row> to_rows, RowPool from, std::span<const Row> from_rows, std::size_t offset,
               std::size_t bytes, Stores stores) {
    for (std::size_t i = 0; i < to_rows.size(); ++i)
        copy_bytes(at(to, to_rows[i], offset), at(from, from_rows[i], offset), bytes, stores);
    end_stores(stores);
}

void copy_layers(std::span<const LayerBlocks> layers, std::span<const Row> blocks, RowPool pool, std::span<const Row> rows, bool up,
                 Stores stores) {
    for (std::size_t i = 0; i < rows.size(); ++i)
        for (const LayerBlocks& layer : layers) {
            std::byte* block = at(layer.blocks, blocks[i], 0);
            std::byte* row = at(pool, rows[i], layer.offset);
            copy_bytes(up ? block : row, up ? row : block, layer.bytes, stores);
        }
    end_stores(stores);
}

}  // namespace kvstrata
