// Memory for bytes on their way between the kernel and memory that direct I/O does not take: one mapping, out of which
// pieces of any size are given. At most a queue depth of pieces is out at once, so a list that is searched is enough.
//
// Devices copy out of it and into it, too, and it is pinned for them. They get no place below a limit, so that a device
// that stands still leaves some to others. Pieces that a device may still touch when a file is given up are quarantined
// (core/quarantine.h).
//
// One mapping is left in the process when its file is closed, for the next file: fresh pages cost more than the copy
// that goes through them, above all in a virtual machine, whose host has to find them, too. The kernel may take its
// pages at any time (MADV_FREE), unless a device knows them: to make it known costs more than anything else here. It
// takes none that was written to since, so they are written to before anything else is: kernels before Linux 5.18 may
// take one that a direct read is filling, and the reader finds zeros.
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

  // `reuses`: it takes the mapping that an earlier file has left, if it is large enough, and leaves its own.
  explicit Staging(size_t capacity_bytes, bool reuses = true);
  // In a forked child, which does not have the memory, it touches nothing.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // kNoMemory when the mapping cannot be had; it is found at the first call. Again and again is fine.
  Status Prepare();

  // Aligned to kUnitBytes. Null when no gap is large enough; with nothing out, any size up to the capacity fits.
  // The lowest place from `from_bytes` on is taken, so what is used little touches little memory.
  // REQUIRES: Prepare() was ok.
  std::byte* Take(size_t size_bytes, size_t from_bytes = 0);
  void Put(std::byte* piece);
  // Instead of Put, where a device may still copy from or to the piece. Its place is free again at the first call of
  // TakeBack() after the copies are complete.
  void PutInQuarantine(std::byte* piece, CopiesComplete complete);
  void TakeBack();

  // Let a device know the memory. The first call counts. REQUIRES: Prepare() was ok.
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
  size_t touched_bytes_ = 0;  // of these the kernel takes none
  std::byte* memory_ = nullptr;
  bool was_pinned_ = false;  // or it was tried
  std::shared_ptr<void> pinned_;
  std::map<size_t, size_t> taken_;  // where pieces begin and end, in bytes from memory_
  Quarantine quarantine_;           // its pieces are taken, too
};

}  // namespace fastpersist
