#include "rows/reader.h"

#include <algorithm>
#include <cerrno>
#include <span>
#include <utility>

#include "core/alignment.h"
#include "core/check.h"
#include "core/fork.h"
#include "core/memory.h"

namespace fastpersist {
namespace {

// Waiting for this share of the reads in flight halves the processor time of a read, and leaves the device enough to
// do meanwhile.
constexpr size_t kBatchShare = 8;
constexpr size_t kBatchMax = 16;

// Memory is pinned whole when it is registered. Reads of wide rows gain nothing by that, and their ring is large.
constexpr size_t kRegisteredBytesMax = size_t{4} << 20;
std::span<std::byte> Registered(std::span<std::byte> ring) {
  return ring.size() <= kRegisteredBytesMax ? ring : std::span<std::byte>();
}

}  // namespace

RowReader::RowReader(std::byte* ring, uint64_t ring_bytes, std::unique_ptr<IoPump> pump)
    : ring_(ring), ring_bytes_(ring_bytes), fork_generation_(ForkGeneration()), pump_(std::move(pump)) {}

RowReader::~RowReader() {
  if (fork_generation_ != ForkGeneration()) {
    [[maybe_unused]] const IoPump* const left_alone = pump_.release();
    return;
  }
  pump_->Abandon();
  UnmapBuffers(ring_, ring_bytes_);
}

Result<std::unique_ptr<RowReader>> RowReader::Open(const RowTable& table, const RowReaderOptions& options) {
  std::vector<PumpFile> files;
  for (const RowPiece& piece : table.pieces()) files.push_back({piece.fd, piece.path});
  const uint64_t row_read_bytes = table.row_bytes() + (2 * kBlockBytesMax);
  const uint64_t ring_bytes = AlignUp(std::max(options.ring_bytes, 4 * row_read_bytes), kHugePageBytes);
  std::byte* const ring = MapBuffers(ring_bytes);
  if (ring == nullptr) {
    return Status::Error(StatusCode::kNoMemory,
                         "no memory for the " + std::to_string(ring_bytes) + " bytes that rows are read into");
  }
  Result<std::unique_ptr<IoPump>> pump = IoPump::Open(std::move(files), {.engines = options.engines,
                                                                         .queue_depth = options.queue_depth,
                                                                         .thread_count = options.thread_count,
                                                                         .wake_fd = -1,
                                                                         .poll = {},
                                                                         .outlives_failures = true,
                                                                         .limits = options.limits,
                                                                         .memory = Registered({ring, ring_bytes})});
  if (!pump.ok()) {
    UnmapBuffers(ring, ring_bytes);
    return pump.status();
  }
  return std::unique_ptr<RowReader>(new RowReader(ring, ring_bytes, std::move(pump).value()));
}

Result<bool> RowReader::TryStart(const RowRead& read, uint64_t tag) {
  FP_CHECK(read.size_bytes <= read_bytes_max());
  if (is_full()) return false;
  // Blocks of 4096 bytes suit every engine and keep rows apart in the processor's caches.
  const uint64_t size_bytes = AlignUp(read.size_bytes, kBlockBytesMin);
  uint64_t start = head_;
  const uint64_t left_bytes = ring_bytes_ - (start % ring_bytes_);
  if (left_bytes < size_bytes) start += left_bytes;  // a read does not wrap
  if (start + size_bytes - tail_ > ring_bytes_) return false;
  const size_t place = first_place_ + stretches_.size();
  std::byte* const bytes = ring_ + (start % ring_bytes_);
  FP_RETURN_IF_ERROR(pump_->Start({.op = IoOp::kRead,
                                   .buffer = bytes,
                                   .size_bytes = read.size_bytes,
                                   .needed_bytes = read.needed_bytes,
                                   .offset_bytes = read.offset_bytes,
                                   .tag = place,
                                   .file = read.piece},
                                  /*more_follow=*/pump_->in_flight() + 1 < pump_->queue_depth()));
  head_ = start + size_bytes;
  stretches_.push_back({.bytes = bytes, .end = head_, .tag = tag});
  return true;
}

void RowReader::Collect(std::vector<Done>& done) {
  finished_.clear();
  const size_t batch_count = std::clamp(in_flight() / kBatchShare, size_t{1}, kBatchMax);
  const Status status = pump_->Collect(std::chrono::milliseconds::max(), finished_, batch_count);
  const auto add = [&](size_t place, Status of_read) {
    Stretch& stretch = stretches_[place - first_place_];
    stretch.is_done = true;
    done.push_back({.tag = stretch.tag, .status = std::move(of_read), .bytes = stretch.bytes, .place = place});
  };
  for (IoPump::Finished& finished : finished_) add(finished.tag, std::move(finished.status));
  if (status.ok()) return;
  is_broken_ = true;
  pump_->Abandon();
  for (size_t i = 0; i < stretches_.size(); ++i) {
    if (!stretches_[i].is_done) add(first_place_ + i, status);
  }
}

void RowReader::Release(const Done& done) {
  stretches_[done.place - first_place_].is_free = true;
  while (!stretches_.empty() && stretches_.front().is_free) {
    tail_ = stretches_.front().end;
    stretches_.pop_front();
    ++first_place_;
  }
  if (stretches_.empty()) head_ = tail_ = 0;  // few reads at a time stay in the same, warm memory
}

}  // namespace fastpersist
