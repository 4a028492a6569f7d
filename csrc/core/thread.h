// Starts the threads of this library: named, for ps and gdb, and with all signals blocked, since the application's
// threads handle its signals.
#pragma once

#include <pthread.h>

#include <functional>

namespace fastpersist {

// Returns 0, or the error number of pthread_create; `run` is not called then. The caller joins or detaches `thread`.
// `name` has at most 15 characters and is never freed.
int StartThread(pthread_t& thread, const char* name, std::function<void()> run);

}  // namespace fastpersist
