// The time at which a Reap must return. Steady clock, so a changed wall clock neither shortens nor lengthens a wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>

namespace fastpersist {

class Deadline {
 public:
  // Negative timeouts are zero; a very long one (milliseconds::max()) is cut to a year, so that adding it to now cannot
  // overflow.
  explicit Deadline(std::chrono::milliseconds timeout)
      : end_(std::chrono::steady_clock::now() + std::clamp<std::chrono::milliseconds>(timeout,
                                                                                      std::chrono::milliseconds(0),
                                                                                      std::chrono::hours(24 * 365))) {}

  std::chrono::steady_clock::time_point end() const { return end_; }
  bool Passed() const { return std::chrono::steady_clock::now() >= end_; }

  // Never negative.
  std::chrono::nanoseconds Remaining() const {
    return std::max(std::chrono::nanoseconds(end_ - std::chrono::steady_clock::now()), std::chrono::nanoseconds(0));
  }
  timespec RemainingTimespec() const {
    const std::chrono::nanoseconds remaining = Remaining();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(remaining);
    return {.tv_sec = seconds.count(), .tv_nsec = (remaining - seconds).count()};
  }

 private:
  std::chrono::steady_clock::time_point end_;
};

}  // namespace fastpersist
