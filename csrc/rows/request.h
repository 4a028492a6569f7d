// One request for rows: the memory for its result, and its state. The store plans it and fills its result.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/status.h"
#include "rows/plan.h"

namespace fastpersist {

// The functions are thread-safe; the members below them belong to the store.
class RowRequest {
 public:
  static constexpr uint32_t kNoBatch = 0;
  static constexpr uint32_t kKeep = UINT32_MAX;  // not registered; the cache keeps its rows

  // `batch`: its number, if it was registered ahead (rows/cache.h), or one of these.
  RowRequest(std::byte* result, uint32_t row_bytes, uint32_t batch)
      : batch(batch), result_(result), row_bytes_(row_bytes) {}

  bool done() const { return is_done_.load(std::memory_order_acquire); }
  // Wait until the request is done, at most `time`; returns whether it is done.
  bool WaitFor(std::chrono::milliseconds time) const;
  // The first failure. REQUIRES: done().
  const Status& status() const { return status_; }
  // The file in which the failure occurred; empty if none.
  const std::string& failed_path() const { return failed_path_; }
  // End the request with this status, unless it is done already. After the return no thread touches the result, even if
  // reads are still in flight.
  void Cancel(Status status);

  // For the store. The request is done when all reads that it waits for have ended. Planning counts as one read from
  // the start.
  void AwaitReads(size_t count);
  // If this returns true, the caller may copy rows into the result until EndReads.
  bool BeginCopy();
  void EndReads(size_t count, bool has_copied);
  // One read has failed.
  void FailRead(const Status& status, const std::string& path);
  std::byte* RowAt(uint64_t index) const { return result_ + (index * row_bytes_); }

  const uint32_t batch;
  static bool IsRegistered(uint32_t batch) { return batch != kNoBatch && batch != kKeep; }
  bool is_registered() const { return IsRegistered(batch); }
  std::vector<RowWant> wants;        // sorted; rows that its own reads bring
  std::vector<RowRead> reads;        // reads of these rows; unchanged once the store has planned the request
  std::vector<RowWant> shared;       // rows that other requests read
  std::atomic<size_t> next_read{0};  // earlier reads were started or dropped; only one thread starts reads
  size_t unended_read_count = 0;
  uint32_t number = 0;  // the request's number in the store

 private:
  std::byte* const result_;
  const uint32_t row_bytes_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  size_t awaited_count_ = 1;  // guarded by mutex_, as all below
  size_t copying_count_ = 0;
  std::atomic<bool> is_done_{false};  // set under mutex_
  Status status_;
  std::string failed_path_;
};

}  // namespace fastpersist
