// Host memory for captured bytes: blocks of one size, handed out up to a limit and used again. Memory is mapped when it
// is first needed and kept, so a save that the writer outruns costs none, and the thousandth save maps nothing new.
// What is pinned of it goes to the next arena (core/pinned_cache.h). Blocks to which a device still copies when their
// save gives up are in limbo: nobody's, and not part of the limit, so that later saves have room, until the device has
// ended; devices see to it that this does not go on (device/device.h). What lies in the blocks is transfer/snapshot's
// affair.
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

  // Let a device know the memory: all that is mapped, and what will be. The first call counts. It takes as long as the
  // device does; others use the arena meanwhile, also the blocks that are not pinned yet.
  void PinWith(const Pin& pin);

  // Map, touch and pin some more blocks ahead of their use, unless this much is there, within the limit. Returns
  // whether another call would do more. For a thread that has time, since it costs about as much as filling them;
  // others use the arena meanwhile, and wait for these blocks where there are no others.
  bool Prepare(uint64_t size_bytes);

  // This process was forked from the one that made the arena: its blocks did not come along, and its mutex may have
  // been held by a thread that did not.
  bool forked() const;

  std::mutex& mutex() { return mutex_; }
  std::condition_variable& changed() { return changed_; }

  // REQUIRES of what follows: mutex() is held.
  // A block, or nullptr: at the limit, or the kernel has no memory. Of those that are free the lowest, so that runs are
  // long however the blocks came back. The mutex is let go of while fresh memory is pinned.
  std::byte* TryTake(std::unique_lock<std::mutex>& lock);
  // The block behind this one, if it is free and of the same mapping; else nullptr. For runs of blocks in one piece: a
  // device copies into what was pinned in one piece.
  std::byte* TryTakeBehind(const std::byte* block);
  void Return(std::byte* block);
  // Instead of Return: a device may still copy to the block, which comes back when it has landed.
  void Strand(std::byte* block, Landed landed);
  // Take back what has landed, and let go of mappings beyond the limit; the mutex is let go of meanwhile.
  void TakeBack(std::unique_lock<std::mutex>& lock);
  // Whether a device knows this block.
  bool is_pinned(const std::byte* block) const;
  uint64_t stranded_bytes() const { return stranded_count_ * kBlockBytes; }
  uint64_t used_bytes() const { return used_count_ * kBlockBytes; }
  uint64_t mapped_bytes() const { return mapped_count_ * kBlockBytes; }

 private:
  static constexpr size_t kBlocksPerMapping = 32;  // at most
  bool Map(std::unique_lock<std::mutex>& lock, bool ahead);
  PinnedMemory NextMapping() const;
  void Add(PinnedMemory mapping);
  static bool Holds(const PinnedMemory& mapping, const std::byte* block);
  std::vector<PinnedMemory> TakeSurplus();
  struct Stranded {
    std::byte* block;
    Landed landed;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t limit_count_;
  uint64_t used_count_ = 0;
  uint64_t mapped_count_ = 0;
  std::set<std::byte*> free_;
  std::vector<Stranded> stranded_;  // but those that TakeBack looks at
  uint64_t stranded_count_ = 0;
  bool is_mapping_ = false;  // a thread is at work on the next blocks
  bool is_pinning_ = false;  // a thread is in PinWith: what is mapped stays
  std::vector<PinnedMemory> mappings_;
  std::set<const std::byte*> mapping_starts_;
  Pin pin_;
  const uint64_t fork_generation_;
};

}  // namespace fastpersist
