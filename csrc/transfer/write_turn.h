// When a worker may write: its side of the lock between direct writes and those through the page cache (edge_lock.h),
// held while writes are in flight. Whoever waits for the lock is let in after the writes that are in flight.
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

  // Whether a write may start now. `alone`: it goes through the page cache. False: try again, after the writes in
  // flight, or, where another file holds the lock (is_locked_out), in a millisecond.
  Result<bool> TryEnter(bool alone);
  bool is_locked_out() const { return is_locked_out_; }

  // A write of these bytes of the file is in flight, from Begin to End. REQUIRES: TryEnter said true.
  void Begin(uint64_t from_bytes, uint64_t until_bytes);
  void End();
  bool has_writes() const { return write_count_ > 0; }

  // Let the others in. What this side wrote through the page cache is on the device then, unless the kernel reports an
  // error of that, which write_back_error() keeps. REQUIRES: !has_writes().
  void Leave();
  // The first of them. The requests that wrote are complete already, so it is told to whoever makes the file durable.
  const Status& write_back_error() const { return write_back_error_; }

 private:
  EdgeLock lock_;
  size_t write_count_ = 0;  // in flight
  bool is_leaving_ = false;
  bool is_locked_out_ = false;                        // another file has the lock that the next write needs
  std::vector<std::pair<uint64_t, uint64_t>> dirty_;  // alone: pages written since the lock was entered, first and end
  Status write_back_error_;
};

}  // namespace fastpersist
