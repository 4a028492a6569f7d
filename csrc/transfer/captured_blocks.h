// Keeps the arena's blocks that hold captured bytes: which block is being filled, where the bytes of each source lie,
// which mark completes a device's copies, and when a block is free again. Nothing waits here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/arena.h"
#include "core/status.h"
#include "device/device.h"

namespace fastpersist {

// Guarded by the arena's mutex.
class CapturedBlocks {
 public:
  struct Block {
    std::byte* memory;
    uint32_t user_count;             // segments in it, and one while it is being filled
    Device* device;                  // fills it; null: a thread does
    std::shared_ptr<CopyMark> mark;  // behind the copies into it; null: it is open, or has none
    bool is_unmarked;                // it has copies without a mark: not marked yet, or marking failed
    bool is_complete;
    bool has_dropped;  // a segment was dropped before its copy was complete
  };
  struct Segment {
    uint64_t from_bytes;  // the offset in the source
    uint64_t size_bytes;
    const std::byte* memory;
    Block* block;
    bool is_complete;  // even if the block is not
  };
  // Two threads fill blocks: the one that captures, and the writer when it gathers.
  enum class Filler : uint8_t { kCapture, kWriter };

  explicit CapturedBlocks(Arena& arena) : arena_(arena) {}

  // Give a filler's block this much room, to be filled by `device`, or by a thread (null). Returns false if the arena
  // has no room. May release the lock meanwhile.
  bool EnsureRoom(std::unique_lock<std::mutex>& lock, Filler filler, Device* device, size_t size_bytes);
  Block* open_block(Filler filler) { return Of(filler).block; }
  size_t room_bytes(Filler filler) { return Arena::kBlockBytes - Of(filler).fill_bytes; }
  bool is_pinned(const Block* block) const { return arena_.is_pinned(block->memory); }
  bool is_open(const Block* block) const { return block == open_[0].block || block == open_[1].block; }
  // Returns where to put the filler's next size_bytes, which become `user_count` segments. REQUIRES: room for them.
  std::byte* Fill(Filler filler, size_t size_bytes, uint32_t user_count);
  // Take the block behind the last of a run, if it is free; else null. It counts one segment.
  Block* TryAddBehind(const Block* last);
  // A copy has filled a run that began in the capture's open block. Its last block holds last_bytes and becomes the
  // open one.
  void EndRun(const std::vector<Block*>& run, uint64_t last_bytes);

  // End filling a filler's block. If a device fills it, it gets a mark: now if the writer waits for it, else one mark
  // for several blocks, since the driver queues a limited number of commands.
  void CloseBlock(Filler filler);
  // Mark the copies into full blocks. If the driver refuses, the blocks stay unmarked, and MarkOf tries again.
  void MarkFull();

  // Returns the mark behind the copy of a segment; null: it is complete. An error: the device refuses a mark.
  Result<std::shared_ptr<const CopyMark>> MarkOf(const Segment& segment);
  // The mark of a segment was reached. `with_block`: the block was full when the mark was made. Copies into an open one
  // may have started later, even if it is full by now.
  static void CompleteSegment(Segment& segment, bool with_block) {
    segment.is_complete = true;
    if (with_block) segment.block->is_complete = true;
  }

  // Drop one segment of a block. Its last user gives a block back to the arena, or, if a device may still copy into it,
  // to the incomplete blocks: its next owner must not find late writes. Returns true if the arena has it.
  bool Release(const Segment& segment);
  // Take one of the incomplete blocks, so that the caller waits for it without the lock; null: there is none.
  Block* TakeIncomplete();
  // Give back a block of TakeIncomplete. `landed`: it is quarantined until this holds; null: its copies are complete.
  void Return(Block* block, CopiesComplete landed);
  int returning_count() const { return returning_count_; }

 private:
  struct Open {
    Block* block = nullptr;
    size_t fill_bytes = 0;
  };

  Open& Of(Filler filler) { return open_[static_cast<size_t>(filler)]; }
  Block* AddBlock(std::byte* memory, Device* device);
  bool DropUser(Block* block);
  void AddUnmarked(Block& block);

  Arena& arena_;
  std::deque<Block> blocks_;        // a deque: addresses stay
  std::vector<Block*> unmarked_;    // full; they wait for a common mark
  std::vector<Block*> incomplete_;  // without users, not back in the arena yet
  int returning_count_ = 0;         // blocks that TakeIncomplete has given out
  Open open_[2];
};

}  // namespace fastpersist
