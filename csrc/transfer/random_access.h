// Reads and writes at any place of one open file, from any thread, many at once: the file side of TensorFile. A request
// is a list of parts (memory and place in the file); it is done when all parts are.
//
// Direct I/O takes whole blocks from aligned memory, but requests are arbitrary. So:
// - A part with aligned memory and place goes straight from or to that memory.
// - Other parts are staged: a read takes the blocks around them into staging, a write copies them there first.
// - A read into a page that the part does not fill is staged too, whatever the device would take. After a fork, a
//   process that writes to the rest of that page gets a copy of it, and the device would go on filling the old page
//   (open(2), NOTES on O_DIRECT). A write needs no such care: its bytes do not change until it is done, so both pages
//   hold the same.
// - The ends of a written part that fill no whole page go through the page cache, by a second descriptor and a second
//   pump. The kernel changes the page under its own lock, so writers of neighbouring bytes, in any process, cannot undo
//   each other; reading, changing and writing the block here could. Direct writes cover whole pages only, and nothing
//   is written through the page cache while any are in flight (edge_lock.h).
// - Bytes in a device's memory are always staged, in memory that is pinned from the first such part on, and the device
//   copies them beside everything else (device_copies.h). The copies follow the work that the caller's stream held when
//   FollowCaller was called (device.h).
//
// One thread owns each pump; the first request starts it, and it stays. Requests do not wait for each other and have no
// order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/status.h"
#include "transfer/io_pump.h"

namespace fastpersist {

class Device;

struct FilePart {
  std::byte* address = nullptr;
  uint64_t size_bytes = 0;
  uint64_t offset_bytes = 0;
  Device* device = nullptr;  // address is in its memory; null: in the host's
};

// One request. Thread-safe. A forked child must not touch it.
//
// A read beyond the end of the file keeps the bytes that exist and fails at that end, unless it has failed otherwise.
class FileRequest : public std::enable_shared_from_this<FileRequest> {
 public:
  using OnComplete = std::function<void(const std::shared_ptr<FileRequest>&)>;

  IoOp op() const { return op_; }
  bool done() const;
  // Wait until it is done, at most `time`; returns whether it is.
  bool WaitFor(std::chrono::milliseconds time) const;

  // REQUIRES, for all below: done(). The first failure. The end of the file is reported only if there is no other
  // failure, and at its lowest offset in the part.
  const Status& status() const { return status_; }
  uint64_t failed_count() const { return failed_count_; }
  uint64_t done_bytes() const { return done_bytes_; }
  // The part that failed, and how many of its bytes lie before the failure.
  const FilePart& failed_part() const { return failed_part_; }
  uint64_t failed_part_done_bytes() const { return failed_part_done_bytes_; }

  // Keep `memory` (of devices) alive until Drop(). If the request fails while a device may still copy there, the
  // quarantine keeps it until the device has ended.
  void Keep(std::shared_ptr<const void> memory);
  void Drop();

  // Whether a caller has received the failure.
  bool told() const { return told_.load(std::memory_order_relaxed); }
  void SetTold() { told_.store(true, std::memory_order_relaxed); }

  // For the implementation. A request is complete when every job is; on_complete is then called with its mutex held. It
  // begins with one job, which End() completes, so it cannot complete while parts are being added.
  struct Failure {
    Status status;
    FilePart part;
    uint64_t done_bytes = 0;
  };
  FileRequest(IoOp op, OnComplete on_complete) : op_(op), on_complete_(std::move(on_complete)) {}
  void AddJob();
  void CompleteJob(uint64_t done_bytes, uint64_t failed_count, Failure first_failure);
  std::shared_ptr<const void> memory() const;

 private:
  const IoOp op_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  size_t open_job_count_ = 1;  // guarded by mutex_, as all below; includes the one that End() completes
  OnComplete on_complete_;
  std::shared_ptr<const void> memory_;
  Status status_;
  uint64_t failed_count_ = 0;
  uint64_t done_bytes_ = 0;
  FilePart failed_part_;
  uint64_t failed_part_done_bytes_ = 0;
  std::atomic<bool> told_{false};
};

class RequestWorker;

struct RandomAccessOptions {
  int fd = -1;           // has a file description of its own: O_DIRECT is set on it
  int buffered_fd = -1;  // has another file description, open for writing; -1 if nothing will be written
  // Two more, closed in forked children, for the locks between direct and buffered writes (edge_lock.h).
  int direct_lock_fd = -1;
  int edge_lock_fd = -1;
  std::string path;
  std::vector<std::string> engines;       // as in PumpOptions; no direct one may follow a buffered one
  std::vector<std::string> edge_engines;  // for writes through the page cache beside a direct engine
  uint32_t queue_depth = 32;
  uint32_t thread_count = 0;
  uint64_t chunk_bytes = uint64_t{1} << 20;  // the largest request to the kernel; a power of two
  // Limit of staging memory, but at least three chunks, and 64 pages for the ends of direct writes from devices.
  uint64_t staging_bytes = uint64_t{1} << 26;
};

// Thread-safe, except for the destructor.
class RandomAccess {
 public:
  static Result<std::unique_ptr<RandomAccess>> Open(RandomAccessOptions options);
  // Waits for all requests, as after GiveUpOnDevices. Does nothing in a forked child.
  ~RandomAccess();
  RandomAccess(const RandomAccess&) = delete;
  RandomAccess& operator=(const RandomAccess&) = delete;

  // Begin a request, Add parts as they are found, End it; it cannot be done before End. Added parts are in flight
  // meanwhile. Their memory must stay valid and untouched until the request is done. Empty parts are ignored. REQUIRES:
  // offsets and ends fit off_t; all parts of one Add lie in the host's memory, or all in one device's.
  std::shared_ptr<FileRequest> Begin(IoOp op);
  void Add(const std::shared_ptr<FileRequest>& request, std::vector<FilePart> parts);
  void End(const std::shared_ptr<FileRequest>& request);

  // From now on copies fail that a device has not completed within the grace time (device.h). Called to close the file.
  void GiveUpOnDevices();

  // Wait until no request is open, at most `time`; returns whether none is.
  bool WaitForAll(std::chrono::milliseconds time);

  // Returns the writes that have failed since the last call.
  std::vector<std::shared_ptr<FileRequest>> TakeFailedWrites();

  // Returns the first error with which the kernel failed to write finished requests back from the page cache. Only a
  // sync reports the bytes that the kernel has not tried yet.
  Status WrittenBack();

  // The engine in use, and why earlier engines were abandoned.
  std::string engine_name() const;
  std::vector<std::string> demotions() const;

 private:
  explicit RandomAccess(RandomAccessOptions options);
  Result<RequestWorker*> EdgeWorker();

  struct Tally;

  const uint64_t generation_;
  const RandomAccessOptions options_;
  const DirectIoLimits limits_;
  uint64_t write_unit_bytes_ = 1;  // direct writes cover multiples of this
  std::unique_ptr<RequestWorker> worker_;
  std::mutex* edge_mutex_;  // on the heap: a forked child leaves it alone
  std::unique_ptr<RequestWorker> edge_worker_;
  std::shared_ptr<Tally> tally_;
};

}  // namespace fastpersist
