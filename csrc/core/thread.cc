#include "core/thread.h"

#include <signal.h>

#include <memory>
#include <utility>

namespace fastpersist {
namespace {

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
  sigset_t all_signals;
  sigset_t before;
  sigfillset(&all_signals);
  pthread_sigmask(SIG_SETMASK, &all_signals, &before);  // a new thread inherits its starter's mask
  const int refused = pthread_create(&thread, nullptr, Main, start.get());
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (refused == 0) start.release();  // NOLINT(bugprone-unused-return-value): the thread owns it now
  return refused;
}

}  // namespace fastpersist
