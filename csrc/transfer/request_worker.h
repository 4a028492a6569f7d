// The thread of an open file: takes jobs from any thread, and moves them through request_flow, which does the work. Who
// may submit, and where the edges of writes go, is random_access's affair.
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

// What other threads tell the thread of a file. Thread-safe; one thread takes.
class RequestInbox {
 public:
  // `wakeup` is what the pump's wake_fd is of: readable while a job is in here.
  explicit RequestInbox(std::unique_ptr<Wakeup> wakeup) : wakeup_(std::move(wakeup)) {}

  void Push(std::shared_ptr<RequestJob> job);
  // From now on devices are waited for no longer than the grace time.
  void GiveUpOnDevices();
  // The same, and the thread ends when every job is complete.
  void Stop();

  // Wait for jobs, or for a change of the rest, but no longer than `at_most`; kForever: until there are jobs, or
  // Stop(). Adds the jobs to `arrived`. False: stopped, nothing arrived, and with kForever that is the end.
  bool Take(std::chrono::microseconds at_most, RequestFlow::Jobs& arrived, bool& closing);

 private:
  const std::unique_ptr<Wakeup> wakeup_;
  std::mutex mutex_;
  std::condition_variable changed_;
  RequestFlow::Jobs jobs_;  // guarded by mutex_, as those below
  bool is_stopping_ = false;
  bool is_closing_ = false;
};

// Thread-safe, but for the destructor.
class RequestWorker {
 public:
  RequestWorker(std::unique_ptr<Wakeup> wakeup, std::unique_ptr<RequestFlow> flow)
      : inbox_(std::move(wakeup)), flow_(std::move(flow)) {}
  // Waits for all jobs, as after GiveUpOnDevices.
  ~RequestWorker();
  RequestWorker(const RequestWorker&) = delete;
  RequestWorker& operator=(const RequestWorker&) = delete;

  // The parts of a request that this worker does. REQUIRES: none is empty; those of a write by a direct engine are
  // aligned to whole blocks of the file; all lie in one memory.
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
