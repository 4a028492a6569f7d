#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>

#include "core/fork.h"
#include "core/memory.h"
#include "core/status.h"

namespace fastpersist {

Arena::Arena(uint64_t limit_bytes) : limit_count_(limit_bytes / kBlockBytes), fork_generation_(ForkGeneration()) {}

Arena::~Arena() {
  if (forked()) return;
  FP_CHECK(used_count_ == 0);
  for (Mapping& mapping : mappings_) {
    mapping.pinned.reset();  // the device forgets it before it is gone
    munmap(mapping.memory, mapping.size_bytes);
  }
}

bool Arena::forked() const { return ForkGeneration() != fork_generation_; }

void Arena::Grow(uint64_t limit_bytes) {
  const std::lock_guard lock(mutex_);
  limit_count_ = std::max(limit_count_, limit_bytes / kBlockBytes);
  changed_.notify_all();
}

bool Arena::Map() {
  Mapping mapping = NextMapping();
  if (mapping.memory == nullptr) return false;
  if (pin_) mapping.pinned = pin_(std::span(mapping.memory, mapping.size_bytes));
  Add(std::move(mapping));
  return true;
}

// As much as is mapped at a time, but no more than the limit; its memory is null where there is none.
// REQUIRES: less than the limit is mapped.
Arena::Mapping Arena::NextMapping() const {
  const size_t size_bytes = std::min<size_t>(kBlocksPerMapping, limit_count_ - mapped_count_) * kBlockBytes;
  return {.memory = MapBuffers(size_bytes), .size_bytes = size_bytes, .pinned = nullptr};
}

void Arena::Add(Mapping mapping) {
  const size_t block_count = mapping.size_bytes / kBlockBytes;
  for (size_t i = 0; i < block_count; ++i) free_.insert(mapping.memory + i * kBlockBytes);
  mapping_starts_.insert(mapping.memory);
  mappings_.push_back(std::move(mapping));
  mapped_count_ += block_count;
}

void Arena::PinWith(const Pin& pin) {
  const std::lock_guard lock(mutex_);
  if (pin_) return;
  pin_ = pin;
  for (Mapping& mapping : mappings_) mapping.pinned = pin_(std::span(mapping.memory, mapping.size_bytes));
}

bool Arena::Prepare(uint64_t size_bytes) {
  std::unique_lock lock(mutex_);
  const auto enough = [&] { return mapped_count_ >= limit_count_ || mapped_count_ * kBlockBytes >= size_bytes; };
  if (enough()) return false;
  const Pin pin = pin_;
  Mapping mapping = NextMapping();
  if (mapping.memory == nullptr) return false;
  lock.unlock();
  const std::span memory(mapping.memory, mapping.size_bytes);
  if (pin) {
    mapping.pinned = pin(memory);  // finds and clears the pages, too
  } else {
    Populate(memory);
  }
  lock.lock();
  if (enough()) {  // somebody who could not wait has mapped it
    mapping.pinned.reset();
    munmap(mapping.memory, mapping.size_bytes);
    return false;
  }
  Add(std::move(mapping));
  changed_.notify_all();
  return !enough();
}

std::byte* Arena::TryTake() {
  if (used_count_ >= limit_count_) return nullptr;
  if (free_.empty() && !Map()) return nullptr;
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

}  // namespace fastpersist
