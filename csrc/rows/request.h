// One request for rows: where they go, and what came of it. The store plans it and fills its result.
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
  // Wait until it is done, at most `time`; returns whether it is.
  bool WaitFor(std::chrono::milliseconds time) const;
  // The first failure. REQUIRES: done().
  const Status& status() const { return status_; }
  // The file that it is about; empty if none.
  const std::string& failed_path() const { return failed_path_; }
  // Make it done, with this status, unless it is done already. Nobody touches the result from the return on, whatever
  // the kernel still reads.
  void Cancel(Status status);

  // For the store. It is done when as many reads have ended as it waits for; it begins with one, which ends with its
  // planning.
  void AwaitReads(size_t count);
  // May copy rows into the result until EndReads, if it returns true.
  bool BeginCopy();
  void EndReads(size_t count, bool has_copied);
  // One read has failed.
  void FailRead(const Status& status, const std::string& path);
  std::byte* RowAt(uint64_t index) const { return result_ + (index * row_bytes_); }

  const uint32_t batch;
  static bool IsRegistered(uint32_t batch) { return batch != kNoBatch && batch != kKeep; }
  bool is_registered() const { return IsRegistered(batch); }
  std::vector<RowWant> wants;        // sorted; rows that its own reads bring
  std::vector<RowRead> reads;        // of these; unchanged once the store has planned it
  std::vector<RowWant> shared;       // rows that reads of other requests bring
  std::atomic<size_t> next_read{0};  // earlier ones were started or dropped; only one thread starts them
  size_t unended_read_count = 0;
  uint32_t number = 0;  // in the store

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
