#include "transfer/request_cutter.h"

#include <algorithm>
#include <utility>

#include "core/alignment.h"
#include "core/memory.h"
#include "transfer/staging.h"

namespace fastpersist {
namespace {

// The least length of whole pages between partial ones that is read separately: copying less costs less than a request.
constexpr uint64_t kSplitBytes = 64 << 10;

}  // namespace

RequestCutter::RequestCutter(DirectIoLimits limits, uint64_t chunk_bytes)
    : limits_(std::move(limits)),
      chunk_bytes_(chunk_bytes),
      memory_unit_bytes_(std::max<uint64_t>(PageBytes(), limits_.memory_alignment_bytes)) {}

// Example, direct, chunks of 1 MiB, blocks of 512: a read of [1000, 2 MiB) is cut into [1000, 1 MiB), for which
// [512, 1 MiB) is read and 488 bytes are skipped, and [1 MiB, 2 MiB).
PieceRange RequestCutter::Next(const RequestJob& job, bool direct) const {
  const FilePart& part = job.parts[job.next_part];
  const uint64_t from = part.offset_bytes + job.next_part_bytes;
  const uint64_t end = part.offset_bytes + part.size_bytes;
  uint64_t until = std::min(end, AlignDown(from, chunk_bytes_) + chunk_bytes_);
  if (direct && !job.is_write() && job.device() == nullptr) {
    until = EndOfNextRead(from, end, reinterpret_cast<uintptr_t>(part.address) + job.next_part_bytes);
  }
  PieceRange range{.start_bytes = from, .from_bytes = from, .until_bytes = until, .end_bytes = until};
  if (direct) {
    range.start_bytes = AlignDown(from, limits_.offset_alignment_bytes);
    range.end_bytes = AlignUp(until, limits_.offset_alignment_bytes);
    FP_CHECK(range.is_whole() || !job.is_write());
  }
  return range;
}

// Where to end a direct read of [from, end) to an address so that most of it goes straight. Example, chunks of 1 MiB,
// blocks of 512, pages of 4096: a read of [0, 2 MiB) to an address 512 bytes behind a page has its first whole page at
// 3584. The cuts are [0, 3584), staged; [3584, 1 MiB - 512), straight; another straight chunk; and the last 512 bytes.
// An address 100 bytes behind a page has no page that begins on a block: it gets the chunks of any other read.
uint64_t RequestCutter::EndOfNextRead(uint64_t from, uint64_t end, uint64_t address) const {
  const uint64_t block_bytes = limits_.offset_alignment_bytes;
  const uint64_t unit_bytes = std::max(memory_unit_bytes_, block_bytes);
  const uint64_t skipped_bytes =
      std::max(AlignUp(from, block_bytes) - from, AlignUp(address, memory_unit_bytes_) - address);
  uint64_t first = from + skipped_bytes;
  const bool can_go_straight = first % block_bytes == 0 && (address + skipped_bytes) % memory_unit_bytes_ == 0;
  // Shift the chunks so that they end where units do.
  const uint64_t shift_bytes = can_go_straight ? AlignUp(first, unit_bytes) - first : 0;
  const uint64_t until = std::min(end, AlignDown(from + shift_bytes, chunk_bytes_) + chunk_bytes_ - shift_bytes);
  if (!can_go_straight || until < first + kSplitBytes) return until;
  if (first > from) return first;
  return first + AlignDown(until - first, unit_bytes);
}

bool RequestCutter::GoesStraight(const PieceRange& range, const std::byte* address, IoOp op) const {
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (op == IoOp::kWrite) return range.is_whole() && place % std::max(limits_.memory_alignment_bytes, 1U) == 0;
  return range.is_whole() && (place | range.size_bytes()) % memory_unit_bytes_ == 0;
}

RequestPiece RequestCutter::CutOff(const std::shared_ptr<RequestJob>& job, const PieceRange& range, std::byte* staged) {
  const uint64_t size_bytes = range.size_bytes();
  RequestPiece piece{.job = job,
                     .part = job->next_part,
                     .from_bytes = job->next_part_bytes,
                     .size_bytes = static_cast<uint32_t>(size_bytes),
                     .skipped_bytes = static_cast<uint32_t>(range.from_bytes - range.start_bytes),
                     .staged_bytes = static_cast<uint32_t>(AlignUp(range.asked_bytes(), Staging::kUnitBytes)),
                     .staged = staged};
  ++job->piece_count;
  job->next_part_bytes += size_bytes;
  if (job->next_part_bytes == job->parts[job->next_part].size_bytes) {
    ++job->next_part;
    job->next_part_bytes = 0;
  }
  return piece;
}

}  // namespace fastpersist
