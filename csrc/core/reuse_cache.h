// A few expensive things that one user leaves for the next: a context of the kernel, a mapping whose pages are there.
// The cache has no lock, so that a fork at any moment leaves it usable. A forked child finds nothing of its parent's in
// it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/fork.h"

namespace fastpersist {

// Holds up to kCount things, whose destructor gives them back to the kernel. For static variables: at the end of the
// process nothing is destroyed, since it may still be in use. Thread-safe.
template <class T, size_t kCount>
class ReuseCache {
 public:
  // A thing that fits, or null. One that does not fit is put back.
  template <class Fits>
  std::unique_ptr<T> Take(Fits fits) {
    for (std::atomic<Slot*>& slot : slots_) {
      std::unique_ptr<Slot> taken(slot.exchange(nullptr));
      if (taken == nullptr) continue;
      if (taken->fork_generation != ForkGeneration()) {
        [[maybe_unused]] const T* const left_alone = taken->thing.release();  // the parent's: it did not come along
        continue;
      }
      if (fits(*taken->thing)) return std::move(taken->thing);
      Put(std::move(taken->thing));
    }
    return nullptr;
  }

  // The thing is destroyed where the cache is full.
  void Put(std::unique_ptr<T> thing) {
    auto slot = std::make_unique<Slot>(Slot{std::move(thing)});
    for (std::atomic<Slot*>& place : slots_) {
      Slot* empty = nullptr;
      if (!place.compare_exchange_strong(empty, slot.get())) continue;
      [[maybe_unused]] const Slot* const owned_by_place = slot.release();
      return;
    }
  }

 private:
  struct Slot {
    std::unique_ptr<T> thing;
    uint64_t fork_generation = ForkGeneration();
  };

  std::array<std::atomic<Slot*>, kCount> slots_{};
};

}  // namespace fastpersist
