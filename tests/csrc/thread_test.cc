// Threads of the library (core/thread.h): which signals they leave to the application's threads.
#include "core/thread.h"

#include <signal.h>

#include "testing.h"

namespace fastpersist {
namespace {

sigset_t BlockedInAThread() {
  sigset_t blocked;
  sigemptyset(&blocked);
  pthread_t thread;
  EXPECT(StartThread(thread, "test", [&] { pthread_sigmask(SIG_SETMASK, nullptr, &blocked); }) == 0);
  pthread_join(thread, nullptr);
  return blocked;
}

void SignalsForTheApplicationAreBlocked() {
  const sigset_t blocked = BlockedInAThread();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGUSR1, SIGALRM})
    EXPECT(sigismember(&blocked, signal) == 1);
}

// Blocked, they end the process before a handler such as faulthandler's can say where it crashed.
void SignalsOfACrashAreNotBlocked() {
  const sigset_t blocked = BlockedInAThread();
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) EXPECT(sigismember(&blocked, signal) == 0);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv, {TEST(SignalsForTheApplicationAreBlocked), TEST(SignalsOfACrashAreNotBlocked)});
}
