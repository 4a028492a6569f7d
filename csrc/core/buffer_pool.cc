#include "core/buffer_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <utility>

#include "core/alignment.h"
#include "core/fork.h"
#include "core/memory.h"

namespace fastpersist {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);

}  // namespace

Result<std::unique_ptr<BufferPool>> BufferPool::Create(size_t buffer_count, size_t buffer_bytes) {
  FP_CHECK(IsAligned(buffer_bytes, kBufferAlignment));
  FP_CHECK(buffer_count >= kBuffersPerTransfer);
  const size_t size_bytes = buffer_count * buffer_bytes;
  std::byte* const memory = MapBuffers(size_bytes);
  if (memory == nullptr) {
    return Status::FromErrno(errno, "mmap", "of " + std::to_string(size_bytes) + " bytes for the ring");
  }
  return std::unique_ptr<BufferPool>(new BufferPool(memory, buffer_count, buffer_bytes, nullptr));
}

std::unique_ptr<BufferPool> BufferPool::Over(std::byte* memory, size_t buffer_count, size_t buffer_bytes,
                                             std::shared_ptr<void> owner) {
  FP_CHECK(owner != nullptr && buffer_count >= kBuffersPerTransfer);
  return std::unique_ptr<BufferPool>(new BufferPool(memory, buffer_count, buffer_bytes, std::move(owner)));
}

BufferPool::BufferPool(std::byte* memory, size_t buffer_count, size_t buffer_bytes, std::shared_ptr<void> owner)
    : memory_(memory),
      buffer_count_(buffer_count),
      buffer_bytes_(buffer_bytes),
      owner_(std::move(owner)),
      fork_generation_(ForkGeneration()) {
  free_.reserve(buffer_count);
  // Handed out from the back: the first buffer first, so that small transfers touch few pages.
  for (size_t i = buffer_count; i > 0; --i) free_.push_back(memory_ + (i - 1) * buffer_bytes_);
}

BufferPool::~BufferPool() {
  if (ForkGeneration() != fork_generation_) return;  // the mapping did not come along
  pinned_.reset();                                   // the device forgets it before it is gone
  if (owner_ != nullptr) return;
  munmap(memory_, buffer_count_ * buffer_bytes_);
}

void BufferPool::PinWith(const Pin& pin) {
  if (ForkGeneration() != fork_generation_ || owner_ != nullptr) return;
  std::call_once(pin_once_, [&] { pinned_ = pin(std::span(memory_, buffer_count_ * buffer_bytes_)); });
}

size_t BufferPool::free_count() const {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

bool BufferPool::somebody_waits() const {
  if (ForkGeneration() != fork_generation_) return false;  // the mutex may have been held while the parent forked
  const std::lock_guard lock(mutex_);
  return !waiting_.empty();
}

Status BufferPool::Join(std::vector<std::byte*>& into, const std::function<Status()>& poll) {
  std::unique_lock lock(mutex_);
  const uint64_t ticket = next_ticket_++;
  waiting_.push_back(ticket);
  const auto admitted = [&] { return waiting_.front() == ticket && free_.size() >= kBuffersPerTransfer; };
  Status stop;
  while (stop.ok() && !changed_.wait_for(lock, kPollInterval, admitted)) {
    if (!poll) continue;
    lock.unlock();
    stop = poll();
    lock.lock();
  }
  if (stop.ok()) {
    for (size_t i = 0; i < kBuffersPerTransfer; ++i) {
      into.push_back(free_.back());
      free_.pop_back();
    }
  }
  std::erase(waiting_, ticket);
  changed_.notify_all();  // somebody else may be first now
  return stop;
}

std::byte* BufferPool::TryTake() {
  const std::lock_guard lock(mutex_);
  if (free_.empty() || !waiting_.empty()) return nullptr;
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void BufferPool::Return(std::byte* buffer) {
  if (ForkGeneration() != fork_generation_) return;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
    FP_CHECK(free_.size() <= buffer_count_);
  }
  changed_.notify_all();
}

Result<BufferShare> BufferShare::Join(BufferPool& pool, const std::function<Status()>& poll) {
  BufferShare share(pool);
  FP_RETURN_IF_ERROR(pool.Join(share.idle_, poll));
  share.owned_count_ = share.idle_.size();
  return share;
}

BufferShare::BufferShare(BufferShare&& other) noexcept
    : pool_(other.pool_), idle_(std::move(other.idle_)), owned_count_(other.owned_count_) {
  other.idle_.clear();
  other.owned_count_ = 0;
}

BufferShare::~BufferShare() {
  FP_CHECK(idle_.size() == owned_count_);  // a buffer still in flight would be handed to somebody else
  for (std::byte* buffer : idle_) pool_->Return(buffer);
}

std::byte* BufferShare::Take() {
  if (idle_.empty()) {
    std::byte* buffer = pool_->TryTake();
    if (buffer != nullptr) ++owned_count_;
    return buffer;
  }
  std::byte* buffer = idle_.back();
  idle_.pop_back();
  return buffer;
}

void BufferShare::Put(std::byte* buffer) {
  if (owned_count_ > BufferPool::kBuffersPerTransfer && pool_->somebody_waits()) {
    --owned_count_;
    pool_->Return(buffer);
    return;
  }
  idle_.push_back(buffer);
}

}  // namespace fastpersist
