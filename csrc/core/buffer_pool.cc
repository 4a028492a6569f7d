#include "core/buffer_pool.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "core/alignment.h"
#include "core/fork.h"
#include "core/limbo.h"
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
      fork_generation_(ForkGeneration()),
      live_count_(buffer_count) {
  free_.reserve(buffer_count);
  // Handed out from the back: the first buffer first, so that small transfers touch few pages.
  for (size_t i = buffer_count; i > 0; --i) free_.push_back(memory_ + (i - 1) * buffer_bytes_);
}

BufferPool::~BufferPool() {
  if (ForkGeneration() != fork_generation_) return;  // the mapping did not come along
  TakeBack();
  std::vector<Landed> landed;
  landed.reserve(stranded_.size());
  for (Stranded& stranded : stranded_) landed.push_back(std::move(stranded.landed));
  auto release = [memory = memory_, size_bytes = buffer_count_ * buffer_bytes_, owner = owner_, pinned = pinned_,
                  stand_ins = stand_ins_, stand_in_bytes = buffer_bytes_]() mutable {
    pinned.reset();  // the device forgets it before it is gone
    if (owner == nullptr) UnmapBuffers(memory, size_bytes);
    for (std::byte* buffer : stand_ins) UnmapBuffers(buffer, stand_in_bytes);
    owner.reset();
  };
  pinned_.reset();
  if (landed.empty()) {
    release();
  } else {
    LeaveInLimbo(std::move(landed), std::move(release));
  }
}

void BufferPool::PinWith(const Pin& pin) {
  if (ForkGeneration() != fork_generation_ || owner_ != nullptr) return;
  std::call_once(pin_once_, [&] { pinned_ = pin(std::span(memory_, buffer_count_ * buffer_bytes_)); });
}

bool BufferPool::is_pinned(const std::byte* buffer) const {
  return pinned_ != nullptr && std::less_equal<>()(memory_, buffer) &&
         std::less<>()(buffer, memory_ + buffer_count_ * buffer_bytes_);
}

