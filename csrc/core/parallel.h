// Runs a function in several threads at once.
#pragma once

#include <cstddef>
#include <functional>

namespace fastpersist {

// Call `run` in this thread and in up to `thread_count` - 1 others at once; returns when all calls have returned. The
// work has `part_count` parts, each of at least 50 µs; a call takes parts until none is left, because other threads may
// start late, or not at all.
//
// The other threads are those of torch's OpenMP. After an operation of torch they spin for some milliseconds, so they
// start at once, while threads of our own would compete with them for the CPUs. If torch has no OpenMP, and in a forked
// child, which lacks its parent's threads, new threads are started.
void RunInParallel(size_t thread_count, size_t part_count, const std::function<void()>& run);

// Copy memory; large copies use several threads.
void CopyInParallel(std::byte* target, const std::byte* source, size_t size_bytes, size_t thread_count);

}  // namespace fastpersist
