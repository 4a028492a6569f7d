// Lets a thread that waits for the kernel be woken by another one, too: an eventfd, which poll(2) takes beside others.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <memory>

#include "core/status.h"

namespace fastpersist {

// Readable from Signal() until Clear(). Thread-safe. In a forked child its descriptor is closed.
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

// Sleep until one of two descriptors (-1: none) is readable or the time is over. May end earlier: a signal comes.
void AwaitReadable(int first_fd, int second_fd, timespec at_most);

// Whether it is readable now. -1: no.
bool IsReadable(int fd);

}  // namespace fastpersist
