// Reads and writes at any place of one open file, from any thread, many at once: the file side of TensorFile. A request
// is a list of parts (memory here, bytes there), and is done when all of them are.
//
// Direct I/O takes whole blocks from aligned memory; requests are anything. So:
// - A part whose memory and place are aligned goes straight from or to that memory.
// - What is read from elsewhere, or to elsewhere, is staged: the blocks around it are read into a buffer of ours, what
//   is written is copied there first.
// - So is what is read to a page of memory that is not the part's alone, whatever the device would take. After a fork,
//   who writes to anything else in that page gets a copy of it, and the device would go on filling the old one
//   (open(2), NOTES on O_DIRECT). A write needs no such care: nobody touches its bytes until it is done, so they are
//   the same in the copy and in the old page.
// - What is written in less than a whole page, at the ends of a part, goes through the page cache, by a second
//   descriptor and a second pump. The kernel puts it into its page under its own lock, so writers of neighbouring
//   bytes, in this process or another one, cannot undo each other; reading, changing and writing the block here could.
//   Direct writes cover whole pages and nothing else; and while any are in flight, nothing is written through the page
//   cache (edge_lock.h).
//
// - What lies in the memory of a device is staged always, in memory that the device knows from the first time on, and
//   copied by it beside everything else (device_copies.h). The copies come after what the caller's stream held when it
//   was followed (device.h).
//
// A thread owns each pump; it is started by the first request and stays. Requests do not wait for each other, and
// nothing is said about their order.
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
  Device* device = nullptr;  // whose address it is; null: the host's
};

// One request. Thread-safe. Not to be looked at in a forked child.
//
// A read that reaches beyond the end of the file leaves in memory what is there, and is told to have failed at that
// end, unless it has failed otherwise, too.
class FileRequest : public std::enable_shared_from_this<FileRequest> {
 public:
  using OnComplete = std::function<void(const std::shared_ptr<FileRequest>&)>;

  IoOp op() const { return op_; }
  bool done() const;
  // Wait until it is done, or the time is over; say whether it is.
  bool WaitFor(std::chrono::milliseconds time) const;

  // REQUIRES, for all below: done().
  // Of several failures the one that was met first, but an end of the file at the lowest place in its part, and only
  // where there is no other.
  const Status& status() const { return status_; }
  uint64_t failed_count() const { return failed_count_; }
  uint64_t done_bytes() const { return done_bytes_; }
  // The part that failed, and how many of its bytes lie before the place of the failure.
  const FilePart& failed_part() const { return failed_part_; }
  uint64_t failed_part_done_bytes() const { return failed_part_done_bytes_; }

  // What keeps memory of devices alive. Kept until it is dropped, and, if a device may still copy there when the
  // request fails, until it has ended that.
  void Keep(std::shared_ptr<const void> memory);
  void Drop();

  // Whether somebody was told of the failure.
  bool told() const { return told_.load(std::memory_order_relaxed); }
  void SetTold() { told_.store(true, std::memory_order_relaxed); }

  // What follows is for those who do the work. A request is complete when every job is, and `on_complete` is called
  // then, with its mutex held; the one job that it begins with is for whoever adds the others.
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
  size_t open_job_count_ = 1;  // guarded by mutex_, as all below; one more than there are until End()
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
  int fd = -1;           // of a file description of its own: the flag for direct I/O is set on it
  int buffered_fd = -1;  // of another one, open for writing; -1 if nothing will be written
  // Two more, closed in forked children, for the locks between what goes through the one and the other (edge_lock.h).
  int direct_lock_fd = -1;
  int edge_lock_fd = -1;
  std::string path;
  std::vector<std::string> engines;       // as in PumpOptions; after one through the page cache no direct one follows
  std::vector<std::string> edge_engines;  // for what is written through the page cache beside a direct engine
  uint32_t queue_depth = 32;
  uint32_t thread_count = 0;
  uint64_t chunk_bytes = uint64_t{1} << 20;  // of one request to the kernel, at most; a power of two
  // Memory for staging, at most; but at least three chunks are taken, and 64 pages beside it for the ends of what is
  // written directly from devices.
  uint64_t staging_bytes = uint64_t{1} << 26;
};

// Thread-safe, but for the destructor.
class RandomAccess {
 public:
  static Result<std::unique_ptr<RandomAccess>> Open(RandomAccessOptions options);
  // Waits for all requests, as after GiveUpOnDevices. In a forked child it touches nothing.
  ~RandomAccess();
  RandomAccess(const RandomAccess&) = delete;
  RandomAccess& operator=(const RandomAccess&) = delete;

  // A request is begun, given parts as they are found, and ended; only then it can become done. What was added is under
  // way meanwhile. The memory stays valid until it is done, and is not touched. Empty parts are nothing.
  // REQUIRES: offsets and ends fit off_t; the parts of one call of Add lie in one memory, of the host or of a device.
  std::shared_ptr<FileRequest> Begin(IoOp op);
  void Add(const std::shared_ptr<FileRequest>& request, std::vector<FilePart> parts);
  void End(const std::shared_ptr<FileRequest>& request);

  // From now on what a device has not done within the grace time (device.h) fails. For who closes the file.
  void GiveUpOnDevices();

  // Wait until no request is open, or the time is over; say whether none is.
  bool WaitForAll(std::chrono::milliseconds time);

  // The writes that have failed since the last call.
  std::vector<std::shared_ptr<FileRequest>> TakeFailedWrites();

  // The first error of bytes of requests that are done, and that the kernel could not bring from the page cache to the
  // device. What it has not tried yet, only a sync of the file tells.
  Status WrittenBack();

  // The engine in use, and why others were left.
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
