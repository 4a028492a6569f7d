// Host memory for captured bytes: blocks of one size, handed out up to a limit and used again. Memory is mapped when it
// is first needed and stays mapped: a save that the writer outruns costs none, and the thousandth save maps nothing
// new. When an arena ends, its pinned memory goes to the next one (core/pinned_cache.h). A block that a device may
// still write to when its save gives up is quarantined (core/quarantine.h). It then does not count against the limit,
// so that later saves find blocks. What lies in the blocks is for transfer/snapshot to say.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "core/memory.h"
#include "core/pinned_cache.h"
#include "core/quarantine.h"

namespace fastpersist {

// One mutex and one condition serve the arena and all snapshots that use it, so that one wait covers "a block came
// back" and "the writer has passed". Both are touched once per megabyte or less.
class Arena {
 public:
  static constexpr size_t kBlockBytes = kHugePageBytes;

  // At most limit_bytes, rounded down to whole blocks; 0 is legal and gives none.
  explicit Arena(uint64_t limit_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Raise the limit; a lower one is ignored.
  void Grow(uint64_t limit_bytes);

  // Pin the memory for a device: what is mapped, and what will be. Only the first call counts. It takes as long as the
  // device takes; others use the arena meanwhile, also the blocks that are not pinned yet.
  void PinWith(const Pin& pin);

  // Map, touch and pin some more blocks ahead of their use, until size_bytes or the limit is mapped. Returns whether
  // another call would do more. It costs about as much as filling the blocks, so it is for a background thread. Others
  // use the arena meanwhile, and wait for these blocks where there are no others.
  bool Prepare(uint64_t size_bytes);

  // This process was forked from the one that made the arena: its blocks did not come along, and its mutex may have
  // been held by a thread that did not.
  bool forked() const;

  std::mutex& mutex() { return mutex_; }
  std::condition_variable& changed() { return changed_; }

  // REQUIRES of what follows: mutex() is held.
  // A block, or nullptr at the limit or where the kernel has no memory. It is the lowest free one, so that runs are
  // long in whatever order blocks came back. The mutex is released while fresh memory is pinned.
  std::byte* TryTake(std::unique_lock<std::mutex>& lock);
  // The block behind this one, if it is free and of the same mapping; else nullptr. For runs of blocks in one piece: a
  // device copies into what was pinned in one piece.
  std::byte* TryTakeBehind(const std::byte* block);
  void Return(std::byte* block);
  // Instead of Return: a device may still write to the block, until its copies are complete.
  void PutInQuarantine(std::byte* block, CopiesComplete complete);
  // Take complete blocks out of quarantine, and unmap what is beyond the limit. The mutex is released meanwhile.
  void TakeBack(std::unique_lock<std::mutex>& lock);
  // Whether a device knows this block.
  bool is_pinned(const std::byte* block) const;
  uint64_t quarantined_bytes() const { return quarantine_.count() * kBlockBytes; }
  uint64_t used_bytes() const { return used_count_ * kBlockBytes; }
  uint64_t mapped_bytes() const { return mapped_count_ * kBlockBytes; }

 private:
  static constexpr size_t kBlocksPerMapping = 32;  // at most
  bool Map(std::unique_lock<std::mutex>& lock, bool ahead);
  PinnedMemory NextMapping() const;
  void Add(PinnedMemory mapping);
  std::vector<PinnedMemory> TakeSurplus();

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t limit_count_;
  uint64_t used_count_ = 0;
  uint64_t mapped_count_ = 0;
  std::set<std::byte*> free_;
  Quarantine quarantine_;
  bool is_mapping_ = false;  // a thread is at work on the next blocks
  bool is_pinning_ = false;  // a thread is in PinWith: what is mapped stays
  std::vector<PinnedMemory> mappings_;
  std::set<const std::byte*> mapping_starts_;
  Pin pin_;
  const uint64_t fork_generation_;
};

}  // namespace fastpersist
