// Threads that copy large pieces of memory into the ring, and compute their CRCs, while another thread submits the
// writes. A writer starts them when the disk waits for copies.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/status.h"

namespace fastpersist {

// One owner thread.
class CopyThreads {
 public:
  struct Copy {
    std::byte* target;
    const std::byte* source;
    size_t size_bytes;
    bool with_crc;
    uint32_t crc = 0;  // the CRC of the copied bytes, when the copy is complete
    std::atomic<bool> is_complete = false;
  };

  CopyThreads();
  // Drops the copies that no thread has begun, and waits for the others. In a forked child, which does not have the
  // threads, it does nothing.
  ~CopyThreads();
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;

  // Start one more thread. Returns false if the system refuses.
  bool TryAddThread();
  size_t thread_count() const { return threads_.size(); }

  // Hand a copy to the threads. The caller keeps both memories until it is complete, or this object is destroyed.
  // REQUIRES: there is a thread.
  void Start(std::shared_ptr<Copy> copy);
  // Calls `poll` about every 50 ms; its error ends the wait.
  Status Wait(const Copy& copy, const std::function<Status()>& poll);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable copy_arrived;
    std::condition_variable copy_complete;
    std::deque<std::shared_ptr<Copy>> waiting;
    bool is_stopping = false;
  };

  static void Work(State& state);

  const uint64_t fork_generation_;
  std::unique_ptr<State> state_;
  std::vector<pthread_t> threads_;
};

}  // namespace fastpersist
