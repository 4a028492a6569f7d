// The blocks of the arena that hold captured bytes: which is being filled, where in them which bytes of a source lie,
// behind which mark a device's copies into them are complete, and when nobody wants one any more. No thread waits
// here.
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
    Device* device;                  // that fills it; null: a thread does
    std::shared_ptr<CopyMark> mark;  // behind the copies into it; null: it is being filled, or there are none
    bool is_unmarked;                // there are copies into it, and no mark: not yet, or none could be had
    bool is_complete;
  };
  struct Segment {
    uint64_t from_bytes;  // in the source
    uint64_t size_bytes;
    const std::byte* memory;
    Block* block;
    bool is_complete;  // whatever the block says
  };
  // Blocks are filled by the thread that captures, and by the writer, when it gathers.
  enum class Filler : uint8_t { kCapture, kWriter };

  explicit CapturedBlocks(Arena& arena) : arena_(arena) {}

  // See that a filler's block has this much room, filled by this device or, with none, by a thread. False: the arena
  // has none. The lock may have been let go of meanwhile.
  bool EnsureRoom(std::unique_lock<std::mutex>& lock, Filler filler, Device* device, size_t size_bytes);
  Block* open_block(Filler filler) { return Of(filler).block; }
  size_t room_bytes(Filler filler) { return Arena::kBlockBytes - Of(filler).fill_bytes; }
  bool is_pinned(const Block* block) const { return arena_.is_pinned(block->memory); }
  bool is_open(const Block* block) const { return block == open_[0].block || block == open_[1].block; }
  // Where the next size_bytes of a filler go; they are `user_count` segments. REQUIRES: room for them.
  std::byte* Fill(Filler filler, size_t size_bytes, uint32_t user_count);
  // The block behind the last of a run, if it is free; null otherwise. It counts one segment.
  Block* TryAddBehind(const Block* last);
  // A run of blocks was filled from the capture's open block on: the last, of which last_bytes are full, is open now.
  void EndRun(const std::vector<Block*>& run, uint64_t last_bytes);

  // Nothing more goes into a filler's block. If a device fills it, it gets a mark: now if it is the writer's, who waits
  // for it, else together with others, since the driver takes only so many commands ahead of the device.
  void CloseBlock(Filler filler);
  // Mark the copies into full blocks. Where that cannot be, AwaitSegment makes a mark, or says why it cannot.
  void MarkFull();

  // What to wait for until a segment is complete; null: nothing.
  Result<std::shared_ptr<const CopyMark>> MarkOf(const Segment& segment);
  // That wait has ended well.
  void CompleteSegment(const Segment& segment) {
    if (!is_open(segment.block)) segment.block->is_complete = true;
  }

  // A segment is nobody's any more. A block without segments goes back to the arena, or, where a device may still copy
  // into it, to the incomplete ones: whoever gets it next must not find that. True: one went back.
  bool Release(Block* block);
  // One of the incomplete blocks, to be waited for without the lock; null: there is none.
  Block* TakeIncomplete();
  // It is complete; or, with `landed`, it is given up, and the arena has it when that holds.
  void Return(Block* block, CopiesComplete landed);
  int returning_count() const { return returning_count_; }

 private:
  struct Open {
    Block* block = nullptr;
    size_t fill_bytes = 0;
  };

  Open& Of(Filler filler) { return open_[static_cast<size_t>(filler)]; }
  Block* AddBlock(std::byte* memory, Device* device);
  void AddUnmarked(Block& block);

  Arena& arena_;
  std::deque<Block> blocks_;        // a deque: addresses stay
  std::vector<Block*> unmarked_;    // full, and waiting for a mark together with others
  std::vector<Block*> incomplete_;  // nobody's, and not back in the arena
  int returning_count_ = 0;         // of those, being waited for
  Open open_[2];
};

}  // namespace fastpersist
