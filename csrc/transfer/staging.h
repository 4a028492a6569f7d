// Memory for bytes on their way between the kernel and memory that direct I/O does not take: one mapping, from which
// pieces of any size are taken. At most a queue depth of pieces is out at once, so a searched list is enough.
//
// Devices copy out of it and into it too, so it is pinned for them. They get no place below a limit, so a hung device
// leaves some to others. If a device may still touch a piece when a file is given up, the piece is quarantined
// (core/quarantine.h).
//
// A closed file leaves one mapping in the process for the next file: fresh pages cost more than the copy that goes
// through them, above all in a virtual machine, whose host has to find them too. The kernel may reclaim its pages at
// any time (MADV_FREE), unless a device has pinned them, since pinning costs more than anything else here. The next
// owner writes to each page before it uses it, and the kernel keeps written pages: before Linux 5.18 it may reclaim a
// page that a direct read is filling, and the reader finds zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "core/memory.h"
#include "core/quarantine.h"
#include "core/status.h"

namespace fastpersist {

// Not thread-safe: one owner.
class Staging {
 public:
  static constexpr size_t kUnitBytes = 4096;

  // `reuses`: take the mapping of an earlier file if it is large enough, and leave this one to the next.
  explicit Staging(size_t capacity_bytes, bool reuses = true);
  // In a forked child, which does not have the memory, it does nothing.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Map the memory at the first call; later calls do nothing. kNoMemory if the kernel refuses.
  Status Prepare();

  // Returns a place aligned to kUnitBytes; null: no gap is large enough. With nothing out, any size up to the capacity
  // fits. Takes the lowest place from `from_bytes` on, so light use touches little memory. REQUIRES: Prepare() was ok.
  std::byte* Take(size_t size_bytes, size_t from_bytes = 0);
  void Put(std::byte* piece);
  // Instead of Put, if a device may still copy from or to the piece. The first TakeBack() after `complete` holds frees
  // its place.
  void PutInQuarantine(std::byte* piece, CopiesComplete complete);
  void TakeBack();

  // Pin the memory for a device. Only the first call counts. REQUIRES: Prepare() was ok.
  void PinWith(const Pin& pin);
  bool is_pinned() const { return pinned_ != nullptr; }

  size_t capacity_bytes() const { return capacity_bytes_; }
  bool has_quarantined() const { return quarantine_.count() > 0; }

 private:
  void TouchUntil(size_t end_bytes);

  const uint64_t fork_generation_;
  const size_t capacity_bytes_;
  const bool reuses_;
  size_t mapped_bytes_ = 0;   // at least the capacity
  size_t touched_bytes_ = 0;  // the kernel keeps these: they were written to
  std::byte* memory_ = nullptr;
  bool was_pinned_ = false;  // or the attempt failed
  std::shared_ptr<void> pinned_;
  std::map<size_t, size_t> taken_;  // first byte and end of each piece, from memory_
  Quarantine quarantine_;           // its pieces count as taken
};

}  // namespace fastpersist
