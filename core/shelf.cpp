#include "shelf.hpp"

#include <algorithm>
#include <cerrno>

#include "bounded.hpp"
#include "segments.hpp"
#include "slot_run.hpp"

namespace kvstrata {
namespace {

constexpr std::uint64_t kRequestBytes = 2ull << 20;  // what adjacent slots are merged into, at most
constexpr std::size_t kMaxRun = 256;

// Whether the planes lie one behind the other and fill the row: every byte of it is then under a checksum.
bool planes_fill_row(const ShelfConfig& config) {
    std::uint64_t covered = 0;
    for (const Plane& plane : config.planes) {
        if (plane.offset != covered || plane.bytes == 0 || plane.bytes > config.row_bytes - covered) return false;
        covered += plane.bytes;
    }
    return config.page_size > 0 && covered > 0 && covered == config.row_bytes &&
           config.row_stride == round_up(config.row_bytes, kBlockBytes);
}

class DiskShelf final : public Shelf {
   public:
    DiskShelf(const std::shared_ptr<Disk>& disk, const ShelfConfig& config)
        : planes_(config.planes),
          max_run_(std::clamp<std::size_t>(kRequestBytes / Shape::of(config).slot_bytes(), 1, kMaxRun)),
          segments_(disk, config) {}
    ~DiskShelf() override { segments_.close(); }

    std::string start() { return segments_.open(); }

    std::vector<FoundPage> take_found() override { return segments_.take_found(); }
    std::vector<SlotRef> take_empty() override { return segments_.take_empty(); }
    ShelfNews take_news() override { return segments_.take_first(); }

    Completion execute(const Op& op, std::byte* row) override {
        Completion completion;
        completion.id = op.id;
        if (op.kind == OpKind::grow) {
            completion.status = segments_.grow(completion.slots, completion.error);
            return completion;
        }
        const auto segment = segments_.find(op.slot);
        if (!segment) {
            completion.status = op.kind == OpKind::read ? OpStatus::unreadable : OpStatus::failed;
            completion.error = EBADF;
        } else if (op.kind == OpKind::clear) {
            completion.status = segment->clear(op.slot.slot, completion.error);
            note(segment, op.slot.segment, completion);
        } else {
            completion = SlotRun(segment, planes_, {op}, {row}).run().front();
            note(segment, op.slot.segment, completion);
        }
        return completion;
    }

    std::size_t max_run() const override { return max_run_; }
    std::unique_ptr<SlotRun> begin(const std::vector<Op>& ops, const std::vector<std::byte*>& rows) override {
        auto segment = segments_.find(ops.back().slot);
        return segment ? std::make_unique<SlotRun>(std::move(segment), planes_, ops, rows) : nullptr;
    }
    std::vector<Completion> finish(SlotRun& run, std::int64_t moved, bool again) override {
        std::vector<Completion> done = run.finish(moved, again);
        for (const Completion& completion : done) note(run.segment(), run.ops().front().slot.segment, completion);
        return done;
    }
    int sync() override { return segments_.sync(); }

    void describe(const Key& space, std::string json) override { segments_.describe(space, std::move(json)); }
    void note_uses(std::vector<SlotUse> uses) override { segments_.note_uses(std::move(uses)); }
    void purge(PurgeOrder order, ShelfClaims& claims, PurgeReport& report) override {
        segments_.purge(std::move(order), claims, report);
    }
    bool still_asked(std::uint64_t request) const override { return segments_.still_asked(request); }
    void answer(const PurgeAnswer& answer) override { segments_.answer(answer); }
    std::vector<std::string> own_shelves() override { return segments_.own_shelves(); }

    bool has_news() const override { return segments_.has_news(); }
    ShelfNews next_news() override { return segments_.next_news(); }
    void check_files() override { segments_.check_files(); }
    ShelfNews poll() override { return segments_.poll(); }
    bool precedes(const SlotRef& one, const SlotRef& other) const override { return segments_.precedes(one, other); }

    std::uint64_t allocated_bytes() const override { return segments_.allocated_bytes(); }
    ShelfStats stats() const override { return segments_.stats(); }
    void close() override { segments_.close(); }

   private:
    void note(const std::shared_ptr<Segment>& segment, std::uint32_t index, const Completion& completion) {
        if (completion.error == ENOENT || completion.error == ENOTDIR || completion.error == ESTALE)
            segments_.missed(index, segment);
    }

    const std::vector<Plane> planes_;
    const std::size_t max_run_;
    Segments segments_;
};

}  // namespace

std::unique_ptr<SlotRun> Shelf::begin(const std::vector<Op>&, const std::vector<std::byte*>&) { return nullptr; }

std::vector<Completion> Shelf::finish(SlotRun&, std::int64_t, bool) { return {}; }

std::unique_ptr<Shelf> Shelf::open(const std::shared_ptr<Disk>& disk, const ShelfConfig& config, std::string& error,
                                   std::chrono::milliseconds patience) {
    struct Opened {
        std::unique_ptr<DiskShelf> shelf;
        std::string error;
    };
    error.clear();
    if (!planes_fill_row(config)) {
        error = "the planes do not fill the page row without gaps, or the row stride is not the row rounded up to 4096 bytes";
        return nullptr;
    }
    const auto open = [disk, config] {
        auto shelf = std::make_unique<DiskShelf>(disk, config);
        std::string trouble = shelf->start();
        if (!trouble.empty()) shelf.reset();
        return Opened{std::move(shelf), std::move(trouble)};
    };
    std::optional<Opened> opened = run_bounded(open, patience);
    if (!opened) {
        error =
            "disk_path " + disk->where() + ": could not be read in time; check that its disk is alive or choose another directory";
        return nullptr;
    }
    error = std::move(opened->error);
    return std::move(opened->shelf);
}

}  // namespace kvstrata
