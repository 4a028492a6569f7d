// Decides when a worker may write: it holds its side of the lock between direct and buffered writes (edge_lock.h) while
// writes are in flight. It starts no more writes once another side waits, and leaves when those in flight are done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/status.h"
#include "transfer/edge_lock.h"

namespace fastpersist {

// One owner thread.
class WriteTurn {
 public:
  explicit WriteTurn(EdgeLock lock) : lock_(std::move(lock)) {}

  // Whether a write may start now. `alone`: it goes through the page cache. False: try again after the writes in
  // flight, or, if another file holds the lock (is_locked_out), in a millisecond.
  Result<bool> TryEnter(bool alone);
  bool is_locked_out() const { return is_locked_out_; }

  // Begin, End: a write of these bytes of the file is in flight between them. REQUIRES: TryEnter returned true.
  void Begin(uint64_t from_bytes, uint64_t until_bytes);
  void End();
  bool has_writes() const { return write_count_ > 0; }

  // Leave the lock. The buffered writes of this side are on the device then; write_back_error() keeps the kernel's
  // error if they are not. REQUIRES: !has_writes().
  void Leave();
  // The first error. Its requests are complete already, so the caller that makes the file durable reports it.
  const Status& write_back_error() const { return write_back_error_; }

 private:
  EdgeLock lock_;
  size_t write_count_ = 0;  // writes in flight
  bool is_leaving_ = false;
  bool is_locked_out_ = false;  // another file has the lock that the next write needs
  std::vector<std::pair<uint64_t, uint64_t>>
      dirty_;  // alone: first byte and end of the pages written since the lock was entered
  Status write_back_error_;
};

}  // namespace fastpersist
