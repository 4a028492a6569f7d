// The ring: a fixed number of aligned buffers of one size, allocated once, shared by every transfer of the process.
// It does not grow, so host memory is bounded, and waiting for a buffer is the back-pressure of a transfer.
//
// The sharing rule. A transfer joins with kBuffersPerTransfer buffers before it moves a byte, and keeps that many until
// it leaves. No transfer therefore waits for another while it holds buffers that the other needs, and no two can
// deadlock. A transfer may take more while no other waits to join, and gives those back once one does. Transfers join
// in order of arrival.
//
// Hung devices. A transfer that gives up quarantines the buffers that a device may still copy from or to
// (core/quarantine.h): the ring lacks them until the device has completed its copies. Transfers of CPU tensors must go
// on meanwhile. So a transfer joins with a private pool of kBuffersPerTransfer buffers if the ring has too few left, or
// if their owners wait for a device. Private buffers are never pinned, since pinning may wait for that very device. All
// private pools together have at most as many buffers as the ring.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/memory.h"
#include "core/quarantine.h"
#include "core/status.h"

namespace fastpersist {

// Thread-safe: all members are guarded by one mutex, held only to move pointers.
class BufferPool {
 public:
  static constexpr size_t kBuffersPerTransfer = 2;
  static constexpr uint64_t kBufferAlignment = 4096;

  // Map the buffers anonymously, advised to use huge pages and to stay out of forked children. kNoMemory if the kernel
  // refuses. REQUIRES: buffer_bytes is a multiple of kBufferAlignment, buffer_count >= kBuffersPerTransfer.
  static Result<std::unique_ptr<BufferPool>> Create(size_t buffer_count, size_t buffer_bytes);
  // A pool over device memory, which no thread can read. `owner` keeps the memory alive as long as the pool lives.
  static std::unique_ptr<BufferPool> Over(std::byte* memory, size_t buffer_count, size_t buffer_bytes,
                                          std::shared_ptr<void> owner);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t buffer_count() const { return buffer_count_; }
  // Takes complete buffers out of quarantine first.
  size_t free_count();
  // Buffers that are neither free nor owned by a transfer.
  size_t quarantined_count() const { return quarantine_.count(); }

  // Pin the ring's memory for a device, for as long as the pool lives. Only the first call counts.
  void PinWith(const Pin& pin);
  // Whether a device has pinned this buffer.
  bool is_pinned(const std::byte* buffer) const;

 private:
  friend class BufferShare;
  BufferPool(std::byte* memory, size_t buffer_count, size_t buffer_bytes, std::shared_ptr<void> owner);

  enum class Admission : uint8_t { kShared, kPrivate };
  Result<Admission> Join(std::vector<std::byte*>& into, const std::function<Status()>& poll);
  Result<std::unique_ptr<BufferPool>> CreatePrivate();
  void EndPrivate() { private_count_ -= kBuffersPerTransfer; }
  void AdmitPrivately();
  std::byte* TryTake();
  void Return(std::byte* buffer);
  void PutInQuarantine(std::byte* buffer, CopiesComplete complete);
  void TakeBack();
  bool has_waiting() const;
  Status NotEnough() const;

  std::byte* const memory_;
  const size_t buffer_count_;
  const size_t buffer_bytes_;
  const std::shared_ptr<void> owner_;  // keeps the memory alive; null: the pool maps it
  const uint64_t fork_generation_;
  std::once_flag pin_once_;
  std::shared_ptr<void> pinned_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::byte*> free_;
  Quarantine quarantine_;
  uint64_t next_ticket_ = 0;
  std::deque<uint64_t> waiting_;          // tickets of the transfers that wait to join, in order
  uint64_t private_until_ticket_ = 0;     // earlier tickets need not wait for buffers of the ring
  std::atomic<size_t> private_count_{0};  // buffers of private pools
};

// The buffers of one transfer. Not thread-safe: one owner. Returns everything on destruction.
class BufferShare {
 public:
  // Wait for kBuffersPerTransfer buffers; calls `poll` about every 50 ms, and its error ends the wait.
  static Result<BufferShare> Join(BufferPool& pool, const std::function<Status()>& poll);
  BufferShare(BufferShare&& other) noexcept;
  BufferShare& operator=(BufferShare&&) = delete;
  ~BufferShare();

  // Returns an unused buffer of this share, else another one of the pool, else null: put one back first.
  std::byte* Take();
  void Put(std::byte* buffer);
  // Instead of Put, if a transfer gives up and a device may still copy from or to the buffer: the pool gets it back
  // when the copies are complete. Afterwards call only Put and PutInQuarantine.
  void PutInQuarantine(std::byte* buffer, CopiesComplete complete);
  // Give back all but what the share must keep while its transfer moves nothing. REQUIRES: all buffers are unused.
  void Rest();
  // Call this now and then while the transfer waits for a device, so that joining transfers need not.
  void LetOthersJoin();

  // The pool of the buffers: the ring, or a private pool.
  BufferPool& pool() const { return private_pool_ != nullptr ? *private_pool_ : *ring_; }

 private:
  explicit BufferShare(BufferPool& ring) : ring_(&ring) {}

  // How long a transfer may make others wait for a device: longer than any single copy takes.
  static constexpr std::chrono::milliseconds kPatience{500};

  BufferPool* ring_;
  std::unique_ptr<BufferPool> private_pool_;  // null: the buffers are the ring's
  std::vector<std::byte*> unused_;
  size_t owned_count_ = 0;
  std::chrono::steady_clock::time_point moved_at_ = std::chrono::steady_clock::now();  // the last Take or Put
};

}  // namespace fastpersist
