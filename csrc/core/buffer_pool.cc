#include "core/buffer_pool.h"

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
  if (ForkGeneration() != fork_generation_) return;  // this process does not have the mapping
  TakeBack();
  const std::span memory(memory_, buffer_count_ * buffer_bytes_);
  quarantine_.Outlive(memory, [memory, owner = owner_, pinned = std::move(pinned_)]() mutable {
    pinned.reset();  // unpin before unmapping
    if (owner == nullptr) UnmapBuffers(memory.data(), memory.size());
    owner.reset();
  });
}

void BufferPool::PinWith(const Pin& pin) {
  if (ForkGeneration() != fork_generation_ || owner_ != nullptr) return;
  std::call_once(pin_once_, [&] { pinned_ = pin(std::span(memory_, buffer_count_ * buffer_bytes_)); });
}

bool BufferPool::is_pinned(const std::byte* buffer) const {
  return pinned_ != nullptr && IsInside({memory_, buffer_count_ * buffer_bytes_}, buffer);
}

size_t BufferPool::free_count() {
  TakeBack();
  const std::lock_guard lock(mutex_);
  return free_.size();
}

bool BufferPool::has_waiting() const {
  if (ForkGeneration() != fork_generation_) return false;  // the parent may have forked while the mutex was held
  const std::lock_guard lock(mutex_);
  return !waiting_.empty();
}

// Join the ring. kPrivate: devices hold up too many buffers, and `into` gets none.
Result<BufferPool::Admission> BufferPool::Join(std::vector<std::byte*>& into, const std::function<Status()>& poll) {
  ReleaseComplete();
  TakeBack();
  std::unique_lock lock(mutex_);
  const uint64_t ticket = next_ticket_++;
  waiting_.push_back(ticket);
  const auto has_buffers = [&] { return waiting_.front() == ticket && free_.size() >= kBuffersPerTransfer; };
  const auto has_too_few = [&] { return buffer_count_ - quarantine_.count() < kBuffersPerTransfer; };
  const auto may_be_private = [&] {
    return owner_ == nullptr && (ticket < private_until_ticket_ || has_too_few()) &&
           private_count_ + kBuffersPerTransfer <= buffer_count_;
  };
  Status stop;
  while (stop.ok() && !changed_.wait_for(lock, kPollInterval, [&] { return has_buffers() || may_be_private(); })) {
    lock.unlock();
    TakeBack();
    if (poll) stop = poll();
    lock.lock();
    if (stop.ok() && owner_ != nullptr && has_too_few()) stop = NotEnough();
  }
  const Admission admission = has_buffers() ? Admission::kShared : Admission::kPrivate;
  if (stop.ok() && admission == Admission::kPrivate) private_count_ += kBuffersPerTransfer;
  for (size_t i = 0; stop.ok() && admission == Admission::kShared && i < kBuffersPerTransfer; ++i) {
    into.push_back(free_.back());
    free_.pop_back();
  }
  std::erase(waiting_, ticket);
  changed_.notify_all();  // another transfer may be first now
  if (!stop.ok()) return stop;
  return admission;
}

// Create the pool for a transfer for which Join returned kPrivate.
Result<std::unique_ptr<BufferPool>> BufferPool::CreatePrivate() {
  Result<std::unique_ptr<BufferPool>> created = Create(kBuffersPerTransfer, buffer_bytes_);
  if (!created.ok()) {
    EndPrivate();
    return NotEnough();
  }
  std::call_once(created.value()->pin_once_, [] {});  // it must not be pinned
  return created;
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
  TakeBack();
}

void BufferPool::PutInQuarantine(std::byte* buffer, CopiesComplete complete) {
  if (ForkGeneration() != fork_generation_) return;
  quarantine_.Add(buffer, std::move(complete));
  changed_.notify_all();
}

void BufferPool::TakeBack() {
  const std::vector<std::byte*> complete = quarantine_.TakeComplete();
  if (complete.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    free_.insert(free_.end(), complete.begin(), complete.end());
  }
  changed_.notify_all();
}

// The owners of the buffers wait for a device: give private buffers to all transfers that wait now.
void BufferPool::AdmitPrivately() {
  if (ForkGeneration() != fork_generation_) return;
  {
    const std::lock_guard lock(mutex_);
    if (!waiting_.empty()) private_until_ticket_ = next_ticket_;
  }
  changed_.notify_all();
}

Status BufferPool::NotEnough() const {
  return Status::Error(owner_ == nullptr ? StatusCode::kNoMemory : StatusCode::kDeviceError,
                       std::to_string(quarantined_count()) + " of the ring's " + std::to_string(buffer_count_) +
                           " buffers wait for a device that does not complete its copies, and there is no memory for " +
                           "others: end what the device's streams wait for, or start a new process");
}

Result<BufferShare> BufferShare::Join(BufferPool& ring, const std::function<Status()>& poll) {
  BufferShare share(ring);
  Result<BufferPool::Admission> admission = ring.Join(share.unused_, poll);
  if (!admission.ok()) return admission.status();
  if (admission.value() == BufferPool::Admission::kPrivate) {
    Result<std::unique_ptr<BufferPool>> created = ring.CreatePrivate();
    if (!created.ok()) return created.status();
    share.private_pool_ = std::move(created).value();
    FP_RETURN_IF_ERROR(share.private_pool_->Join(share.unused_, {}).status());
  }
  share.owned_count_ = share.unused_.size();
  return share;
}

BufferShare::BufferShare(BufferShare&& other) noexcept
    : ring_(other.ring_),
      private_pool_(std::move(other.private_pool_)),
      unused_(std::move(other.unused_)),
      owned_count_(std::exchange(other.owned_count_, 0)) {
  other.unused_.clear();
}

BufferShare::~BufferShare() {
  FP_CHECK(unused_.size() == owned_count_);  // a buffer in flight must not go to another transfer
  for (std::byte* buffer : unused_) pool().Return(buffer);
  if (private_pool_ != nullptr) ring_->EndPrivate();
}

std::byte* BufferShare::Take() {
  if (unused_.empty()) {
    std::byte* const buffer = pool().TryTake();
    if (buffer == nullptr) return nullptr;
    ++owned_count_;
    unused_.push_back(buffer);
  }
  moved_at_ = std::chrono::steady_clock::now();
  std::byte* const buffer = unused_.back();
  unused_.pop_back();
  return buffer;
}

void BufferShare::Put(std::byte* buffer) {
  moved_at_ = std::chrono::steady_clock::now();
  if (owned_count_ > BufferPool::kBuffersPerTransfer && ring_->has_waiting()) {
    --owned_count_;
    ring_->Return(buffer);
    return;
  }
  unused_.push_back(buffer);
}

void BufferShare::PutInQuarantine(std::byte* buffer, CopiesComplete complete) {
  FP_CHECK(owned_count_ > 0);
  --owned_count_;
  pool().PutInQuarantine(buffer, std::move(complete));
}

void BufferShare::Rest() {
  FP_CHECK(unused_.size() == owned_count_);
  for (; owned_count_ > BufferPool::kBuffersPerTransfer; --owned_count_) {
    ring_->Return(unused_.back());
    unused_.pop_back();
  }
}

void BufferShare::LetOthersJoin() {
  if (std::chrono::steady_clock::now() - moved_at_ < kPatience) return;
  if (ring_->has_waiting()) ring_->AdmitPrivately();
}

}  // namespace fastpersist
