#include "sim_device.hpp"

#include <algorithm>

namespace kvstrata::testing {
namespace {

constexpr double kBatchTime = 0.002, kCopyTime = 0.001;  // seconds, at most
constexpr std::byte kPoison{0xDB}, kHalfWritten{0x77};

std::size_t index(Row row) { return static_cast<std::size_t>(row); }

}  // namespace

SimDevice::SimDevice(Agenda& agenda, Dice& dice, const Slab* slab, std::uint32_t rows, std::size_t row_bytes, double copy_deadline,
                     const DeviceTroubles& troubles, Report report)
    : agenda_(agenda),
      dice_(dice),
      slab_(slab),
      row_bytes_(row_bytes),
      copy_deadline_(copy_deadline),
      troubles_(troubles),
      report_(std::move(report)),
      rows_(rows, std::vector<std::byte>(row_bytes, kPoison)),
      pending_writes_(rows, 0),
      pending_reads_(rows, 0) {}

Fence SimDevice::run(std::vector<RowBytes> reads, std::vector<RowBytes> writes) {
    for (const auto& [row, chain] : reads) pending_reads_.at(index(row))++;
    for (const auto& [row, chain] : writes) pending_writes_.at(index(row))++;
    batches_.push_back({std::move(reads), std::move(writes)});
    last_batch_at_ = std::max(last_batch_at_, agenda_.now()) + dice_.real(0, kBatchTime);
    agenda_.at(last_batch_at_, [this] { run_batch(); });
    return ++submitted_;
}

void SimDevice::run_batch() {
    const Batch batch = std::move(batches_.front());
    batches_.pop_front();
    ++done_;
    for (const auto& [row, chain] : batch.reads) {
        require(rows_[index(row)] == row_of(chain, row_bytes_), "a batch read a row whose bytes had changed");
        pending_reads_[index(row)]--;
    }
    for (const auto& [row, chain] : batch.writes) {
        rows_[index(row)] = row_of(chain, row_bytes_);
        pending_writes_[index(row)]--;
    }
}

void SimDevice::touch(const std::vector<Row>& rows, bool write, int by) {
    for (const Row row : rows) (write ? pending_writes_ : pending_reads_).at(index(row)) += by;
}

void SimDevice::start(const CopyBatch& batch, std::vector<Key> pages) {
    Copy& copy = copies_[batch.ticket];
    copy.batch = batch;
    copy.pages = std::move(pages);
    copy.deadline = agenda_.now() + copy_deadline_;
    copy.hangs = dice_.chance(troubles_.hang);
    touch(batch.device, batch.up, 1);
    // The slab rows are the copy's from now on; whoever believes they hold something is wrong.
    if (!batch.up)
        for (const Row row : batch.slab) std::memset(slab_->row(row), static_cast<int>(kHalfWritten), row_bytes_);
    if (copy.hangs) return;
    queue_[batch.up].push_back(batch.ticket);
    agenda_.after(dice_.real(0, kCopyTime), [this, ticket = batch.ticket] { try_copy(ticket); });
}

// A copy waits for its fence and for the copies before it.
void SimDevice::try_copy(std::uint64_t ticket) {
    Copy& copy = copies_.at(ticket);
    auto& queue = queue_[copy.batch.up];
    if (queue.front() != ticket || done_ < copy.batch.fence) {
        agenda_.after(dice_.real(0, kCopyTime), [this, ticket] { try_copy(ticket); });
        return;
    }
    queue.pop_front();
    perform(ticket);
}

void SimDevice::perform(std::uint64_t ticket) {
    Copy& copy = copies_.at(ticket);
    const CopyBatch& batch = copy.batch;
    const bool fails = dice_.chance(troubles_.fail);
    for (std::size_t i = 0; i < batch.slab.size(); ++i) {
        std::byte* const slab = slab_->row(batch.slab[i]);
        std::vector<std::byte>& row = rows_[index(batch.device[i])];
        const bool wrong = fails && dice_.chance(0.7);
        if (batch.up) {
            std::memcpy(row.data(), slab, row_bytes_);
            if (wrong) std::fill(row.begin(), row.end(), kHalfWritten);
        } else {
            std::memcpy(slab, row.data(), row_bytes_);
            if (wrong) std::memset(slab, static_cast<int>(kHalfWritten), row_bytes_);
        }
    }
    touch(batch.device, batch.up, -1);
    copy.happened = true;
    const double delay = dice_.chance(troubles_.late) ? dice_.real(1, 2) * copy_deadline_ : dice_.real(0, kCopyTime);
    agenda_.after(delay, [this, ticket, fails] {
        const auto done = copies_.extract(ticket);
        report_(ticket, !fails, done.mapped().pages);
        if (dice_.chance(troubles_.repeat)) report_(ticket, dice_.chance(0.5), {});
    });
}

void SimDevice::find_overdue(const std::function<void(const std::vector<Key>& pages)>& late) {
    for (auto& [ticket, copy] : copies_)
        if (!copy.overdue && copy.deadline <= agenda_.now()) {
            copy.overdue = true;
            late(copy.pages);
        }
}

double SimDevice::next_deadline() const {
    double next = kNever;
    for (const auto& [ticket, copy] : copies_)
        if (!copy.overdue) next = std::min(next, copy.deadline);
    return next;
}

void SimDevice::drain() {
    troubles_ = {};
    for (auto& [ticket, copy] : copies_)
        if (copy.hangs && !copy.happened) perform(ticket);
}

void SimDevice::poison(Row row) { std::fill(rows_[index(row)].begin(), rows_[index(row)].end(), kPoison); }

}  // namespace kvstrata::testing
