// Memory for bytes on their way between the kernel and memory that direct I/O does not take: one mapping, out of which
// pieces of any size are given. At most a queue depth of pieces is out at once, so a list that is searched is enough.
//
// One mapping is kept in the process when its file is closed, for the next file: fresh pages cost more than the copy
// that goes through them, above all in a virtual machine, whose host has to find them, too. The kernel may take its
// pages at any time (MADV_FREE).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "core/status.h"

namespace fastpersist {

// Not thread-safe: one owner.
class Staging {
 public:
  static constexpr size_t kUnitBytes = 4096;

  explicit Staging(size_t capacity_bytes);
  // In a forked child, which does not have the memory, it touches nothing.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // kNoMemory when the mapping cannot be had; it is found at the first call. Again and again is fine.
  Status Prepare();

  // Aligned to kUnitBytes. Null when no gap is large enough; with nothing out, any size up to the capacity fits.
  // The lowest place is taken, so what is used little touches little memory. REQUIRES: Prepare() was ok.
  std::byte* Take(size_t size_bytes);
  void Put(std::byte* piece);

 private:
  const uint64_t fork_generation_;
  const size_t capacity_bytes_;
  size_t mapped_bytes_ = 0;  // at least the capacity
  std::byte* memory_ = nullptr;
  std::map<size_t, size_t> taken_;  // where pieces begin and end, in bytes from memory_
};

}  // namespace fastpersist
