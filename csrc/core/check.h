// FP_CHECK states an invariant, in every build: setuptools passes -DNDEBUG, which would remove assert(). A broken
// invariant aborts and prints its place. Never use it for input from disks, files or users.
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
