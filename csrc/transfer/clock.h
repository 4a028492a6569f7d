// The clock of timeouts and retries. Null is the steady clock, which costs a branch and no virtual call; simulations
// (tests/csrc) pass a clock that they advance themselves.
#pragma once

#include <chrono>
#include <thread>

namespace fastpersist {

using TimePoint = std::chrono::steady_clock::time_point;

class TransferClock {
 public:
  TransferClock() = default;
  TransferClock(const TransferClock&) = delete;
  TransferClock& operator=(const TransferClock&) = delete;
  virtual ~TransferClock() = default;

  virtual TimePoint Now() const = 0;
  virtual void Sleep(std::chrono::nanoseconds duration) = 0;
};

inline TimePoint Now(const TransferClock* clock) {
  return clock == nullptr ? std::chrono::steady_clock::now() : clock->Now();
}

inline void Sleep(TransferClock* clock, std::chrono::nanoseconds duration) {
  if (clock == nullptr) {
    std::this_thread::sleep_for(duration);
  } else {
    clock->Sleep(duration);
  }
}

}  // namespace fastpersist
