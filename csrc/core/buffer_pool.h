// The ring: a fixed number of aligned buffers of one size, allocated once, shared by every transfer of the process.
// It does not grow, so host memory is bounded, and waiting for a buffer is the back-pressure of a transfer.
//
// What a device holds up. Buffers into or out of which a device still copies when their transfer gives up go to limbo:
// nobody gets them before the device has ended. The pool maps stand-ins for them, so that it keeps its count, and for
// those who want to join while a transfer stands still behind a device; stand-ins are unmapped when they are too many.
// They are not pinned: to pin memory may wait for the very device. So the pool has at most twice its count of live
// buffers; what is in limbo is bounded by the devices, which take no copies while they hold some up (device/device.h).
//
// The sharing rule. A transfer joins with at least kBuffersPerTransfer buffers of its own before it moves a byte and
// keeps them until it leaves; so no transfer ever waits for another while holding what the other needs, and no two can
// deadlock. It may take more while nobody waits to join, and gives those back as soon as somebody does. Transfers join
// in the order they came.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
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
  // In limbo: not free, and no transfer's.
  size_t stranded_count() const;

  // Let a device know the ring's memory. The first call counts, for as long as the pool lives; later ones do nothing.
  void PinWith(const Pin& pin);
  // After PinWith: whether a device knows this buffer. It knows no stand-in.
  bool is_pinned(const std::byte* buffer) const;

 private:
  friend class BufferShare;
  BufferPool(std::byte* memory, size_t buffer_count, size_t buffer_bytes, std::shared_ptr<void> owner);

  Status Join(std::vector<std::byte*>& into, const std::function<Status()>& poll);
  std::byte* TryTake();
  void Return(std::byte* buffer);
  void Strand(std::byte* buffer, Landed landed);
  void TakeBack();
  void StandIn();
  bool AddStandIn(std::unique_lock<std::mutex>& lock);
  std::vector<std::byte*> TakeSurplus();
  void Unmap(const std::vector<std::byte*>& buffers) const;
  bool somebody_waits() const;
  Status NotEnough() const;

  std::byte* const memory_;
  const size_t buffer_count_;
  const size_t buffer_bytes_;
  const std::shared_ptr<void> owner_;  // of the memory; null: it is ours
  const uint64_t fork_generation_;
  std::once_flag pin_once_;
  std::shared_ptr<void> pinned_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  struct Stranded {
    std::byte* buffer;
    Landed landed;
  };
  std::vector<std::byte*> free_;
  size_t live_count_;               // free, or a transfer's; buffer_count_ as a rule
  std::set<std::byte*> stand_ins_;  // each a mapping of its own
  std::vector<Stranded> stranded_;  // but those that TakeBack looks at
  size_t stranded_count_ = 0;
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
  // Instead of Put, by who gives up: a device may still copy to or from the buffer, which comes back to the pool when
  // it has landed. The share must not be used for anything but Put and Strand then.
  void Strand(std::byte* buffer, Landed landed);
  // For who will move nothing for a while: keep no more than a transfer needs. REQUIRES: all buffers are idle.
  void Rest();
  // For who waits for a device, now and then: let those who want to join not wait for the device, too.
  void LetOthersJoin();

  BufferPool& pool() const { return *pool_; }

 private:
  explicit BufferShare(BufferPool& pool) : pool_(&pool) {}

  // How long a transfer makes others wait for a device: longer than any copy of its own takes.
  static constexpr std::chrono::milliseconds kPatience{500};

  BufferPool* pool_;
  std::vector<std::byte*> idle_;
  size_t owned_count_ = 0;
  std::chrono::steady_clock::time_point moved_at_ = std::chrono::steady_clock::now();  // a buffer, the last time
};

}  // namespace fastpersist
