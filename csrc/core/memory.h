// The memory of this library: mappings for buffers, pages locked in memory, and a thread that prepares fresh memory
// before another one fills it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/fork.h"
#include "core/status.h"

namespace fastpersist {

// Ask for huge pages wherever a whole one fits inside the ranges: filling them then takes one fault per 2 MiB instead
// of 512. Ranges that lie next to each other (no whole page between them) share huge pages. It is only advice, which
// the kernel may ignore.
void AdviseHugePages(std::vector<std::span<std::byte>> ranges);

// Make the kernel allocate and clear the pages of a range now. A kernel before 5.14 does it at the first touch.
// REQUIRES: the range lies on page boundaries.
void Populate(std::span<std::byte> range);

// The page size of this kernel: usually 4 KiB, up to 64 KiB on aarch64.
uint64_t PageBytes();

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Map anonymous memory for buffers, on a huge-page boundary, advised to use huge pages (else a first touch meets 512
// faults instead of one, and the kernel pins more pages per request) and to stay out of forked children (which do not
// need it, and would make this process copy pages that direct I/O writes to). Returns null and sets errno if the kernel
// refuses. Free it by UnmapBuffers(memory, size_bytes).
std::byte* MapBuffers(size_t size_bytes);
void UnmapBuffers(std::byte* memory, size_t size_bytes);

// Whether an address is inside this memory.
inline bool IsInside(std::span<const std::byte> memory, const std::byte* address) {
  return std::less_equal<>()(memory.data(), address) && std::less<>()(address, memory.data() + memory.size());
}

// Make UnmapBuffers leave all of the memory around this address mapped, because a device did not release it. If the
// kernel mapped the address anew, the device would copy from and to the new memory.
void KeepMapped(const std::byte* memory);

// Pins memory while the returned object lives, so that a device copies from and to it by DMA. Never fails: a device
// also copies from and to unpinned memory, only slower.
using Pin = std::function<std::shared_ptr<void>(std::span<std::byte> memory)>;

// Whether a device has completed its copies from or to some memory. Called now and then until it returns true. Objects
// that it holds, such as references to the other side of the copies, live until then.
using CopiesComplete = std::function<bool()>;

// While this object lives, a forked child finds zeros in this memory, so no page of it is shared with the child.
// Otherwise a write by either process would copy the shared page, and a direct read in flight would go on into the old
// page (open(2), O_DIRECT).
class WipedOnFork {
 public:
  WipedOnFork() = default;
  ~WipedOnFork();
  WipedOnFork(const WipedOnFork&) = delete;
  WipedOnFork& operator=(const WipedOnFork&) = delete;

  // Returns false if the kernel does not do it for this memory: it does for private, anonymous memory.
  // REQUIRES: the range lies on page boundaries.
  bool Add(std::span<std::byte> range);

 private:
  std::vector<std::span<std::byte>> ranges_;
};

// Page-locked memory, which is never swapped out: zeroed, and on a huge-page boundary if it is large enough. The copy
// in a forked child is not locked.
class LockedMemory {
 public:
  // kNoMemory, with advice, if the limit (RLIMIT_MEMLOCK) or the machine does not allow it. REQUIRES: size_bytes > 0.
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

// A thread that makes the kernel allocate and clear fresh pages before another thread fills them. Clearing is a third
// of a load's work, and the disk waits if the filling thread does it. It changes no byte, so it may run beside the
// filling.
//
// Does nothing if it cannot help: with one CPU, little memory, a kernel before 5.14, or if no thread can be started.
class Prefault {
 public:
  // Start at once, in the order given. The ranges stay mapped until destruction. It prepares only whole pages inside
  // them, since the kernel refuses a range that begins within a page. `page_bytes` is for tests.
  explicit Prefault(std::vector<std::span<std::byte>> ranges, uint64_t page_bytes = PageBytes());
  // Stops; waits until the thread has ended its current step of 4 MiB. A forked child does not have the thread.
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
  const uint64_t generation_ = ForkGeneration();
};

}  // namespace fastpersist
