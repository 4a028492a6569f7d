// A few expensive objects that one user leaves for the next: a kernel context, a mapping with its pages. The cache has
// no lock, so a fork at any moment leaves it usable. A forked child does not get its parent's objects.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/fork.h"

namespace fastpersist {

// Holds up to kCount objects, whose destructors give them back to the kernel. For static variables: nothing is
// destroyed at the end of the process, since threads may still use it. Thread-safe.
template <class T, size_t kCount>
class ReuseCache {
 public:
  // Take an object that fits, or null. Objects that do not fit stay.
  template <class Fits>
  std::unique_ptr<T> Take(Fits fits) {
    for (std::atomic<Slot*>& slot : slots_) {
      std::unique_ptr<Slot> taken(slot.exchange(nullptr));
      if (taken == nullptr) continue;
      if (taken->fork_generation != ForkGeneration()) {
        [[maybe_unused]] const T* const left_alone =
            taken->thing.release();  // the parent's: this process does not have it
        continue;
      }
      if (fits(*taken->thing)) return std::move(taken->thing);
      Put(std::move(taken->thing));
    }
    return nullptr;
  }

  // Leave an object; it is destroyed if the cache is full.
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
