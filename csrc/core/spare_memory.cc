#include "core/spare_memory.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "core/fork.h"
#include "core/memory.h"

namespace fastpersist {
namespace {

using Clock = std::chrono::steady_clock;

class Spares {
 public:
  void Keep(PinnedMemory memory) {
    const std::lock_guard lock(mutex_);
    kept_.push_back({std::move(memory), Clock::now()});
    if (!is_watched_) is_watched_ = StartWatch();
    changed_.notify_all();
  }

  PinnedMemory Take(size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    const auto fits_better = [size_bytes](const Spare& a, const Spare& b) {
      const size_t a_bytes = a.memory.size_bytes;
      const size_t b_bytes = b.memory.size_bytes;
      return a_bytes >= size_bytes && b_bytes >= size_bytes ? a_bytes < b_bytes : a_bytes > b_bytes;
    };
    // Of those that fit alike the one that was used last, so that what is too much grows old.
    const auto best = std::min_element(kept_.rbegin(), kept_.rend(), fits_better);
    if (best == kept_.rend()) return {};
    PinnedMemory taken = std::move(best->memory);
    kept_.erase(std::next(best).base());
    return taken;
  }

  uint64_t size_bytes() {
    const std::lock_guard lock(mutex_);
    return SizeOf(kept_);
  }

  uint64_t Release() {
    std::vector<Spare> released;
    {
      const std::lock_guard lock(mutex_);
      released.swap(kept_);
      changed_.notify_all();
    }
    const uint64_t size_bytes = SizeOf(released);
    for (Spare& spare : released) Unmap(std::move(spare.memory));
    return size_bytes;
  }

  void SetLifetime(std::chrono::milliseconds lifetime) {
    const std::lock_guard lock(mutex_);
    lifetime_ = lifetime;
    changed_.notify_all();
  }

 private:
  struct Spare {
    PinnedMemory memory;
    Clock::time_point since;
  };

  static uint64_t SizeOf(const std::vector<Spare>& spares) {
    return std::accumulate(spares.begin(), spares.end(), uint64_t{0},
                           [](uint64_t sum, const Spare& spare) { return sum + spare.memory.size_bytes; });
  }

  // Without a thread, nothing is given back for its age. REQUIRES: the mutex is held.
  bool StartWatch() {
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    // The application's signals are for its own threads.
    sigset_t all_signals;
    sigset_t before;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &before);
    pthread_t thread{};
    const bool started = pthread_create(&thread, &detached, Main, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&detached);
    return started;
  }

  static void* Main(void* self) {
    pthread_setname_np(pthread_self(), "fastpersist-mem");
    static_cast<Spares*>(self)->Watch();
    return nullptr;
  }

  // Until nothing is kept.
  void Watch() {
    std::unique_lock lock(mutex_);
    while (!kept_.empty()) {
      const auto due = kept_.front().since + lifetime_;
      if (Clock::now() < due) {
        changed_.wait_until(lock, due);
        continue;
      }
      PinnedMemory old = std::move(kept_.front().memory);
      kept_.erase(kept_.begin());
      lock.unlock();
      Unmap(std::move(old));
      lock.lock();
    }
    is_watched_ = false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Spare> kept_;  // as they came
  std::chrono::milliseconds lifetime_ = std::chrono::minutes(10);
  bool is_watched_ = false;
};

Spares& OfThisProcess() {
  static PerProcess<Spares> spares;
  return spares.Get();
}

}  // namespace

void KeepSpare(PinnedMemory memory) { OfThisProcess().Keep(std::move(memory)); }
PinnedMemory TakeSpare(size_t size_bytes) { return OfThisProcess().Take(size_bytes); }
uint64_t SpareBytes() { return OfThisProcess().size_bytes(); }
uint64_t ReleaseSpares() { return OfThisProcess().Release(); }
void SetSpareLifetime(std::chrono::milliseconds lifetime) { OfThisProcess().SetLifetime(lifetime); }

void Unmap(PinnedMemory memory) {
  memory.pinned.reset();
  UnmapBuffers(memory.memory, memory.size_bytes);
}

}  // namespace fastpersist
