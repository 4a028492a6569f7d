// One mutex guards the state that workers and owner share. A worker locks it once per request, the owner once per
// batch, and only sleeping threads are woken: fast enough for 4 KiB requests at depth 256.
#include "engine/worker_engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fork.h"
#include "core/thread.h"
#include "core/wakeup.h"
#include "engine/builtin_engines.h"
#include "engine/deadline.h"
#include "engine/engine.h"

namespace fastpersist {
namespace {

constexpr uint32_t kDefaultThreadCount = 16;
constexpr size_t kNobodyWaits = SIZE_MAX;

// The state that owner and workers share. On the heap, so that a forked child can leave it alone: there, no worker
// lives and the mutex may be locked for ever.
struct Pool {
  Pool(uint32_t queue_depth, std::unique_ptr<BlockingIo> what_to_do)
      : io(std::move(what_to_do)), submitted(queue_depth) {
    completed.reserve(queue_depth);
  }

  const std::unique_ptr<BlockingIo> io;

  std::mutex mutex;
  std::condition_variable work_arrived;
  std::condition_variable enough_completed;
  std::unique_ptr<Wakeup>
      enough_completed_fd;  // used instead of enough_completed if the owner also waits for a wake_fd
  // A ring: requests [taken_count, submitted_count) modulo its size wait for a worker.
  std::vector<IoRequest> submitted;
  uint64_t submitted_count = 0;
  uint64_t taken_count = 0;
  size_t idle_count = 0;  // workers that wait for work_arrived
  std::vector<IoCompletion> completed;
  size_t wanted_count = kNobodyWaits;  // the owner sleeps until `completed` has this many
  bool stopping = false;
};

void WakeOwner(Pool& pool) {
  if (pool.enough_completed_fd != nullptr) {
    pool.enough_completed_fd->Signal();
  } else {
    pool.enough_completed.notify_one();
  }
}

void Work(Pool& pool) {
  std::unique_lock lock(pool.mutex);
  bool owner_waits = false;  // for the completion just added
  for (;;) {
    while (pool.taken_count == pool.submitted_count && !pool.stopping) {
      if (std::exchange(owner_waits, false)) WakeOwner(pool);
      ++pool.idle_count;
      pool.work_arrived.wait(lock);
      --pool.idle_count;
    }
    if (pool.stopping) return;
    const IoRequest request = pool.submitted[pool.taken_count++ % pool.submitted.size()];
    lock.unlock();
    // Only now, without the mutex: an owner woken earlier would meet it locked and sleep again.
    if (std::exchange(owner_waits, false)) WakeOwner(pool);
    const IoCompletion completion = pool.io->Perform(request);
    lock.lock();
    pool.completed.push_back(completion);
    if (pool.completed.size() >= pool.wanted_count) {
      pool.wanted_count = kNobodyWaits;
      owner_waits = true;
    }
  }
}

class WorkerEngine final : public IoEngine {
 public:
  WorkerEngine(std::string name, EngineLimits limits, std::unique_ptr<BlockingIo> io, int wake_fd)
      : name_(std::move(name)),
        limits_(limits),
        wake_fd_(wake_fd),
        pool_(std::make_unique<Pool>(limits.queue_depth, std::move(io))) {
    queued_.reserve(limits.queue_depth);
    reaped_.reserve(limits.queue_depth);
  }
  ~WorkerEngine() override;

  Status Open(uint32_t thread_count);

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override;
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return in_flight_; }
  std::string last_failure() const override { return pool_->io->last_failure(); }

 private:
  Status StartThreads(uint32_t thread_count);
  size_t TakeReaped(std::span<IoCompletion> out);
  void AwaitCompleted(std::unique_lock<std::mutex>& lock, size_t count, const Deadline& deadline);

  const uint64_t generation_ = ForkGeneration();
  const std::string name_;
  const EngineLimits limits_;
  const int wake_fd_;
  std::unique_ptr<Pool> pool_;
  std::vector<pthread_t> threads_;

