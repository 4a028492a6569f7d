// Keeps two things apart that the kernel does not: direct writes under way, and bytes of the same file written through
// the page cache. A direct write that has been submitted asynchronously throws the cached copy of what it covers away
// when it is done; if that copy has been made dirty meanwhile, it cannot, and stale bytes stay cached, and get back to
// the disk. It does not help that the two never meet in a page: what is thrown away, and is dirty, are folios, of up to
// 2 MiB (ext4 since Linux 6.16, xfs since 5.18, as soon as somebody has read the file through the page cache).
//
// So the one side holds a lock, shared, while direct writes are in flight, and the other, alone, from the first byte
// until nothing is dirty any more. The lock is one of open file descriptions on a byte that no file reaches, so it
// holds between all of these files of all processes of the machine. Whoever wants to be alone holds a second byte, the
// turnstile, which the others pass on their way in: nobody starves.
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
  // `fd` stays the caller's, is open for reading and writing, of a file description that has no other use, and is
  // closed in forked children, who would hold the lock for ever. -1: every call does nothing. `clock` null: the steady
  // clock.
  EdgeLock(int fd, std::string path, TransferClock* clock = nullptr) : fd_(fd), path_(std::move(path)), clock_(clock) {}

  // Take the lock if nobody is in the way; false: try again, in a millisecond or so. An error if somebody has been in
  // the way for half a minute, or the kernel refuses: then, too, it may be tried again.
  Result<bool> TryEnter(bool alone);
  // The same, and wait.
  Status Enter(bool alone);
  // Or wait no longer: who was refused and does not try again leaves, too, since he is in the way of others.
  void Leave();
  bool held() const { return held_; }
  bool alone() const { return held_ && alone_; }

  // REQUIRES: held(). Whether somebody waits for this side to leave. Looks every few milliseconds, and says no in
  // between.
  bool SomebodyWaits();

  // Bring ranges of the file (first byte and end), written through the page cache by whatever description, to the
  // device, and wait for that. By the lock's own description: the kernel tells each description once that something
  // could not be written, and the next sync of the file is to be told, too.
  Status WriteBack(std::span<const std::pair<uint64_t, uint64_t>> ranges) const;

  // Whether there are such locks on this file.
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

// Cut a file or let it grow, or reserve a range: alone, since the kernel zeroes the rest of the page in which the file
// ends, in the page cache. `lock_fd` as for an EdgeLock, not in use; -1 for no lock.
Status TruncateAlone(int lock_fd, int fd, uint64_t size_bytes, const std::string& path);
Status AllocateAlone(int lock_fd, int fd, uint64_t offset_bytes, uint64_t size_bytes, const std::string& path);

}  // namespace fastpersist
