#include "transfer/request_worker.h"

#include <system_error>
#include <utility>

#include "core/thread.h"

namespace fastpersist {

void RequestInbox::Push(std::shared_ptr<RequestJob> job) {
  {
    const std::lock_guard lock(mutex_);
    if (jobs_.empty()) wakeup_->Signal();
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void RequestInbox::GiveUpOnDevices() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_one();
}

void RequestInbox::Stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    is_closing_ = true;
  }
  changed_.notify_one();
}

bool RequestInbox::Take(std::chrono::microseconds at_most, RequestFlow::Jobs& arrived, bool& closing) {
  std::unique_lock lock(mutex_);
  if (at_most == RequestFlow::kForever) {
    changed_.wait(lock, [this] { return !jobs_.empty() || is_stopping_; });
  } else if (at_most.count() > 0 && jobs_.empty()) {
    changed_.wait_for(lock, at_most);
  }
  closing = is_closing_;
  if (jobs_.empty()) return !is_stopping_;
  wakeup_->Clear();
  arrived.swap(jobs_);
  return true;
}

RequestWorker::~RequestWorker() {
  inbox_.Stop();
  if (is_started_) pthread_join(thread_, nullptr);
}

// Start the thread. Returns 0, or the error number of pthread_create.
int RequestWorker::Start() {
  const std::lock_guard lock(start_mutex_);
  if (is_started_) return 0;
  const int refused = StartThread(thread_, "fastpersist-ra", [this] { Run(); });
  is_started_ = refused == 0;
  return refused;
}

void RequestWorker::Add(std::shared_ptr<FileRequest> request, std::vector<FilePart> parts) {
  auto job = std::make_shared<RequestJob>();
  job->request = std::move(request);
  job->parts = std::move(parts);
  const int refused = is_started_ ? 0 : Start();
  if (refused == 0) {
    inbox_.Push(std::move(job));
    return;
  }
  Status status = Status::Error(
      StatusCode::kNoMemory,
      "the thread for this file could not be started (pthread_create: " + std::generic_category().message(refused) +
          "); raise the limit of processes (ulimit -u, or pids.max of the container)");
  job->request->CompleteJob(0, 1, {.status = std::move(status), .part = job->parts.front()});
}

void RequestWorker::Run() {
  RequestFlow::Jobs arrived;
  bool closing = false;
  for (;;) {
    const std::chrono::microseconds wait = flow_->NextWait();
    if (!inbox_.Take(wait, arrived, closing) && wait == RequestFlow::kForever) return;
    flow_->Step(arrived, closing);
  }
}

}  // namespace fastpersist
