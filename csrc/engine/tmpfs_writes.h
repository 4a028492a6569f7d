// Writes large requests into files of tmpfs with many threads at once. pwrite(2) admits one thread at a time to a file,
// and spends most of its time on pages that the file lacks. Here all threads fill a mapping of the file in parallel,
// with huge pages if the mount gives them on request (huge=advise).
//
// The kernel, not this process, copies into the mapping: if a page cannot be allocated (no space, a truncated file),
// the call returns an error instead of raising SIGBUS.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fastpersist {

enum class TmpfsMapping : uint8_t {
  kWherePays,  // with at least four CPUs, or huge pages
  kAlways,     // for tests
};

class TmpfsWrites {
 public:
  explicit TmpfsWrites(TmpfsMapping mapping);

  // Write a request through a mapping. Returns false if that was not tried or failed (not tmpfs, a small request, one
  // beyond the file's end, no space, a kernel that refuses): the caller then writes all of it by pwrite(2), whose error
  // counts. Thread-safe.
  bool Write(const IoRequest& request);

 private:
  enum class Kind : uint8_t { kOther, kSmallPages, kHugePages };
  Kind KindOf(int fd, dev_t device);

  const bool pays_with_small_pages_;
  std::atomic<bool> refused_ = false;  // the kernel or a sandbox refuses, for good
  std::mutex mutex_;
  std::vector<std::pair<dev_t, Kind>> kinds_;  // one for each file system seen
};

}  // namespace fastpersist
