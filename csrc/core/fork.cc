#include "core/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace fastpersist {
namespace {

// Plain atomics without a lock: the child handler runs while the parent's other threads may have held any lock.
std::atomic<uint64_t> g_generation{0};
// A slot holds descriptor + 1, so that zero-initialised slots are free.
constexpr int kFree = 0;
std::array<std::atomic<int>, 1024> g_descriptors{};

void InChild() {
  g_generation.fetch_add(1, std::memory_order_relaxed);
  for (auto& slot : g_descriptors) {
    const int held = slot.exchange(kFree, std::memory_order_relaxed);
    if (held != kFree) close(held - 1);
  }
}

[[maybe_unused]] const int g_registered = pthread_atfork(nullptr, nullptr, InChild);

}  // namespace

uint64_t ForkGeneration() { return g_generation.load(std::memory_order_relaxed); }

void CloseInForkedChild(int fd) {
  for (auto& slot : g_descriptors) {
    int expected = kFree;
    if (slot.compare_exchange_strong(expected, fd + 1)) return;
  }
}

void ForgetDescriptor(int fd) {
  for (auto& slot : g_descriptors) {
    int expected = fd + 1;
    if (slot.compare_exchange_strong(expected, kFree)) return;
  }
}

}  // namespace fastpersist
