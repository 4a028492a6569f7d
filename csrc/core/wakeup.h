// An eventfd with which one thread wakes another that waits for the kernel; poll(2) takes it beside other descriptors.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <memory>

#include "core/status.h"

namespace fastpersist {

// Readable from Signal() until Clear(). Thread-safe. Forked children close its descriptor.
class Wakeup {
 public:
  static Result<std::unique_ptr<Wakeup>> Create();
  ~Wakeup();
  Wakeup(const Wakeup&) = delete;
  Wakeup& operator=(const Wakeup&) = delete;

  void Signal() const;
  void Clear() const;
  int fd() const { return fd_; }

 private:
  explicit Wakeup(int fd);

  const uint64_t fork_generation_;
  const int fd_;
};

// Sleep until one of two descriptors (-1: none) is readable, the time is over, or a signal arrives.
void AwaitReadable(int first_fd, int second_fd, timespec at_most);

// Whether a descriptor is readable now. False for -1.
bool IsReadable(int fd);

}  // namespace fastpersist
