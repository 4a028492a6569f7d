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
  for (std::byte* mapping : mappings_) munmap(mapping, kBlocksPerMapping * kBlockBytes);
}

bool Arena::forked() const { return ForkGeneration() != fork_generation_; }

void Arena::Grow(uint64_t limit_bytes) {
  const std::lock_guard lock(mutex_);
  limit_count_ = std::max(limit_count_, limit_bytes / kBlockBytes);
  changed_.notify_all();
}

bool Arena::Map() {
  std::byte* const memory = MapBuffers(kBlocksPerMapping * kBlockBytes);
  if (memory == nullptr) return false;
  mappings_.push_back(memory);
  // Handed out from the back.
  for (size_t i = kBlocksPerMapping; i > 0; --i) free_.push_back(memory + (i - 1) * kBlockBytes);
  mapped_count_ += kBlocksPerMapping;
  return true;
}

std::byte* Arena::TryTake() {
  if (used_count_ >= limit_count_) return nullptr;
  if (free_.empty() && !Map()) return nullptr;
  std::byte* block = free_.back();
  free_.pop_back();
  ++used_count_;
  return block;
}

void Arena::Return(std::byte* block) {
  FP_CHECK(used_count_ > 0);
  --used_count_;
  free_.push_back(block);
}

}  // namespace fastpersist
