#include "transfer/edge_lock.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdint>

// Open file description locks, Linux 3.15; the numbers are those of include/uapi/asm-generic/fcntl.h.
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#define F_OFD_SETLKW 38
#endif

namespace fastpersist {
namespace {

// No file is as long.
constexpr int64_t kTurnstile = INT64_MAX - 2;
constexpr int64_t kGate = INT64_MAX - 1;
constexpr auto kLookInterval = std::chrono::milliseconds(5);

struct flock LockOf(short type, int64_t place) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Status EdgeLock::Change(short type, int64_t place) {
  struct flock lock = LockOf(type, place);
  int answer = 0;
  do {
    answer = fcntl(fd_, F_OFD_SETLKW, &lock);
  } while (answer != 0 && errno == EINTR);
  return answer == 0 ? Status::Ok() : Status::FromErrno(errno, "locking", path_);
}

Status EdgeLock::EnterShared() {
  if (fd_ < 0 || held_) return Status::Ok();
  FP_RETURN_IF_ERROR(Change(F_RDLCK, kTurnstile));
  Status status = Change(F_RDLCK, kGate);
  const Status passed = Change(F_UNLCK, kTurnstile);
  if (status.ok()) status = passed;
  held_ = status.ok();
  alone_ = false;
  next_look_ = std::chrono::steady_clock::now() + kLookInterval;
  return status;
}

Status EdgeLock::EnterAlone() {
  if (fd_ < 0 || held_) return Status::Ok();
  FP_RETURN_IF_ERROR(Change(F_WRLCK, kTurnstile));
  Status status = Change(F_WRLCK, kGate);
  const Status passed = Change(F_UNLCK, kTurnstile);
  if (status.ok()) status = passed;
  held_ = status.ok();
  alone_ = true;
  next_look_ = std::chrono::steady_clock::now() + kLookInterval;
  return status;
}

void EdgeLock::Leave() {
  if (!held_) return;
  held_ = false;
  // Unlocking fails for no reason that could be mended here; the kernel unlocks when the description is closed.
  [[maybe_unused]] const Status ignored = Change(F_UNLCK, kGate);
}

bool EdgeLock::SomebodyWaits() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return false;
  next_look_ = now + kLookInterval;
  // Everybody who waits holds the turnstile. Who is not alone does not mind others who do not want to be.
  struct flock lock = LockOf(alone_ ? F_WRLCK : F_RDLCK, kTurnstile);
  return fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool EdgeLock::Works(int fd) {
  struct flock lock = LockOf(F_RDLCK, kGate);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0;
}

}  // namespace fastpersist
