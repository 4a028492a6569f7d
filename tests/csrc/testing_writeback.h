// Replaces sync_file_range(2) in the program that includes it: records the descriptors of the calls, and makes the
// calls that wait fail. Only the descriptor decides which description gets the error of a failed writeback.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <vector>

namespace fastpersist {

inline std::atomic<int> g_writeback_errno{0};  // what calls that wait answer; 0: what the kernel says
inline std::mutex g_writeback_mutex;
inline std::vector<int> g_writeback_fds;

// Returns the descriptors of all calls since the last time.
inline std::vector<int> TakeWritebackFds() {
  const std::lock_guard lock(g_writeback_mutex);
  return std::exchange(g_writeback_fds, {});
}

inline bool AllAre(const std::vector<int>& fds, int fd) {
  return !fds.empty() && std::all_of(fds.begin(), fds.end(), [fd](int one) { return one == fd; });
}

}  // namespace fastpersist

extern "C" int sync_file_range(int fd, off64_t offset, off64_t count, unsigned flags) {
  {
    const std::lock_guard lock(fastpersist::g_writeback_mutex);
    fastpersist::g_writeback_fds.push_back(fd);
  }
  const int sys_errno = fastpersist::g_writeback_errno;
  if (sys_errno != 0 && (flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0) {
    errno = sys_errno;
    return -1;
  }
  return static_cast<int>(syscall(SYS_sync_file_range, fd, offset, count, flags));
}
