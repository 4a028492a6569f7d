// The thread of an open file: takes jobs from any thread and runs request_flow, which does the work. random_access
// decides which worker gets a job and where the edges of writes go.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/wakeup.h"
#include "transfer/request_flow.h"

namespace fastpersist {

// The mailbox from other threads to the thread of a file. Any thread may call the first three functions, one calls
// Take.
class RequestInbox {
 public:
  // `wakeup` owns the pump's wake_fd: it is readable while a job is in here.
  explicit RequestInbox(std::unique_ptr<Wakeup> wakeup) : wakeup_(std::move(wakeup)) {}

  void Push(std::shared_ptr<RequestJob> job);
  // From now on devices get no longer than the grace time.
  void GiveUpOnDevices();
  // As GiveUpOnDevices; the thread also ends when every job is complete.
  void Stop();

  // Wait until a job arrives, another thread sets a flag, or `at_most` has passed; kForever: until a job or Stop()
  // arrives. Moves the jobs to `arrived`. Returns false if stopped without a job; with kForever, the thread then ends.
  bool Take(std::chrono::microseconds at_most, RequestFlow::Jobs& arrived, bool& closing);

 private:
  const std::unique_ptr<Wakeup> wakeup_;
  std::mutex mutex_;
  std::condition_variable changed_;
  RequestFlow::Jobs jobs_;  // guarded by mutex_, as those below
  bool is_stopping_ = false;
  bool is_closing_ = false;
};

// Thread-safe, except for the destructor.
class RequestWorker {
 public:
  RequestWorker(std::unique_ptr<Wakeup> wakeup, std::unique_ptr<RequestFlow> flow)
      : inbox_(std::move(wakeup)), flow_(std::move(flow)) {}
  // Waits for all jobs, as after GiveUpOnDevices.
  ~RequestWorker();
  RequestWorker(const RequestWorker&) = delete;
  RequestWorker& operator=(const RequestWorker&) = delete;

  // Add the parts of a request for this worker. REQUIRES: none is empty; those of a write by a direct engine cover
  // whole blocks of the file; all lie in one memory.
  void Add(std::shared_ptr<FileRequest> request, std::vector<FilePart> parts);

  void GiveUpOnDevices() { inbox_.GiveUpOnDevices(); }

  std::string engine_name() const { return flow_->engine_name(); }
  std::vector<std::string> demotions() const { return flow_->demotions(); }
  Status write_back_error() const { return flow_->write_back_error(); }

 private:
  void Run();
  int Start();

  RequestInbox inbox_;
  const std::unique_ptr<RequestFlow> flow_;
  std::mutex start_mutex_;
  std::atomic<bool> is_started_{false};
  pthread_t thread_{};
};

}  // namespace fastpersist
