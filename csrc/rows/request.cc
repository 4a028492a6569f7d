#include "rows/request.h"

#include <utility>

namespace fastpersist {

bool RowRequest::WaitFor(std::chrono::milliseconds time) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return is_done_.load(); });
}

void RowRequest::Cancel(Status status) {
  std::unique_lock lock(mutex_);
  if (!is_done_) {
    status_ = std::move(status);
    is_done_ = true;
    changed_.notify_all();
  }
  changed_.wait(lock, [this] { return copying_count_ == 0; });
}

void RowRequest::AwaitReads(size_t count) {
  const std::lock_guard lock(mutex_);
  awaited_count_ += count;
}

bool RowRequest::BeginCopy() {
  const std::lock_guard lock(mutex_);
  if (is_done_) return false;
  ++copying_count_;
  return true;
}

void RowRequest::EndReads(size_t count, bool has_copied) {
  const std::lock_guard lock(mutex_);
  if (has_copied) --copying_count_;
  awaited_count_ -= count;
  is_done_ = is_done_ || awaited_count_ == 0;
  if (is_done_) changed_.notify_all();
}

void RowRequest::FailRead(const Status& status, const std::string& path) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_done_ && status_.ok()) {
      status_ = status;
      failed_path_ = path;
    }
  }
  EndReads(1, /*has_copied=*/false);
}

}  // namespace fastpersist
