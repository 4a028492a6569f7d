#include "core/limbo.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "core/fork.h"

namespace fastpersist {
namespace {

struct Left {
  std::vector<Landed> landed;
  std::function<void()> release;
};

// Leaked on purpose: at the end of the process a device may still copy. A forked child has a list of its own, since the
// parent's mutex may have been held.
struct Limbo {
  std::mutex mutex;
  std::vector<Left> left;
  const uint64_t fork_generation = ForkGeneration();
};
std::atomic<Limbo*> g_limbo{nullptr};

Limbo& OfThisProcess() {
  Limbo* limbo = g_limbo.load(std::memory_order_acquire);
  while (limbo == nullptr || limbo->fork_generation != ForkGeneration()) {
    auto fresh = std::make_unique<Limbo>();
    if (g_limbo.compare_exchange_strong(limbo, fresh.get())) return *fresh.release();
  }
  return *limbo;
}

}  // namespace

void LeaveInLimbo(std::vector<Landed> landed, std::function<void()> release) {
  {
    Limbo& limbo = OfThisProcess();
    const std::lock_guard lock(limbo.mutex);
    limbo.left.push_back({std::move(landed), std::move(release)});
  }
  ReleaseFromLimbo();
}

size_t ReleaseFromLimbo() {
  Limbo& limbo = OfThisProcess();
  std::vector<Left> looked_at;  // without the mutex: what is called may take its time, or another mutex
  {
    const std::lock_guard lock(limbo.mutex);
    looked_at.swap(limbo.left);
  }
  std::vector<Left> kept;
  for (Left& left : looked_at) {
    std::erase_if(left.landed, [](const Landed& landed) { return landed(); });
    if (left.landed.empty()) {
      left.release();
    } else {
      kept.push_back(std::move(left));
    }
  }
  const std::lock_guard lock(limbo.mutex);
  for (Left& left : kept) limbo.left.push_back(std::move(left));
  return limbo.left.size();
}

}  // namespace fastpersist
