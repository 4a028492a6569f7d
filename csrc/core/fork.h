// What a forked child may touch. The kernel objects behind an engine (its ring, its completion queue, its threads) and
// the pages of the ring (MADV_DONTFORK) belong to the parent. A child that unmapped or closed through a copied object
// could hit something of its own. So an object remembers the generation in which it was made and does nothing in a
// later one. Descriptors that must not outlive a fork are registered here and closed in the child.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace fastpersist {

// 0 in the process that loaded the module, one more in each fork below it. Async-signal-safe, thread-safe.
uint64_t ForkGeneration();

// One T for each process, made at first use and never destroyed, since it may still be in use when the process ends. A
// forked child makes its own, since the parent's may have been locked at that moment. For static variables;
// thread-safe.
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

// A file descriptor that is closed in forked children. Thread-safe; at most 1024 at once, further ones are simply
// inherited (they are O_CLOEXEC, so exec still drops them).
void CloseInForkedChild(int fd);
void ForgetDescriptor(int fd);  // before closing it in this process

}  // namespace fastpersist
