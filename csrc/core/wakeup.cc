#include "core/wakeup.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <tuple>

#include "core/fork.h"

namespace fastpersist {

Wakeup::Wakeup(int fd) : fork_generation_(ForkGeneration()), fd_(fd) { CloseInForkedChild(fd_); }

Result<std::unique_ptr<Wakeup>> Wakeup::Create() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) return Status::FromErrno(errno, "eventfd", "to wake the thread of a file");
  return std::unique_ptr<Wakeup>(new Wakeup(fd));
}

Wakeup::~Wakeup() {
  if (ForkGeneration() != fork_generation_) return;
  ForgetDescriptor(fd_);
  close(fd_);
}

// These calls fail only if there is nothing to do: the counter is full, or zero.
void Wakeup::Signal() const {
  const uint64_t one = 1;
  std::ignore = write(fd_, &one, sizeof(one));
}

void Wakeup::Clear() const {
  uint64_t count = 0;
  std::ignore = read(fd_, &count, sizeof(count));
}

void AwaitReadable(int first_fd, int second_fd, timespec at_most) {
  pollfd fds[] = {{.fd = first_fd, .events = POLLIN, .revents = 0}, {.fd = second_fd, .events = POLLIN, .revents = 0}};
  std::ignore = ppoll(fds, 2, &at_most, nullptr);
}

bool IsReadable(int fd) {
  pollfd readable = {.fd = fd, .events = POLLIN, .revents = 0};
  return fd >= 0 && poll(&readable, 1, 0) > 0;
}

}  // namespace fastpersist
