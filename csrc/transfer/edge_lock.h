// Keeps direct writes in flight apart from writes to the same file through the page cache, which the kernel does not
// do. When an asynchronous direct write ends, the kernel drops the cached copy of its range. If that copy has become
// dirty, the kernel cannot drop it: stale bytes stay cached and reach the disk later. Disjoint pages do not help: the
// kernel drops whole folios of up to 2 MiB (ext4 since Linux 6.16, xfs since 5.18, once the file was read through the
// page cache).
//
// Direct writers therefore hold a shared lock while their writes are in flight. A buffered writer holds it alone, from
// its first byte until nothing is dirty any more. The lock belongs to open file descriptions and to a byte beyond every
// file's end, so it works between all processes of the machine. A side that waits to be alone holds a second byte, the
// turnstile, which every side must pass to enter: so no side starves.
//
// Source: fcntl(2), "Open file description locks"; the kernel's message "Page cache invalidation failure on direct I/O.
// Possible data corruption due to collision with buffered I/O!" (mm/filemap.c).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "core/status.h"
#include "transfer/clock.h"

namespace fastpersist {

// One side of the lock. Not thread-safe: one owner.
class EdgeLock {
 public:
  // The caller owns `fd`. It must be open for reading and writing, have a file description without other uses, and be
  // closed in forked children, which would hold the lock for ever. -1: every call does nothing. `clock` null: the
  // steady clock.
  EdgeLock(int fd, std::string path, TransferClock* clock = nullptr) : fd_(fd), path_(std::move(path)), clock_(clock) {}

  // Try to take the lock. False: another side holds it; try again in about a millisecond. Fails if it was held for half
  // a minute, or the kernel refuses; the caller may still try again.
  Result<bool> TryEnter(bool alone);
  // Like TryEnter, but waits.
  Status Enter(bool alone);
  // Leave the lock, or stop waiting for it: a side that TryEnter refused and that gives up must leave too, since it
  // holds up others.
  void Leave();
  bool held() const { return held_; }
  bool alone() const { return held_ && alone_; }

  // Whether another side waits for this one to leave. Asks the kernel every few milliseconds and returns false in
  // between. REQUIRES: held().
  bool SomebodyWaits();

  // Write ranges of the file (first byte and end) from the page cache to the device, and wait, whichever description
  // wrote them. Uses the lock's own description: the kernel reports a failed write once to each description, and the
  // next sync of the file must still get the report.
  Status WriteBack(std::span<const std::pair<uint64_t, uint64_t>> ranges) const;

  // Whether the file system of this file has such locks.
  static bool Works(int fd);

 private:
  bool Change(short type, int64_t place);
  Status WhoIsInTheWay(short type, int64_t place) const;

  const int fd_;
  const std::string path_;
  TransferClock* const clock_;
  bool in_turnstile_ = false;
  bool held_ = false;
  bool alone_ = false;
  TimePoint refused_since_ = TimePoint::max();
  TimePoint next_look_;
};

// Cut or extend a file, or reserve a range, while holding the lock alone: the kernel zeroes the rest of the last page
// in the page cache. `lock_fd` as for an EdgeLock, not in use; -1: no lock.
Status TruncateAlone(int lock_fd, int fd, uint64_t size_bytes, const std::string& path);
Status AllocateAlone(int lock_fd, int fd, uint64_t offset_bytes, uint64_t size_bytes, const std::string& path);

}  // namespace fastpersist
