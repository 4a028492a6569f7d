// The quarantine: memory that a lost device may still write to. A transfer or a save that gives up adds such memory
// with a condition; the memory is not given out before the condition holds: the device has completed its copies. A
// device that holds copies up takes no more of them (device/device.h), which bounds the quarantine.
//
// Memory has one of two owners here. While its owner lives, the owner's Quarantine holds the pieces and gives them
// back. After the owner's end, the process holds the memory and releases it (ReleaseWhenComplete). At the end of the
// process it stays as it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "core/memory.h"

namespace fastpersist {

// Pieces of one owner's memory. Thread-safe. Calls and drops conditions without any lock: they may be slow, and their
// objects may need other locks.
class Quarantine {
 public:
  void Add(std::byte* piece, CopiesComplete complete);

  // Returns the pieces whose copies are complete; they belong to the owner again.
  std::vector<std::byte*> TakeComplete();

  // Whether any piece begins inside this memory.
  bool Touches(std::span<const std::byte> memory) const;

  // For the end of the owner: drop all pieces inside `memory` and call `release` once their copies are complete, as
  // ReleaseWhenComplete does; at once if there are none.
  void Outlive(std::span<const std::byte> memory, std::function<void()> release);

  // Pieces that were incomplete at the last TakeComplete.
  size_t count() const { return count_; }

 private:
  struct Piece {
    std::byte* memory;
    CopiesComplete complete;
  };

  mutable std::mutex mutex_;
  std::vector<Piece> pieces_;     // without those that a TakeComplete is checking
  std::atomic<size_t> count_{0};  // including those
};

// Call `release` once all `conditions` hold: now, or in a later call of this or of ReleaseComplete, on that call's
// thread. A forked child, which lacks the memory, calls nothing. Thread-safe.
void ReleaseWhenComplete(std::vector<CopiesComplete> conditions, std::function<void()> release);

// Release all memory whose conditions hold; returns how many pieces are left. Call it when work with such memory begins
// or ends.
size_t ReleaseComplete();

}  // namespace fastpersist
