// Large writes into files of tmpfs, by many threads at once. pwrite(2) lets one thread at a time into a file, and
// spends most of its time on pages that the file lacks. All threads fill a mapping of the file side by side, and it has
// huge pages where the mount gives them on request (huge=advise).
//
// The kernel copies into the mapping, not this process: a page that cannot be had (no space, a file cut shorter) is an
// error of that call, and no SIGBUS here.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fastpersist {

// How many CPUs this thread may run on, on machines of any size; 0 where the kernel does not tell. `ask` is for tests.
int UsableCpuCount(int (*ask)(pid_t, size_t, cpu_set_t*) = sched_getaffinity);

enum class TmpfsMapping : uint8_t {
  kWherePays,  // with at least four CPUs, or huge pages
  kAlways,     // for tests
};

class TmpfsWrites {
 public:
  explicit TmpfsWrites(TmpfsMapping mapping);

  // Write a request. False where this way is not taken or failed (not tmpfs, a small request, one beyond the file's
  // end, no space, a kernel that refuses): the caller then writes all of it by pwrite(2), whose error counts.
  // Thread-safe.
  bool Write(const IoRequest& request);

 private:
  enum class Kind : uint8_t { kOther, kSmallPages, kHugePages };
  Kind KindOf(int fd, dev_t device);

  const bool pays_with_small_pages_;
  std::atomic<bool> refused_ = false;  // by the kernel or a sandbox, for good
  std::mutex mutex_;
  std::vector<std::pair<dev_t, Kind>> kinds_;  // of the file systems seen
};

}  // namespace fastpersist
