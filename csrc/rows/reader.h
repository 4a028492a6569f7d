// A queue of reads of table blocks, kept full: a pump over all files of a table, and the memory that the blocks arrive
// in. This memory is a ring of bytes, handed out and reused in order, and small enough to be registered with the
// kernel. Rows are copied out of the ring, so a request may be dropped while the kernel still reads for it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/status.h"
#include "rows/plan.h"
#include "rows/table.h"
#include "transfer/io_pump.h"

namespace fastpersist {

struct RowReaderOptions {
  std::vector<std::string> engines;  // as in PumpOptions
  uint32_t queue_depth = 128;
  uint32_t thread_count = 0;
  uint64_t ring_bytes = uint64_t{4} << 20;              // at least four of the largest reads
  std::optional<DirectIoLimits> limits = std::nullopt;  // those of another reader of the same table; as in PumpOptions
};

// One owner thread at a time.
class RowReader {
 public:
  struct Done {
    uint64_t tag = 0;
    Status status;
    const std::byte* bytes = nullptr;  // from the read's offset on; valid until Release
    size_t place = 0;
  };

  static Result<std::unique_ptr<RowReader>> Open(const RowTable& table, const RowReaderOptions& options);
  // Waits until the kernel has released the ring. In a forked child it does nothing.
  ~RowReader();
  RowReader(const RowReader&) = delete;
  RowReader& operator=(const RowReader&) = delete;

  // Start a read; when the queue is full, all queued reads go to the kernel. Returns false if the queue or the ring is
  // full. REQUIRES: size_bytes is at most read_bytes_max().
  Result<bool> TryStart(const RowRead& read, uint64_t tag);
  // Give started reads to the kernel and wait for some of them; if many are in flight, for a fraction of the queue. If
  // the engine breaks, all reads end with its error, and no further read can be started.
  void Collect(std::vector<Done>& done);
  bool is_broken() const { return is_broken_; }
  // Reuse the memory of a completed read.
  void Release(const Done& done);

  size_t in_flight() const { return pump_->in_flight(); }
  bool is_full() const { return pump_->in_flight() == pump_->queue_depth(); }
  uint64_t read_bytes_max() const { return ring_bytes_ / 4; }
  const IoPump& pump() const { return *pump_; }

 private:
  // A stretch of the ring, in the order in which they were handed out.
  struct Stretch {
    std::byte* bytes = nullptr;
    uint64_t end = 0;  // counted as head_ and tail_ are
    uint64_t tag = 0;
    bool is_done = false;
    bool is_free = false;
  };
  RowReader(std::byte* ring, uint64_t ring_bytes, std::unique_ptr<IoPump> pump);

  std::byte* const ring_;
  const uint64_t ring_bytes_;
  const uint64_t fork_generation_;
  std::unique_ptr<IoPump> pump_;
  uint64_t head_ = 0;  // bytes handed out, and taken back; their places in the ring are modulo ring_bytes_
  uint64_t tail_ = 0;
  std::deque<Stretch> stretches_;
  size_t first_place_ = 0;  // number of the oldest stretch
  std::vector<IoPump::Finished> finished_;
  bool is_broken_ = false;
};

}  // namespace fastpersist