size_t BufferPool::free_count() const {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

size_t BufferPool::stranded_count() const {
  const std::lock_guard lock(mutex_);
  return stranded_count_;
}

bool BufferPool::somebody_waits() const {
  if (ForkGeneration() != fork_generation_) return false;  // the mutex may have been held while the parent forked
  const std::lock_guard lock(mutex_);
  return !waiting_.empty();
}

Status BufferPool::Join(std::vector<std::byte*>& into, const std::function<Status()>& poll) {
  ReleaseFromLimbo();
  TakeBack();
  std::unique_lock lock(mutex_);
  const uint64_t ticket = next_ticket_++;
  waiting_.push_back(ticket);
  const auto admitted = [&] { return waiting_.front() == ticket && free_.size() >= kBuffersPerTransfer; };
  Status stop;
  while (stop.ok() && !changed_.wait_for(lock, kPollInterval, admitted)) {
    if (live_count_ < kBuffersPerTransfer && !AddStandIn(lock)) stop = NotEnough();
    lock.unlock();
    TakeBack();
    if (poll && stop.ok()) stop = poll();
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
  std::vector<std::byte*> surplus;
  bool some_are_stranded = false;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
    FP_CHECK(free_.size() <= live_count_);
    surplus = TakeSurplus();
    some_are_stranded = !stranded_.empty();
  }
  changed_.notify_all();
  Unmap(surplus);
  if (some_are_stranded) TakeBack();
}

void BufferPool::Strand(std::byte* buffer, Landed landed) {
  if (ForkGeneration() != fork_generation_) return;
  {
    std::unique_lock lock(mutex_);
    stranded_.push_back({buffer, std::move(landed)});
    ++stranded_count_;
    --live_count_;
    if (live_count_ < buffer_count_) (void)AddStandIn(lock);  // without: those who join try again
  }
  changed_.notify_all();
}

// Take the buffers back out of limbo that have landed. What they held is let go of without the mutex.
void BufferPool::TakeBack() {
  std::vector<Stranded> looked_at;
  {
    const std::lock_guard lock(mutex_);
    looked_at.swap(stranded_);
  }
  if (looked_at.empty()) return;
  std::vector<Stranded> kept;
  std::vector<std::byte*> landed;
  for (Stranded& stranded : looked_at) {
    if (stranded.landed()) {
      landed.push_back(stranded.buffer);
      stranded.landed = nullptr;
    } else {
      kept.push_back(std::move(stranded));
    }
  }
  std::vector<std::byte*> surplus;
  {
    const std::lock_guard lock(mutex_);
    for (Stranded& stranded : kept) stranded_.push_back(std::move(stranded));
    free_.insert(free_.end(), landed.begin(), landed.end());
    stranded_count_ -= landed.size();
    live_count_ += landed.size();
    surplus = TakeSurplus();
  }
  changed_.notify_all();
  Unmap(surplus);
}

// Two more for who waits to join, since those of the ring stand still.
void BufferPool::StandIn() {
  if (ForkGeneration() != fork_generation_) return;
  {
    std::unique_lock lock(mutex_);
    if (waiting_.empty()) return;
    while (free_.size() < kBuffersPerTransfer && live_count_ < 2 * buffer_count_ && AddStandIn(lock)) continue;
  }
  changed_.notify_all();
}

// False: there is no memory, or there cannot be any, since the ring's is a device's.
bool BufferPool::AddStandIn(std::unique_lock<std::mutex>& lock) {
  FP_CHECK(lock.owns_lock());
  std::byte* const buffer = owner_ == nullptr ? MapBuffers(buffer_bytes_) : nullptr;
  if (buffer == nullptr) return false;
  stand_ins_.insert(buffer);
  free_.push_back(buffer);
  ++live_count_;
  return true;
}

// The free stand-ins that nobody needs any more, which are the pool's no longer. REQUIRES: the mutex is held.
std::vector<std::byte*> BufferPool::TakeSurplus() {
  std::vector<std::byte*> surplus;
  while (live_count_ > buffer_count_ && waiting_.empty()) {
    const auto found =
        std::find_if(free_.begin(), free_.end(), [this](std::byte* one) { return stand_ins_.contains(one); });
    if (found == free_.end()) break;
    surplus.push_back(*found);
    stand_ins_.erase(*found);
    free_.erase(found);
    --live_count_;
  }
  return surplus;
}

void BufferPool::Unmap(const std::vector<std::byte*>& buffers) const {
  for (std::byte* buffer : buffers) UnmapBuffers(buffer, buffer_bytes_);
}

Status BufferPool::NotEnough() const {
  return Status::Error(owner_ == nullptr ? StatusCode::kNoMemory : StatusCode::kDeviceError,
                       std::to_string(stranded_count_) + " of the ring's " + std::to_string(buffer_count_) +
                           " buffers wait for a device that does not end its copies, and there is no memory for " +
                           "others: end what the device's streams wait for, or start a new process");
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
    if (buffer != nullptr) moved_at_ = std::chrono::steady_clock::now();
    return buffer;
  }
  moved_at_ = std::chrono::steady_clock::now();
  std::byte* buffer = idle_.back();
  idle_.pop_back();
  return buffer;
}

void BufferShare::Put(std::byte* buffer) {
  moved_at_ = std::chrono::steady_clock::now();
  if (owned_count_ > BufferPool::kBuffersPerTransfer && pool_->somebody_waits()) {
    --owned_count_;
    pool_->Return(buffer);
    return;
  }
  idle_.push_back(buffer);
}

void BufferShare::Strand(std::byte* buffer, Landed landed) {
  FP_CHECK(owned_count_ > 0);
  --owned_count_;
  pool_->Strand(buffer, std::move(landed));
}

void BufferShare::Rest() {
  FP_CHECK(idle_.size() == owned_count_);
  for (; owned_count_ > BufferPool::kBuffersPerTransfer; --owned_count_) {
    pool_->Return(idle_.back());
    idle_.pop_back();
  }
}

void BufferShare::LetOthersJoin() {
  if (std::chrono::steady_clock::now() - moved_at_ < kPatience) return;
  if (pool_->somebody_waits()) pool_->StandIn();
}

}  // namespace fastpersist
