#include "transfer/edge_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>

#include "core/alignment.h"
#include "core/file.h"

// Open file description locks, Linux 3.15; the numbers are those of include/uapi/asm-generic/fcntl.h.
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

namespace fastpersist {
namespace {

// No file is that long.
constexpr int64_t kTurnstile = INT64_MAX - 2;
constexpr int64_t kGate = INT64_MAX - 1;
constexpr auto kLookInterval = std::chrono::milliseconds(5);
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr auto kPatience = std::chrono::seconds(30);

struct flock LockOf(short type, int64_t place) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// Returns false, and sets errno, if the kernel refuses.
bool EdgeLock::Change(short type, int64_t place) {
  struct flock lock = LockOf(type, place);
  return fcntl(fd_, F_OFD_SETLK, &lock) == 0;
}

Result<bool> EdgeLock::TryEnter(bool alone) {
  if (fd_ < 0 || held_) return true;
  const short type = alone ? F_WRLCK : F_RDLCK;
  const int64_t place = in_turnstile_ ? kGate : kTurnstile;
  if (Change(type, place)) {
    if (!in_turnstile_) {
      in_turnstile_ = true;
      return TryEnter(alone);
    }
    Change(F_UNLCK, kTurnstile);
    in_turnstile_ = false;
    held_ = true;
    alone_ = alone;
    refused_since_ = TimePoint::max();
    next_look_ = Now(clock_) + kLookInterval;
    return true;
  }
  const int sys_errno = errno;
  const auto now = Now(clock_);
  const bool in_the_way = sys_errno == EAGAIN || sys_errno == EACCES || sys_errno == EINTR;
  refused_since_ = std::min(refused_since_, now);
  if (in_the_way && now - refused_since_ < kPatience) return false;
  Status status = in_the_way ? WhoIsInTheWay(type, place) : Status::FromErrno(sys_errno, "locking", path_);
  if (in_turnstile_) Change(F_UNLCK, kTurnstile);
  in_turnstile_ = false;
  return status;
}

Status EdgeLock::WhoIsInTheWay(short type, int64_t place) const {
  struct flock lock = LockOf(type, place);
  std::string who = "another process";
  if (fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK) {
    who = lock.l_pid > 0 ? "process " + std::to_string(lock.l_pid) : "another open file of this kind";
  }
  return Status::Error(StatusCode::kIoError,
                       "write to " + path_ + ": " + who +
                           " has held a lock (fcntl) on all of it, or on its last bytes, for " +
                           std::to_string(std::chrono::duration_cast<std::chrono::seconds>(kPatience).count()) +
                           " s; is a process stopped?");
}

Status EdgeLock::Enter(bool alone) {
  for (;;) {
    Result<bool> entered = TryEnter(alone);
    if (!entered.ok()) return entered.status();
    if (entered.value()) return Status::Ok();
    Sleep(clock_, kPause);
  }
}

void EdgeLock::Leave() {
  if (in_turnstile_) Change(F_UNLCK, kTurnstile);
  in_turnstile_ = false;
  refused_since_ = TimePoint::max();
  if (!held_) return;
  held_ = false;
  Change(F_UNLCK, kGate);  // a failure leaves nothing to do
}

bool EdgeLock::SomebodyWaits() {
  const auto now = Now(clock_);
  if (now < next_look_) return false;
  next_look_ = now + kLookInterval;
  // Everyone who waits holds the turnstile. Two shared sides do not disturb each other.
  struct flock lock = LockOf(alone_ ? F_WRLCK : F_RDLCK, kTurnstile);
  return fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

Status EdgeLock::WriteBack(std::span<const std::pair<uint64_t, uint64_t>> ranges) const {
  constexpr unsigned kStart = SYNC_FILE_RANGE_WRITE;  // start all before waiting for any
  constexpr unsigned kFinish = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  Status status;
  for (const unsigned flags : {kStart, kFinish}) {
    for (const auto& [first, end] : ranges) {
      if (sync_file_range(fd_, static_cast<off_t>(first), static_cast<off_t>(end - first), flags) == 0) continue;
      if (status.ok()) status = Status::FromErrno(errno, "writing back what was written to", path_, first);
    }
  }
  return status;
}

bool EdgeLock::Works(int fd) {
  struct flock lock = LockOf(F_RDLCK, kGate);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0;
}

namespace {

// The page that holds the last byte of a file of this length.
std::pair<uint64_t, uint64_t> EndPage(uint64_t size_bytes) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = AlignDown(size_bytes, page_bytes);
  return {first, first + page_bytes};
}

uint64_t LengthOf(int fd) {
  const off_t end = lseek(fd, 0, SEEK_END);
  return end < 0 ? 0 : static_cast<uint64_t>(end);
}

template <class Change>
Status ChangeAlone(int lock_fd, int fd, const std::string& path, Change change) {
  EdgeLock lock(lock_fd, path);
  FP_RETURN_IF_ERROR(lock.Enter(/*alone=*/true));
  const uint64_t before_bytes = LengthOf(fd);
  Status status = change();
  if (lock.held()) {
    const std::pair<uint64_t, uint64_t> ends[] = {EndPage(before_bytes), EndPage(LengthOf(fd))};
    Status written_back = lock.WriteBack(ends);
    if (status.ok()) status = std::move(written_back);
  }
  lock.Leave();
  return status;
}

}  // namespace

Status TruncateAlone(int lock_fd, int fd, uint64_t size_bytes, const std::string& path) {
  return ChangeAlone(lock_fd, fd, path, [&] {
    int answer = 0;
    do {
      answer = ftruncate(fd, static_cast<off_t>(size_bytes));
    } while (answer != 0 && errno == EINTR);
    return answer == 0 ? Status::Ok() : Status::FromErrno(errno, "truncating", path);
  });
}

Status AllocateAlone(int lock_fd, int fd, uint64_t offset_bytes, uint64_t size_bytes, const std::string& path) {
  return ChangeAlone(lock_fd, fd, path, [&] { return AllocateRange(fd, offset_bytes, size_bytes, path); });
}

}  // namespace fastpersist
