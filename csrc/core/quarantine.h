// The quarantine: memory that a lost device may still write to. A transfer or a save that gives up hands such memory in
// together with a condition, and nobody is given it before the condition holds: the device has completed its copies.
// Devices bound how much comes here: one that holds copies up takes no more of them (device/device.h).
//
// Two owners keep memory here. While the owner of the memory lives, its pieces are in a Quarantine of its own, out of
// which it takes them back. Memory whose owner is gone is the process's, which releases it (ReleaseWhenComplete). What
// is there at the end of the process is left as it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "core/memory.h"

namespace fastpersist {

// Pieces of one owner's memory. Thread-safe. Conditions are asked for, and dropped, without any lock: they may take
// their time, and what they hold may need other locks.
class Quarantine {
 public:
  void Add(std::byte* piece, CopiesComplete complete);

  // The pieces whose copies are complete, which are the owner's again.
  std::vector<std::byte*> TakeComplete();

  // Whether any piece begins inside this memory.
  bool Touches(std::span<const std::byte> memory) const;

  // For the end of the owner: gives up all pieces inside `memory` and calls `release` once their copies are complete,
  // as ReleaseWhenComplete does; at once where there is none.
  void Outlive(std::span<const std::byte> memory, std::function<void()> release);

  // Pieces that are not complete, as far as TakeComplete has seen.
  size_t count() const { return count_; }

 private:
  struct Piece {
    std::byte* memory;
    CopiesComplete complete;
  };

  mutable std::mutex mutex_;
  std::vector<Piece> pieces_;     // but those that TakeComplete is looking at
  std::atomic<size_t> count_{0};  // with those
};

// Calls `release` once all of `conditions` hold: from here, or from a later call of this or of ReleaseComplete, on the
// thread of that call. Nothing is called in a forked child, into which the memory did not come along. Thread-safe.
void ReleaseWhenComplete(std::vector<CopiesComplete> conditions, std::function<void()> release);

// Release what is complete; returns how much is left. To be called wherever work with such memory begins or ends.
size_t ReleaseComplete();

}  // namespace fastpersist
