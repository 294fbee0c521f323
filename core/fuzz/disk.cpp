// Fuzzing everything that parses bytes from disk: a small shelf whose segment file the fuzzer rewrites is opened, rebuilt, read and
// written to. Nothing may crash, allocate wildly, or be served wrong.
//
// An input is a byte of flags and then patches to a sound segment file: offset (u16), length (u8), bytes. The flags say which checksums
// are made good again after that, so that the fuzzer gets past them, and whether the file is cut short at the last patch. Flag 128: what
// follows is not patches but the file itself.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../checksum.hpp"
#include "../disk_sim.hpp"
#include "../keys.hpp"
#include "../segments.hpp"
#include "../slot_run.hpp"

using namespace kvstrata;

namespace {

constexpr std::uint32_t kPageSize = 4;
constexpr std::uint32_t kSlots = 4;
constexpr std::uint64_t kRowBytes = 4000;
constexpr std::uint64_t kSlotsOffset = 8192;
constexpr std::uint64_t kSlotBytes = 8192;
constexpr const char* kOwner = "shelves/00000000000000aa/owner";
constexpr const char* kSegment = "shelves/00000000000000aa/seg-000001.kvs";
using Bytes = std::vector<std::byte>;

enum Flags : std::uint8_t { reseal_header = 1, reseal_records = 2, reseal_slots = 4, cut = 8, whole_file = 128 };

ShelfConfig shelf_config() {
    ShelfConfig config;
    config.page_size = kPageSize;
    config.row_bytes = kRowBytes;
    config.row_stride = 4096;
    config.planes = {{0, 1000}, {1000, 3000}};
    config.cap_bytes = 256 * 1024;
    config.seed = 5;
    return config;
}

struct Page {
    explicit Page(std::int32_t number) : tokens{number, 1, 2, 3}, media{{number, Key{}}} {
        image.content = {tokens, media};
        image.key = page_key(image.space, image.parent, image.content);
        image.last_use = 9;
        for (std::size_t i = 0; i < row.size(); ++i) row[i] = std::byte(std::size_t(number) * 31 + i * 7);
    }
    Page(const Page&) = delete;
    Page& operator=(const Page&) = delete;

    std::vector<std::int32_t> tokens;
    std::vector<MediaItem> media;
    std::array<std::byte, kRowBytes> row{};
    PageImage image;
};

// What every run begins with: a directory with one segment of four pages, and those pages.
struct World {
    World() {
        for (std::int32_t i = 0; i < std::int32_t(kSlots); ++i) pages.push_back(std::make_unique<Page>(i));
        const auto medium = SimMedium::make(1);
        const auto disk = medium->attach();
        Segments segments(disk, shelf_config());
        std::vector<SlotRef> slots;
        int error = 0;
        if (!segments.open().empty() || segments.grow(slots, error) != OpStatus::ok || slots.size() != kSlots) std::abort();
        for (std::uint32_t i = 0; i < kSlots; ++i) {
            if (move(segments, OpKind::write, slots[i], *pages[i]) != OpStatus::ok) std::abort();
        }
        for (const std::string& path : medium->files()) {
            if (path.ends_with(".kvs")) medium->edit(path, [&](Bytes& data) { segment = data; });
        }
        if (segment.size() != kSlotsOffset + kSlots * kSlotBytes) std::abort();
    }
    // Through one row; read pages are checked by the caller.
    OpStatus move(Segments& segments, OpKind kind, SlotRef slot, const Page& page) {
        const auto found = segments.find(slot);
        if (!found) return OpStatus::unreadable;
        Op op;
        op.kind = kind;
        op.slot = slot;
        op.page = page.image;
        std::memset(row.data(), 0xDB, row.bytes());
        if (kind == OpKind::write) std::memcpy(row.data(), page.row.data(), page.row.size());
        return SlotRun(found, planes, {op}, {row.data()}).run().front().status;
    }

    const std::vector<Plane> planes = shelf_config().planes;
    AlignedBuffer row{4096};
    std::vector<std::unique_ptr<Page>> pages;
    Bytes segment;
};

void reseal(Bytes& file, std::size_t at, std::size_t bytes) {
    if (file.size() < at + bytes) return;
    const std::uint64_t sum = checksum(file.data() + at, bytes - 8);
    std::memcpy(file.data() + at + bytes - 8, &sum, sizeof sum);
}

Bytes forge(const Bytes& sound, const std::uint8_t* data, std::size_t size) {
    const std::uint8_t flags = data[0];
    ++data;
    --size;
    if ((flags & whole_file) != 0) {
        const auto* bytes = reinterpret_cast<const std::byte*>(data);
        return {bytes, bytes + size};
    }
    Bytes file = sound;
    std::size_t last = file.size();
    while (size > 3) {
        std::uint16_t offset;
        std::memcpy(&offset, data, sizeof offset);
        const std::size_t length = std::min<std::size_t>(data[2], size - 3);
        last = offset % file.size();
        std::memcpy(file.data() + last, data + 3, std::min(length, file.size() - last));
        data += 3 + length;
        size -= 3 + length;
    }
    if ((flags & reseal_header) != 0) reseal(file, 0, 4096);
    std::uint64_t epoch;
    std::memcpy(&epoch, file.data() + 72, sizeof epoch);
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        Record record;
        std::byte* at = file.data() + 4096 + slot * sizeof record;
        std::memcpy(&record, at, sizeof record);
        if ((flags & reseal_records) != 0) record.seal(epoch, slot);
        std::memcpy(at, &record, sizeof record);
        if ((flags & reseal_slots) != 0) reseal(file, kSlotsOffset + slot * kSlotBytes, 4096);
    }
    if ((flags & cut) != 0) file.resize(last);
    return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static World world;
    if (size == 0) return 0;
    const auto medium = SimMedium::make(1);
    const auto disk = medium->attach();
    for (const char* directory : {"shelves", "shelves/00000000000000aa"}) disk->make_directory(directory);
    medium->edit(kOwner, [](Bytes& owner) { owner.clear(); });
    medium->edit(kSegment, [&](Bytes& file) { file = forge(world.segment, data, size); });

    Segments segments(disk, shelf_config());
    if (!segments.open().empty()) return 0;
    std::vector<FoundPage> found = segments.take_found();
    std::vector<SlotRef> empty = segments.take_empty();
    while (segments.has_news()) {
        const ShelfNews news = segments.next_news();
        found.insert(found.end(), news.found.begin(), news.found.end());
        empty.insert(empty.end(), news.empty.begin(), news.empty.end());
    }
    if (found.size() + empty.size() > kSlots + 1) std::abort();
    for (const FoundPage& at : found) {
        for (const auto& page : world.pages) {
            const bool right = world.move(segments, OpKind::read, at.slot, *page) != OpStatus::ok ||
                               std::memcmp(world.row.data(), page->row.data(), kRowBytes) == 0;
            if (!right && (data[0] & (reseal_slots | whole_file)) == 0) std::abort();  // else the checksum was made to fit
        }
        empty.push_back(at.slot);
    }
    int error = 0;
    segments.grow(empty, error);
    for (const SlotRef slot : empty) {
        if (world.move(segments, OpKind::write, slot, *world.pages[0]) != OpStatus::ok) continue;
        if (world.move(segments, OpKind::read, slot, *world.pages[0]) != OpStatus::ok) std::abort();
    }
    if (medium->peak_bytes() > shelf_config().cap_bytes) std::abort();
    return 0;
}
