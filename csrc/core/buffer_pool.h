// The ring: a fixed number of aligned buffers of one size, allocated once, shared by every transfer of the process.
// It never grows, so host memory is bounded, and waiting for a buffer is the back-pressure of a transfer.
//
// The sharing rule. A transfer joins with at least kBuffersPerTransfer buffers of its own before it moves a byte and
// keeps them until it leaves; so no transfer ever waits for another while holding what the other needs, and no two can
// deadlock. It may take more while nobody waits to join, and gives those back as soon as somebody does. Transfers join
// in the order they came.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/memory.h"
#include "core/status.h"

namespace fastpersist {

// Thread-safe: all members are guarded by one mutex, held only to move pointers.
class BufferPool {
 public:
  static constexpr size_t kBuffersPerTransfer = 2;
  static constexpr uint64_t kBufferAlignment = 4096;

  // One anonymous mapping, advised to use huge pages and to stay out of forked children. kNoMemory when it cannot be
  // had. REQUIRES: buffer_bytes is a multiple of kBufferAlignment, buffer_count >= kBuffersPerTransfer.
  static Result<std::unique_ptr<BufferPool>> Create(size_t buffer_count, size_t buffer_bytes);
  // Over memory of somebody else, whom the pool keeps: of a device, which no thread can look into.
  static std::unique_ptr<BufferPool> Over(std::byte* memory, size_t buffer_count, size_t buffer_bytes,
                                          std::shared_ptr<void> owner);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t buffer_count() const { return buffer_count_; }
  size_t free_count() const;

  // Let a device know the ring's memory. The first call counts, for as long as the pool lives; later ones do nothing.
  void PinWith(const Pin& pin);

 private:
  friend class BufferShare;
  BufferPool(std::byte* memory, size_t buffer_count, size_t buffer_bytes, std::shared_ptr<void> owner);

  Status Join(std::vector<std::byte*>& into, const std::function<Status()>& poll);
  std::byte* TryTake();
  void Return(std::byte* buffer);
  bool somebody_waits() const;

  std::byte* const memory_;
  const size_t buffer_count_;
  const size_t buffer_bytes_;
  const std::shared_ptr<void> owner_;  // of the memory; null: it is ours
  const uint64_t fork_generation_;
  std::once_flag pin_once_;
  std::shared_ptr<void> pinned_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::byte*> free_;
  uint64_t next_ticket_ = 0;
  std::deque<uint64_t> waiting_;  // tickets of those who wait to join, in order
};

// The buffers of one transfer. Not thread-safe: one owner. Returns everything on destruction.
class BufferShare {
 public:
  // Waits for kBuffersPerTransfer buffers; `poll` is asked about every 50 ms and its error ends the wait.
  static Result<BufferShare> Join(BufferPool& pool, const std::function<Status()>& poll);
  BufferShare(BufferShare&& other) noexcept;
  BufferShare& operator=(BufferShare&&) = delete;
  ~BufferShare();

  // An idle buffer of this share, else one more from the pool, else nullptr: put one back first.
  std::byte* Take();
  void Put(std::byte* buffer);

  BufferPool& pool() const { return *pool_; }

 private:
  explicit BufferShare(BufferPool& pool) : pool_(&pool) {}

  BufferPool* pool_;
  std::vector<std::byte*> idle_;
  size_t owned_count_ = 0;
};

}  // namespace fastpersist
