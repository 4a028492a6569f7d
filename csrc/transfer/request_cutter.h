// Cuts the jobs of request_flow into pieces of at most a chunk, and decides which piece goes straight between the file
// and the caller's memory. Arithmetic only: it starts and copies nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/file.h"
#include "transfer/request_pieces.h"

namespace fastpersist {

// One request to the kernel for bytes [start_bytes, end_bytes) of the file; [from_bytes, until_bytes) are wanted.
struct PieceRange {
  uint64_t start_bytes;
  uint64_t from_bytes;
  uint64_t until_bytes;
  uint64_t end_bytes;

  bool is_whole() const { return start_bytes == from_bytes && until_bytes == end_bytes; }
  uint64_t size_bytes() const { return until_bytes - from_bytes; }
  uint64_t asked_bytes() const { return end_bytes - start_bytes; }
};

class RequestCutter {
 public:
  // chunk_bytes: a power of two, and a multiple of the file's block.
  RequestCutter(DirectIoLimits limits, uint64_t chunk_bytes);

  uint64_t chunk_bytes() const { return chunk_bytes_; }

  // Returns the next range of a job that is not all cut. `direct`: the engine takes whole blocks only; a write must
  // consist of whole blocks then.
  PieceRange Next(const RequestJob& job, bool direct) const;

  // Whether a direct engine takes this memory. A read also needs whole pages of memory: see random_access.h.
  bool GoesStraight(const PieceRange& range, const std::byte* address, IoOp op) const;

  // Make a piece of the range that Next returned, and advance the job behind it. `staged`: its place in staging, of
  // range.asked_bytes(), or null.
  static RequestPiece CutOff(const std::shared_ptr<RequestJob>& job, const PieceRange& range, std::byte* staged);

 private:
  uint64_t EndOfNextRead(uint64_t from, uint64_t end, uint64_t address) const;

  const DirectIoLimits limits_;
  const uint64_t chunk_bytes_;
  const uint64_t memory_unit_bytes_;  // a direct read into the caller's memory fills multiples of this
};

}  // namespace fastpersist
