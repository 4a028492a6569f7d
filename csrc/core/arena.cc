#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>

#include "core/alignment.h"
#include "core/fork.h"
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

// One more mapping, on a huge-page boundary.
bool Arena::Map() {
  constexpr size_t kMappingBytes = kBlocksPerMapping * kBlockBytes;
  void* mapped = mmap(nullptr, kMappingBytes + kBlockBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const auto aligned = static_cast<uintptr_t>(AlignUp(start, kBlockBytes));
  if (aligned > start) munmap(mapped, aligned - start);
  if (aligned < start + kBlockBytes)
    munmap(reinterpret_cast<void*>(aligned + kMappingBytes), start + kBlockBytes - aligned);
  auto* memory = reinterpret_cast<std::byte*>(aligned);
  // Advice: without huge pages the first copy meets 512 faults per block instead of one; a forked child has no use of
  // captured bytes.
  madvise(memory, kMappingBytes, MADV_HUGEPAGE);
  madvise(memory, kMappingBytes, MADV_DONTFORK);
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
