#include "core/copy_threads.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "core/crc32.h"
#include "core/fork.h"
#include "core/thread.h"

namespace fastpersist {
namespace {

constexpr std::chrono::milliseconds kPollInterval(50);

}  // namespace

CopyThreads::CopyThreads() : fork_generation_(ForkGeneration()), state_(std::make_unique<State>()) {}

CopyThreads::~CopyThreads() {
  if (fork_generation_ != ForkGeneration()) {
    [[maybe_unused]] const State* const left_alone = state_.release();
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
  }
  state_->copy_arrived.notify_all();
  for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
}

bool CopyThreads::TryAddThread() {
  pthread_t thread = {};
  if (StartThread(thread, "fastpersist-cpy", [&state = *state_] { Work(state); }) != 0) return false;
  threads_.push_back(thread);
  return true;
}

void CopyThreads::Work(State& state) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.copy_arrived.wait(lock, [&state] { return state.is_stopping || !state.waiting.empty(); });
    if (state.is_stopping) return;
    const std::shared_ptr<Copy> copy = std::move(state.waiting.front());
    state.waiting.pop_front();
    lock.unlock();
    if (copy->with_crc) {
      copy->crc = CopyWithCrc32(0, copy->target, copy->source, copy->size_bytes);
    } else {
      std::memcpy(copy->target, copy->source, copy->size_bytes);
    }
    lock.lock();
    copy->is_complete.store(true, std::memory_order_release);
    state.copy_complete.notify_one();
  }
}

void CopyThreads::Start(std::shared_ptr<Copy> copy) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->waiting.push_back(std::move(copy));
  }
  state_->copy_arrived.notify_one();
}

Status CopyThreads::Wait(const Copy& copy, const std::function<Status()>& poll) {
  const auto is_complete = [&copy] { return copy.is_complete.load(std::memory_order_acquire); };
  while (!is_complete()) {
    {
      std::unique_lock lock(state_->mutex);
      if (state_->copy_complete.wait_for(lock, kPollInterval, is_complete)) break;
    }
    FP_RETURN_IF_ERROR(poll());
  }
  return Status::Ok();
}

}  // namespace fastpersist
