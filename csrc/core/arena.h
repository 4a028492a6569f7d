// The arena: host memory for captured bytes, in blocks of one size, handed out up to a limit and reused. It maps memory
// when it is first needed and keeps it mapped: if the writer finishes before the next step, a save needs no arena
// memory, and later saves map nothing new. When an arena ends, its pinned memory goes to the next one
// (core/pinned_cache.h). If a device may still write to a block when its save gives up, the block is quarantined
// (core/quarantine.h) and stops counting against the limit, so that later saves find blocks. transfer/captured_blocks
// decides what lies in the blocks.
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

// One mutex and one condition serve the arena and all snapshots that use it: one wait covers "a block came back" and
// "the writer has advanced". Threads use both once per megabyte or less.
class Arena {
 public:
  static constexpr size_t kBlockBytes = kHugePageBytes;

  // Limits the memory to limit_bytes, rounded down to whole blocks; 0 is legal and gives none.
  explicit Arena(uint64_t limit_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Raise the limit; a lower one is ignored.
  void Grow(uint64_t limit_bytes);

  // Pin the memory for a device, mapped now or later. Only the first call counts. It blocks while the device pins;
  // other threads use the arena meanwhile, also the blocks that are not pinned yet.
  void PinWith(const Pin& pin);

  // Map, touch and pin more blocks ahead of their use, until size_bytes or the limit is mapped. Returns whether another
  // call would do more. A call costs about as much as filling the blocks, so use a background thread. Other threads use
  // the arena meanwhile, and wait for these blocks if no others are free.
  bool Prepare(uint64_t size_bytes);

  // Whether a fork has separated this process from the arena: the child lacks the blocks, and a thread that the child
  // lacks may hold the mutex.
  bool forked() const;

  std::mutex& mutex() { return mutex_; }
  std::condition_variable& changed() { return changed_; }

  // REQUIRES of all functions below: mutex() is held. Take the lowest free block, so that runs stay long in whatever
  // order blocks come back. Null at the limit, or if the kernel has no memory. Releases the mutex while fresh memory is
  // pinned.
  std::byte* TryTake(std::unique_lock<std::mutex>& lock);
  // Take the block after this one if it is free and in the same mapping; else null. A device copies into a run of
  // blocks in one go if they were pinned in one piece.
  std::byte* TryTakeBehind(const std::byte* block);
  void Return(std::byte* block);
  // Instead of Return, if a device may still write to the block: it stays in quarantine until `complete` holds.
  void PutInQuarantine(std::byte* block, CopiesComplete complete);
  // Take complete blocks out of quarantine and unmap memory beyond the limit. Releases the mutex meanwhile.
  void TakeBack(std::unique_lock<std::mutex>& lock);
  // Whether a device has pinned this block.
  bool is_pinned(const std::byte* block) const;
  uint64_t quarantined_bytes() const { return quarantine_.count() * kBlockBytes; }
  uint64_t used_bytes() const { return used_count_ * kBlockBytes; }
  uint64_t mapped_bytes() const { return mapped_count_ * kBlockBytes; }

 private:
  static constexpr size_t kBlocksPerMapping = 32;  // the most blocks of a mapping
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
  bool is_mapping_ = false;  // a thread maps the next blocks
  bool is_pinning_ = false;  // a thread is in PinWith: mappings stay
  std::vector<PinnedMemory> mappings_;
  std::set<const std::byte*> mapping_starts_;
  Pin pin_;
  const uint64_t fork_generation_;
};

}  // namespace fastpersist
