#include "core/pinned_cache.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "core/fork.h"
#include "core/memory.h"
#include "core/thread.h"

namespace fastpersist {
namespace {

using Clock = std::chrono::steady_clock;

class PinnedCache {
 public:
  void Put(PinnedMemory memory) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({std::move(memory), Clock::now()});
    if (!is_watched_) is_watched_ = StartWatch();
    changed_.notify_all();
  }

  PinnedMemory Take(size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    const auto fits_better = [size_bytes](const Entry& a, const Entry& b) {
      const size_t a_bytes = a.memory.size_bytes;
      const size_t b_bytes = b.memory.size_bytes;
      return a_bytes >= size_bytes && b_bytes >= size_bytes ? a_bytes < b_bytes : a_bytes > b_bytes;
    };
    // Of equal candidates, take the newest: unneeded ones then reach the end of their lifetime.
    const auto best = std::min_element(entries_.rbegin(), entries_.rend(), fits_better);
    if (best == entries_.rend()) return {};
    PinnedMemory taken = std::move(best->memory);
    entries_.erase(std::next(best).base());
    return taken;
  }

  uint64_t size_bytes() {
    const std::lock_guard lock(mutex_);
    return SizeOf(entries_);
  }

  uint64_t Empty() {
    std::vector<Entry> entries;
    {
      const std::lock_guard lock(mutex_);
      entries.swap(entries_);
      changed_.notify_all();
    }
    const uint64_t size_bytes = SizeOf(entries);
    for (Entry& entry : entries) Unmap(std::move(entry.memory));
    return size_bytes;
  }

  void SetLifetime(std::chrono::milliseconds lifetime) {
    const std::lock_guard lock(mutex_);
    lifetime_ = lifetime;
    changed_.notify_all();
  }

 private:
  struct Entry {
    PinnedMemory memory;
    Clock::time_point since;
  };

  static uint64_t SizeOf(const std::vector<Entry>& entries) {
    return std::accumulate(entries.begin(), entries.end(), uint64_t{0},
                           [](uint64_t sum, const Entry& entry) { return sum + entry.memory.size_bytes; });
  }

  // Without a thread, memory never reaches the end of its lifetime. REQUIRES: the mutex is held.
  bool StartWatch() {
    pthread_t thread{};
    if (StartThread(thread, "fastpersist-pin", [this] { Watch(); }) != 0) return false;
    pthread_detach(thread);
    return true;
  }

  // Give back memory at the end of its lifetime, until the cache is empty.
  void Watch() {
    std::unique_lock lock(mutex_);
    while (!entries_.empty()) {
      const auto due = entries_.front().since + lifetime_;
      if (Clock::now() < due) {
        changed_.wait_until(lock, due);
        continue;
      }
      PinnedMemory old = std::move(entries_.front().memory);
      entries_.erase(entries_.begin());
      lock.unlock();
      Unmap(std::move(old));
      lock.lock();
    }
    is_watched_ = false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Entry> entries_;  // oldest first
  std::chrono::milliseconds lifetime_ = std::chrono::minutes(10);
  bool is_watched_ = false;
};

PinnedCache& OfThisProcess() {
  static PerProcess<PinnedCache> cache;
  return cache.Get();
}

}  // namespace

void PutInPinnedCache(PinnedMemory memory) { OfThisProcess().Put(std::move(memory)); }
PinnedMemory TakeFromPinnedCache(size_t size_bytes) { return OfThisProcess().Take(size_bytes); }
uint64_t PinnedCacheBytes() { return OfThisProcess().size_bytes(); }
uint64_t EmptyPinnedCache() { return OfThisProcess().Empty(); }
void SetPinnedCacheLifetime(std::chrono::milliseconds lifetime) { OfThisProcess().SetLifetime(lifetime); }

void Unmap(PinnedMemory memory) {
  if (memory.memory == nullptr) return;
  memory.pinned.reset();
  UnmapBuffers(memory.memory, memory.size_bytes);
}

}  // namespace fastpersist
