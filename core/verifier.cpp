#include "verifier.hpp"

#include <algorithm>

#include "directory.hpp"
#include "segment.hpp"
#include "survey.hpp"

namespace kvstrata {
namespace {

constexpr std::chrono::milliseconds kLockPatience{1500};

class Verifier {
   public:
    Verifier(std::shared_ptr<Disk> disk, bool repair, const Progress& progress)
        : disk_(std::move(disk)), repair_(repair), progress_(progress), directory_(disk_, 0) {}

    Verification run() {
        const Survey all = survey(disk_);
        out_.error = all.error;
        for (const auto& [space, pages] : all.spaces) total_ += pages.bytes;
        if (repair_ && out_.error == 0) out_.error = directory_.open();
        if (out_.error != 0) return std::move(out_);
        for (const ShelfSurvey& shelf : all.shelves) {
            if (!out_.cancelled) check_shelf(shelf);
        }
        return std::move(out_);
    }

   private:
    void check_shelf(const ShelfSurvey& before) {
        ShelfProof& shelf = out_.shelves.emplace_back();
        shelf = {.id = before.id, .alive = before.alive, .error = before.error, .segments = {}};
        OwnedShelf owned{.path = "shelves/" + before.id, .owner = nullptr};
        if (repair_ && !shelf.alive) {
            const Directory::Hold hold(directory_, kLockPatience);
            const int error = hold.error != 0 ? hold.error : directory_.take(owned.path, owned);
            if (error == -EWOULDBLOCK && hold.error == 0) {
                shelf.alive = true;  // since a moment ago
            } else if (error != 0) {
                shelf.error = error;
            }
        }
        for (const SegmentSurvey& segment : before.segments) {
            SegmentProof& proof = shelf.segments.emplace_back();
            proof.name = segment.name;
            if (owned.owner) recover(owned, segment, proof);
            if (!proof.removed) check_segment(owned, segment, shelf.alive, proof);
            if (proof.error == -ENOENT) shelf.segments.pop_back();  // its owner gave it back meanwhile
            if (out_.cancelled) return;
        }
        if (!owned.owner) return;
        const Directory::Hold hold(directory_, kLockPatience);
        if (hold.error == 0) directory_.remove_shelf(owned);
    }

    // What the owner's next start would do in the background.
    void recover(const OwnedShelf& owned, const SegmentSurvey& before, SegmentProof& proof) {
        if (before.state == HeaderState::sound && before.damaged_records == 0) return;
        Segment segment(handles_, owned.owner, owned.path + "/" + before.name, before.bytes);
        std::vector<std::uint32_t> lost;
        const auto sink = [&](std::uint32_t slot, RecordState state, const Record&) {
            if (state == RecordState::damaged) lost.push_back(slot);
        };
        proof.error = segment.load(sink);
        if (proof.error == 0 && segment.kind() == Segment::Kind::damaged) {
            proof.error = segment.recover_header(Shape{}, directory_.random());
            proof.has_slots = segment.kind() == Segment::Kind::pages;
            for (std::uint32_t slot = 0; proof.has_slots && slot < segment.slots(); ++slot) lost.push_back(slot);
        } else {
            proof.damaged_records = lost.size();
        }
        if (proof.error != 0) return;
        if (segment.kind() == Segment::Kind::blank) {
            proof.error = disk_->remove(segment.path());
            proof.removed = proof.error == 0;
        }
        for (const std::uint32_t slot : lost) {
            FoundPage page;
            const int result = segment.recover_slot(slot, page);
            proof.recovered += result > 0;
            proof.unreadable += result < 0;
        }
        proof.rebuilt = true;
    }

    void check_segment(const OwnedShelf& owned, const SegmentSurvey& before, bool alive, SegmentProof& proof) {
        SegmentFile segment(disk_, owned.path + "/" + before.name, before.bytes);
        if (const int error = segment.open(); error != 0) {
            proof.error = error;
            return;
        }
        proof.state = segment.state();
        proof.version = segment.version();
        if (proof.state == HeaderState::damaged || proof.state == HeaderState::foreign) {
            std::optional<SegmentHeader> told;
            proof.error = segment.find_header(told);
            proof.has_slots = told.has_value();
        }
        if (proof.state != HeaderState::sound) return;
        SlotReader reader(disk_, segment);
        std::vector<std::uint32_t> bad;
        std::uint64_t damaged = 0;
        const auto sink = [&](std::uint32_t slot, RecordState state, const Record& record, std::uint32_t run) {
            damaged +=
                state == RecordState::damaged && slot < segment.whole_slots();  // behind the end of a cut file nothing is lost
            if (state != RecordState::page) return true;
            if (check_page(reader, segment, slot, record, run, proof)) bad.push_back(slot);
            out_.bytes += segment.shape().slot_bytes();
            out_.cancelled = progress_ && !progress_(std::min(out_.bytes, total_), total_);
            return !out_.cancelled;
        };
        if (const int error = segment.for_each(sink); error != 0) proof.error = error;
        if (alive && damaged > 0 && segment.reformatted()) {
            proof.changed += damaged;
        } else if (!owned.owner) {
            proof.damaged_records += damaged;
        }
        if (!owned.owner) return;
        for (const std::uint32_t slot : bad) proof.dropped += segment.clear_record(slot) == 0;
        segment.sync();
    }

    // Whether the page is to be dropped.
    bool check_page(SlotReader& reader, const SegmentFile& segment, std::uint32_t slot, const Record& record, std::uint32_t run,
                    SegmentProof& proof) {
        FoundPage found;
        BadPage page{.slot = slot, .state = SlotState::sound, .error = 0, .space = record.space, .key = record.key};
        // Twice: a slot that its owner uses again is damage to whoever reads it meanwhile, unless the record tells.
        for (int attempt = 0; attempt < 2; ++attempt) {
            page.state = prove_page(reader, segment, slot, &record, run * segment.shape().slot_bytes(), found, page.error);
            if (page.state == SlotState::sound) {
                ++proof.sound;
                return false;
            }
            reader.forget();
            if (page.state != SlotState::unreadable && !segment.still(slot, record)) {
                ++proof.changed;
                return false;
            }
        }
        const bool unreadable = page.state == SlotState::unreadable;
        const bool torn = page.state == SlotState::cut;
        ++(unreadable ? proof.unreadable : torn ? proof.torn : proof.corrupt);
        if (proof.bad.size() < SegmentProof::kBadKept) proof.bad.push_back(page);
        return !unreadable;
    }

    const std::shared_ptr<Disk> disk_;
    const bool repair_;
    const Progress& progress_;
    Directory directory_;
    const std::shared_ptr<Handles> handles_ = std::make_shared<Handles>(disk_);
    std::uint64_t total_ = 0;
    Verification out_;
};

}  // namespace

Verification verify(const std::shared_ptr<Disk>& disk, bool repair, const Progress& progress) {
    return Verifier(disk, repair, progress).run();
}

}  // namespace kvstrata
