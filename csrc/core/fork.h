// Tells objects that a forked child must leave alone. The kernel objects behind an engine (its ring, completion queue
// and threads) and the pages of the ring (MADV_DONTFORK) belong to the parent. A child that unmaps or closes through a
// copied object could hit something of its own. So each object remembers its fork generation and does nothing in a
// later one. Descriptors that must not outlive a fork are registered here, and the child closes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace fastpersist {

// 0 in the process that loaded the module, one more in each fork below it. Async-signal-safe, thread-safe.
uint64_t ForkGeneration();

// One T for each process, made at first use and never destroyed, since threads may use it when the process ends. A
// forked child makes its own, since a parent's thread may have held its lock. For static variables; thread-safe.
template <typename T>
class PerProcess {
 public:
  T& Get() {
    Slot* slot = slot_.load(std::memory_order_acquire);
    while (slot == nullptr || slot->fork_generation != ForkGeneration()) {
      auto fresh = std::make_unique<Slot>();
      if (slot_.compare_exchange_strong(slot, fresh.get())) slot = fresh.release();
    }
    return slot->value;
  }

 private:
  struct Slot {
    T value;
    const uint64_t fork_generation = ForkGeneration();
  };

  std::atomic<Slot*> slot_{nullptr};
};

// Register a descriptor that forked children close. Thread-safe; at most 1024 at once: children inherit further ones
// (they are O_CLOEXEC, so exec drops them).
void CloseInForkedChild(int fd);
void ForgetDescriptor(int fd);  // before closing it in this process

}  // namespace fastpersist
