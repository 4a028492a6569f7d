#include "core/arena.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "core/fork.h"
#include "core/memory.h"
#include "core/status.h"

namespace fastpersist {

Arena::Arena(uint64_t limit_bytes) : limit_count_(limit_bytes / kBlockBytes), fork_generation_(ForkGeneration()) {}

Arena::~Arena() {
  if (forked()) return;
  FP_CHECK(used_count_ == 0);
  std::unique_lock lock(mutex_);
  TakeBack(lock);
  for (PinnedMemory& mapping : mappings_) {
    const std::span memory(mapping.memory, mapping.size_bytes);
    if (mapping.pinned != nullptr && !quarantine_.Touches(memory)) {
      PutInPinnedCache(std::move(mapping));
    } else {
      quarantine_.Outlive(memory, [ended = std::move(mapping)]() mutable { Unmap(std::move(ended)); });
    }
  }
}

bool Arena::forked() const { return ForkGeneration() != fork_generation_; }

void Arena::Grow(uint64_t limit_bytes) {
  const std::lock_guard lock(mutex_);
  limit_count_ = std::max(limit_count_, limit_bytes / kBlockBytes);
  changed_.notify_all();
}

// Map and pin the next blocks. Pinning takes longer than filling: other threads take and return blocks meanwhile, or
// wait for these. `ahead`: also allocate and clear pages that are not pinned. Returns false if the kernel has no
// memory. REQUIRES: !is_mapping_.
bool Arena::Map(std::unique_lock<std::mutex>& lock, bool ahead) {
  PinnedMemory mapping = NextMapping();
  if (mapping.memory == nullptr) return false;
  const Pin pin = pin_;
  if (mapping.pinned == nullptr && (pin || ahead)) {
    is_mapping_ = true;
    lock.unlock();
    const std::span memory(mapping.memory, mapping.size_bytes);
    if (pin) {
      mapping.pinned = pin(memory);
    } else {
      Populate(memory);
    }
    lock.lock();
    is_mapping_ = false;
    changed_.notify_all();
    if (mapped_count_ + mapping.size_bytes / kBlockBytes > limit_count_) {  // blocks came back out of quarantine
      lock.unlock();
      Unmap(std::move(mapping));
      lock.lock();
      return true;
    }
  }
  Add(std::move(mapping));
  return true;
}

// Returns a mapping of the pinned cache, which may exceed the limit; else a fresh one, of kBlocksPerMapping blocks or
// up to the limit. Its memory is null if the kernel has none. REQUIRES: less than the limit is mapped.
PinnedMemory Arena::NextMapping() const {
  const size_t size_bytes = std::min<size_t>(kBlocksPerMapping, limit_count_ - mapped_count_) * kBlockBytes;
  PinnedMemory cached = TakeFromPinnedCache(size_bytes);
  if (cached.memory != nullptr) return cached;
  return {.memory = MapBuffers(size_bytes), .size_bytes = size_bytes};
}

void Arena::Add(PinnedMemory mapping) {
  const size_t block_count = mapping.size_bytes / kBlockBytes;
  for (size_t i = 0; i < block_count; ++i) free_.insert(mapping.memory + i * kBlockBytes);
  mapping_starts_.insert(mapping.memory);
  mappings_.push_back(std::move(mapping));
  mapped_count_ += block_count;
}

// Pins the mappings that exist now, while other threads take and return their blocks. Map pins later ones first.
void Arena::PinWith(const Pin& pin) {
  std::unique_lock lock(mutex_);
  if (pin_) return;
  pin_ = pin;
  is_pinning_ = true;
  const size_t count = mappings_.size();
  for (size_t index = 0; index < count; ++index) {  // other threads append mappings
    if (mappings_[index].pinned != nullptr) continue;
    const std::span memory(mappings_[index].memory, mappings_[index].size_bytes);
    lock.unlock();
    std::shared_ptr<void> pinned = pin(memory);
    lock.lock();
    mappings_[index].pinned = std::move(pinned);
  }
  is_pinning_ = false;
}

bool Arena::Prepare(uint64_t size_bytes) {
  std::unique_lock lock(mutex_);
  const auto enough = [&] { return mapped_count_ >= limit_count_ || mapped_count_ * kBlockBytes >= size_bytes; };
  while (is_mapping_ && !enough()) changed_.wait(lock);
  if (enough() || !Map(lock, /*ahead=*/true)) return false;
  changed_.notify_all();
  return !enough();
}

std::byte* Arena::TryTake(std::unique_lock<std::mutex>& lock) {
  while (used_count_ < limit_count_ && free_.empty()) {
    if (is_mapping_) {
      changed_.wait(lock);
    } else if (!Map(lock, /*ahead=*/false)) {
      return nullptr;
    }
  }
  if (used_count_ >= limit_count_) return nullptr;
  std::byte* block = *free_.begin();
  free_.erase(free_.begin());
  ++used_count_;
  return block;
}

std::byte* Arena::TryTakeBehind(const std::byte* block) {
  const auto behind = free_.upper_bound(const_cast<std::byte*>(block));
  if (used_count_ >= limit_count_ || behind == free_.end() || *behind != block + kBlockBytes) return nullptr;
  if (mapping_starts_.contains(*behind)) return nullptr;
  std::byte* taken = *behind;
  free_.erase(behind);
  ++used_count_;
  return taken;
}

void Arena::Return(std::byte* block) {
  FP_CHECK(used_count_ > 0);
  --used_count_;
  free_.insert(block);
}

bool Arena::is_pinned(const std::byte* block) const {
  return std::any_of(mappings_.begin(), mappings_.end(), [block](const PinnedMemory& mapping) {
    return mapping.pinned != nullptr && IsInside({mapping.memory, mapping.size_bytes}, block);
  });
}

void Arena::PutInQuarantine(std::byte* block, CopiesComplete complete) {
  FP_CHECK(used_count_ > 0);
  --used_count_;
  --mapped_count_;  // so that another may be mapped
  quarantine_.Add(block, std::move(complete));
}

void Arena::TakeBack(std::unique_lock<std::mutex>& lock) {
  if (quarantine_.count() == 0) return;
  lock.unlock();
  const std::vector<std::byte*> complete = quarantine_.TakeComplete();
  lock.lock();
  free_.insert(complete.begin(), complete.end());
  mapped_count_ += complete.size();
  std::vector<PinnedMemory> surplus = TakeSurplus();
  changed_.notify_all();
  lock.unlock();
  for (PinnedMemory& mapping : surplus) Unmap(std::move(mapping));
  lock.lock();
}

// Take out unused mappings as long as the limit stays mapped without them.
std::vector<PinnedMemory> Arena::TakeSurplus() {
  std::vector<PinnedMemory> surplus;
  for (size_t index = 0; !is_pinning_ && index < mappings_.size() && mapped_count_ > limit_count_;) {
    const PinnedMemory& mapping = mappings_[index];
    const size_t block_count = mapping.size_bytes / kBlockBytes;
    const auto first = free_.lower_bound(mapping.memory);
    const auto end = free_.lower_bound(mapping.memory + mapping.size_bytes);
    if (static_cast<size_t>(std::distance(first, end)) < block_count || mapped_count_ - block_count < limit_count_) {
      ++index;
      continue;
    }
    free_.erase(first, end);
    mapped_count_ -= block_count;
    mapping_starts_.erase(mapping.memory);
    surplus.push_back(std::move(mappings_[index]));
    mappings_.erase(mappings_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  return surplus;
}

}  // namespace fastpersist
