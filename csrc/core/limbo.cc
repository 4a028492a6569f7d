#include "core/limbo.h"

#include <mutex>
#include <utility>

#include "core/fork.h"

namespace fastpersist {
namespace {

struct Left {
  std::vector<Landed> landed;
  std::function<void()> release;
};

// At the end of the process a device may still copy.
struct Limbo {
  std::mutex mutex;
  std::vector<Left> left;
};

Limbo& OfThisProcess() {
  static PerProcess<Limbo> limbo;
  return limbo.Get();
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
