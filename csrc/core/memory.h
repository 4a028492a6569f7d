// Memory of this library: mappings for buffers, which devices may know, and fresh memory that is about to be filled,
// which meets fewer faults, and those on another core than the one that fills it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"

namespace fastpersist {

// Ask for huge pages wherever a whole one fits inside the range: filling it then takes one fault per 2 MiB instead of
// 512. It is only advice, which the kernel may ignore.
void AdviseHugePages(std::span<std::byte> range);

// Let the kernel find and clear the pages of a range now. A kernel before 5.14 does it when they are touched.
// REQUIRES: on page boundaries.
void Populate(std::span<std::byte> range);

// Of this kernel: 4 KiB as a rule, up to 64 KiB on aarch64.
uint64_t PageBytes();

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Anonymous memory for our own buffers: on a huge-page boundary, advised to use huge pages (without them a first touch
// meets 512 faults instead of one, and the kernel pins more pages per request) and to stay out of forked children
// (which have no use of it, and would make this process copy pages that direct I/O writes into). Null, with errno set,
// when it cannot be had. Given back by UnmapBuffers(memory, size_bytes).
std::byte* MapBuffers(size_t size_bytes);
void UnmapBuffers(std::byte* memory, size_t size_bytes);

// Whether an address is inside this memory.
inline bool IsInside(std::span<const std::byte> memory, const std::byte* address) {
  return std::less_equal<>()(memory.data(), address) && std::less<>()(address, memory.data() + memory.size());
}

// For memory of MapBuffers that a device did not let go of: UnmapBuffers leaves it mapped from now on. If the address
// were mapped anew, the device would take the new memory for the old, and copy from and to it.
void KeepMapped(const std::byte* memory);

// Makes memory known to a device, so that it copies from and to it by itself; the memory is known to it as long as what
// is returned lives. Never fails: memory that a device does not know is only slower.
using Pin = std::function<std::shared_ptr<void>(std::span<std::byte> memory)>;

// Whether a device has completed the copies that it was told to make from or to some memory. It is asked now and then,
// and not again once it is true. What it holds, such as references to the other side of the copies, lives until then.
using CopiesComplete = std::function<bool()>;

// Page-locked memory, which is never swapped out: zeroed, and on a huge-page boundary where it is large enough. A
// forked child has a copy that is not locked.
class LockedMemory {
 public:
  // kNoMemory, with what to do about it, where the limit (RLIMIT_MEMLOCK) or the machine does not allow it.
  // REQUIRES: size_bytes > 0.
  static Result<std::unique_ptr<LockedMemory>> Create(size_t size_bytes);
  ~LockedMemory();
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;

  std::byte* address() const { return memory_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  LockedMemory(std::byte* memory, size_t size_bytes, size_t mapped_bytes)
      : memory_(memory), size_bytes_(size_bytes), mapped_bytes_(mapped_bytes) {}

  std::byte* const memory_;
  const size_t size_bytes_;
  const size_t mapped_bytes_;
};

// A thread that makes the kernel find and clear the pages of fresh memory before another one fills it. Clearing is a
// third of the work of a load, and where the filling thread does it, the disk waits. This changes no byte, so it may
// run beside the filling.
//
// Does nothing where it cannot help: with one CPU, little memory, a kernel before 5.14, or where no thread can be had.
class Prefault {
 public:
  // Starts at once, in the order given. The ranges stay mapped until destruction. Only whole pages inside them are
  // prepared, since the kernel refuses a range that begins within a page. `page_bytes` is for tests.
  explicit Prefault(std::vector<std::span<std::byte>> ranges, uint64_t page_bytes = PageBytes());
  // Stops after the 4 MiB at which the thread is, for which it waits.
  ~Prefault();
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

 private:
  void Run() const;

  const std::vector<std::span<std::byte>> ranges_;
  const uint64_t page_bytes_;
  std::atomic<bool> stopping_{false};
  bool started_ = false;
  pthread_t thread_{};
};

}  // namespace fastpersist
