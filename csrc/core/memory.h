// Fresh memory that is about to be filled: fewer faults, and taken by another core than the one that fills.
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

// Ask for huge pages under the whole huge pages inside the range: filling it then takes one fault per 2 MiB instead of
// 512. Only advice: nothing changes where it is refused, and no page is added at the ends.
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

// For a device that did not let go of memory of MapBuffers: UnmapBuffers leaves it mapped. What came to that address
// next, the device would take for what was there before, and copy from and to that.
void KeepMapped(const std::byte* memory);

// Makes memory known to a device, so that it copies from and to it by itself; the memory is known to it as long as what
// is returned lives. Never fails: memory that a device does not know is only slower.
using Pin = std::function<std::shared_ptr<void>(std::span<std::byte> memory)>;

// Whether a device that was told to copy into some memory does so no more. Asked now and then; not asked again once it
// is true. What it holds, such as references to the other side of the copies, stays until then.
using Landed = std::function<bool()>;

// Memory that stays where it is: page-locked, so that it is never swapped out, zeroed, on a huge-page boundary where it
// is large enough. A forked child has a copy that is not locked.
class LockedMemory {
 public:
  // kNoMemory, with what to do about it, where the limit (RLIMIT_MEMLOCK) or the machine has no room for it.
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

// Makes the kernel find and clear the pages of fresh memory ahead of the thread that fills it. Clearing is a third of
// the work of a load; done in line, it keeps the disk waiting. Changes no byte, so it may run beside the filling.
//
// Does nothing where it cannot help: one CPU, little memory, a kernel before 5.14, no thread to be had.
class Prefault {
 public:
  // Starts at once, in the order given. The ranges stay mapped until destruction. Only whole pages inside them are
  // prepared: the kernel refuses a range that begins within one. `page_bytes` is for tests.
  explicit Prefault(std::vector<std::span<std::byte>> ranges, uint64_t page_bytes = PageBytes());
  // Stops after the piece that is being done, and waits for that.
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
