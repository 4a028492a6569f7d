// Starts the threads of this library: named, for ps and gdb, and with all signals blocked except those of a crash,
// since the application's threads handle its signals. Counts the CPUs on which they may run.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <functional>

namespace fastpersist {

// Returns 0, or the error number of pthread_create; `run` is not called then. The caller joins or detaches `thread`.
// `name` has at most 15 characters and is never freed.
int StartThread(pthread_t& thread, const char* name, std::function<void()> run);

// How many CPUs this thread may run on, on machines of any size; 0 if the kernel does not say. `ask` is for tests.
int UsableCpuCount(int (*ask)(pid_t, size_t, cpu_set_t*) = sched_getaffinity);

}  // namespace fastpersist
