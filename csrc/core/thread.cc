#include "core/thread.h"

#include <signal.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

namespace fastpersist {
namespace {

constexpr size_t kPossibleCpuCountMax = 1 << 20;  // no kernel can be built for more

struct Start {
  const char* name;
  std::function<void()> run;
};

void* Main(void* argument) {
  const std::unique_ptr<const Start> start(static_cast<const Start*>(argument));
  pthread_setname_np(pthread_self(), start->name);
  start->run();
  return nullptr;
}

}  // namespace

int StartThread(pthread_t& thread, const char* name, std::function<void()> run) {
  auto start = std::make_unique<Start>(Start{name, std::move(run)});
  sigset_t blocked;
  sigset_t before;
  sigfillset(&blocked);
  // If a thread that blocks these signals crashes, the process ends without output of faulthandler and similar tools.
  for (const int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&blocked, crash);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);  // a new thread inherits its starter's mask
  const int refused = pthread_create(&thread, nullptr, Main, start.get());
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (refused == 0) start.release();  // NOLINT(bugprone-unused-return-value): the thread owns it now
  return refused;
}

// Asks with growing sets: the kernel refuses one with fewer bits than possible CPUs, and cpu_set_t holds 1,024.
int UsableCpuCount(int (*ask)(pid_t, size_t, cpu_set_t*)) {
  for (size_t capacity = CPU_SETSIZE; capacity <= kPossibleCpuCountMax; capacity *= 2) {
    std::vector<cpu_set_t> cpus(capacity / CPU_SETSIZE);
    const size_t size_bytes = cpus.size() * sizeof(cpu_set_t);
    if (ask(0, size_bytes, cpus.data()) == 0) return CPU_COUNT_S(size_bytes, cpus.data());
    if (errno != EINVAL) break;
  }
  return 0;
}

}  // namespace fastpersist