  // For the owner only, outside the mutex.
  std::vector<IoRequest> queued_;
  std::vector<IoCompletion> reaped_;  // taken from the pool in one go; those before reaped_begin_ were returned
  size_t reaped_begin_ = 0;
  size_t in_flight_ = 0;
};

Status WorkerEngine::Open(uint32_t thread_count) {
  if (wake_fd_ >= 0) {
    Result<std::unique_ptr<Wakeup>> enough_completed = Wakeup::Create();
    if (!enough_completed.ok()) return enough_completed.status();
    pool_->enough_completed_fd = std::move(enough_completed).value();
  }
  return StartThreads(thread_count);
}

Status WorkerEngine::StartThreads(uint32_t thread_count) {
  int refused = 0;
  while (threads_.size() < thread_count && refused == 0) {
    pthread_t thread = {};
    refused = StartThread(thread, "fastpersist-io", [&pool = *pool_] { Work(pool); });
    if (refused == 0) threads_.push_back(thread);
  }
  if (refused == 0) return Status::Ok();
  return Status::Error(
      StatusCode::kUnsupported,
      "thread " + std::to_string(threads_.size() + 1) + " of " + std::to_string(thread_count) + " of the " + name_ +
          " engine could not be started (pthread_create: " + std::generic_category().message(refused) +
          "); raise the limit of processes (ulimit -u, or pids.max of the container) or use fewer threads");
}

WorkerEngine::~WorkerEngine() {
  if (ForkGeneration() != generation_) {
    [[maybe_unused]] const Pool* const left_alone = pool_.release();
    return;
  }
  {
    const std::lock_guard lock(pool_->mutex);
    pool_->stopping = true;  // requests that no worker has taken are dropped
  }
  pool_->work_arrived.notify_all();
  for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
}

QueueResult WorkerEngine::Queue(const IoRequest& request) {
  FP_CHECK(ForkGeneration() == generation_);
  CheckRequest(request);
  if (in_flight_ == limits_.queue_depth) return QueueResult::kFull;
  queued_.push_back(request);
  ++in_flight_;
  return QueueResult::kQueued;
}

Status WorkerEngine::Submit() {
  FP_CHECK(ForkGeneration() == generation_);
  if (queued_.empty()) return Status::Ok();
  size_t wake_count = 0;
  {
    const std::lock_guard lock(pool_->mutex);
    for (const IoRequest& request : queued_) {
      pool_->submitted[pool_->submitted_count++ % pool_->submitted.size()] = request;
    }
    // Busy workers look for more requests before they sleep.
    wake_count = std::min(pool_->idle_count, queued_.size());
  }
  for (; wake_count > 0; --wake_count) pool_->work_arrived.notify_one();
  queued_.clear();
  return Status::Ok();
}

size_t WorkerEngine::TakeReaped(std::span<IoCompletion> out) {
  const size_t count = std::min(out.size(), reaped_.size() - reaped_begin_);
  std::copy_n(reaped_.begin() + static_cast<ptrdiff_t>(reaped_begin_), count, out.begin());
  reaped_begin_ += count;
  if (reaped_begin_ == reaped_.size()) {
    reaped_.clear();
    reaped_begin_ = 0;
  }
  in_flight_ -= count;
  return count;
}

// Sleep until `completed` has `count` entries, the deadline has passed, or wake_fd is readable.
void WorkerEngine::AwaitCompleted(std::unique_lock<std::mutex>& lock, size_t count, const Deadline& deadline) {
  const auto enough = [&] { return pool_->completed.size() >= count; };
  for (bool is_over = false; !enough() && !is_over;) {
    pool_->wanted_count = count;
    if (pool_->enough_completed_fd == nullptr) {
      pool_->enough_completed.wait_until(lock, deadline.end(), enough);
      is_over = true;
      continue;
    }
    lock.unlock();
    AwaitReadable(pool_->enough_completed_fd->fd(), wake_fd_, deadline.RemainingTimespec());
    pool_->enough_completed_fd->Clear();
    is_over = deadline.Passed() || IsReadable(wake_fd_);
    lock.lock();
  }
  pool_->wanted_count = kNobodyWaits;
}

Result<size_t> WorkerEngine::Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) {
  FP_CHECK(min_count <= out.size());
  const Deadline deadline(timeout);
  FP_RETURN_IF_ERROR(Submit());
  size_t taken = TakeReaped(out);
  if (taken == out.size() || in_flight_ == 0) return taken;
  // reaped_ is empty here: everything in flight is in the pool.
  const size_t wanted_count = std::min(min_count, taken + in_flight_);
  {
    std::unique_lock lock(pool_->mutex);
    AwaitCompleted(lock, wanted_count - std::min(wanted_count, taken), deadline);
    reaped_.swap(pool_->completed);
  }
  taken += TakeReaped(out.subspan(taken));
  return taken;
}

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateWorkerEngine(std::string name, EngineLimits limits, uint32_t thread_count,
                                                     std::unique_ptr<BlockingIo> io, int wake_fd) {
  auto engine = std::make_unique<WorkerEngine>(std::move(name), limits, std::move(io), wake_fd);
  const uint32_t wished = thread_count == 0 ? kDefaultThreadCount : thread_count;
  FP_RETURN_IF_ERROR(engine->Open(std::min(wished, limits.queue_depth)));
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace fastpersist
