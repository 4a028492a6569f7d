// FP_CHECK states an invariant. It is on in every build: setuptools passes -DNDEBUG, so assert() would vanish where it
// matters. A broken invariant aborts with the place; it is never used for what a disk, a file or a user may do.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace fastpersist {

[[noreturn]] inline void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "fastpersist: invariant broken: %s (%s:%d); please report this\n", condition, file, line);
  std::abort();
}

}  // namespace fastpersist

#define FP_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::fastpersist::CheckFailed(#condition, __FILE__, __LINE__))
