#include "transfer/random_access.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/alignment.h"
#include "core/fork.h"
#include "core/quarantine.h"
#include "core/wakeup.h"
#include "transfer/request_worker.h"

namespace fastpersist {
namespace {

constexpr uint64_t kEdgeCount = 64;  // pages of devices' writes staged at once
// The minimum, however short the queue is: one for the host and one for each direction of a device, so that none waits
// for another.
constexpr uint64_t kStagedChunkCount = 3;

}  // namespace

// ---------------------------------------------------------------------------------------------------- FileRequest

bool FileRequest::done() const {
  const std::lock_guard lock(mutex_);
  return open_job_count_ == 0;
}

bool FileRequest::WaitFor(std::chrono::milliseconds time) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return open_job_count_ == 0; });
}

void FileRequest::Keep(std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  memory_ = std::move(memory);
}

void FileRequest::Drop() {
  std::shared_ptr<const void> last;  // destroyed when the mutex is free
  const std::lock_guard lock(mutex_);
  last.swap(memory_);
}

std::shared_ptr<const void> FileRequest::memory() const {
  const std::lock_guard lock(mutex_);
  return memory_;
}

void FileRequest::AddJob() {
  const std::lock_guard lock(mutex_);
  ++open_job_count_;
}

void FileRequest::CompleteJob(uint64_t done_bytes, uint64_t failed_count, Failure first_failure) {
  OnComplete on_complete;  // destroyed when the mutex is free: it holds the file's state
  const std::lock_guard lock(mutex_);
  FP_CHECK(open_job_count_ > 0);
  done_bytes_ += done_bytes;
  const bool is_end = first_failure.status.code() == StatusCode::kEndOfFile;
  // See RequestJob::Note.
  if (failed_count > 0 && (failed_count_ == 0 || (status_.code() == StatusCode::kEndOfFile && !is_end))) {
    status_ = std::move(first_failure.status);
    failed_part_ = first_failure.part;
    failed_part_done_bytes_ = first_failure.done_bytes;
  }
  failed_count_ += failed_count;
  if (--open_job_count_ > 0) return;
  // One step for every observer: the file's count changes and the request becomes complete.
  on_complete = std::move(on_complete_);
  if (on_complete) on_complete(shared_from_this());
  changed_.notify_all();
}

// ---------------------------------------------------------------------------------------------------- RandomAccess

// The file's record of its requests; shared, since a request may outlive the file.
struct RandomAccess::Tally {
  std::mutex mutex;
  std::condition_variable none_open;
  uint64_t open_count = 0;
  std::vector<std::shared_ptr<FileRequest>> failed_writes;
};

RandomAccess::RandomAccess(RandomAccessOptions options)
    : generation_(ForkGeneration()),
      options_(std::move(options)),
      limits_(DirectIoLimitsOf(options_.fd)),
      edge_mutex_(new std::mutex),
      tally_(std::make_shared<Tally>()) {}

Result<std::unique_ptr<RandomAccess>> RandomAccess::Open(RandomAccessOptions options) {
  // A direct engine could not take over pieces that were cut for the page cache.
  if (!std::is_partitioned(options.engines.begin(), options.engines.end(),
                           [](const std::string& name) { return !name.ends_with("-buffered"); })) {
    return Status::Error(StatusCode::kInvalidArgument, "a direct engine cannot follow one through the page cache");
  }
  ReleaseComplete();
  std::unique_ptr<RandomAccess> file(new RandomAccess(std::move(options)));
  const RandomAccessOptions& own = file->options_;
  // The device's blocks may be larger than the chunks of the options.
  const uint64_t chunk_bytes = std::max(own.chunk_bytes, BlockBytesOf(file->limits_));
  Result<std::unique_ptr<Wakeup>> wakeup = Wakeup::Create();
  if (!wakeup.ok()) return wakeup.status();
  PumpOptions pump_options{.engines = own.engines,
                           .queue_depth = own.queue_depth,
                           .thread_count = own.thread_count,
                           .wake_fd = wakeup.value()->fd(),
                           .poll = {},
                           .outlives_failures = true,
                           .gives_writes_back = true};
  Result<std::unique_ptr<IoPump>> pump = IoPump::Open(own.fd, own.path, std::move(pump_options));
  if (!pump.ok()) return pump.status();
  if (pump.value()->direct()) {
    const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    file->write_unit_bytes_ = std::max<uint64_t>(page_bytes, file->limits_.offset_alignment_bytes);
  }
  const uint64_t staging_bytes =
      std::max(kStagedChunkCount * chunk_bytes,
               std::min(own.staging_bytes, AlignUp(chunk_bytes, Staging::kUnitBytes) * own.queue_depth));
  file->worker_ = std::make_unique<RequestWorker>(
      std::move(wakeup).value(),
      std::make_unique<RequestFlow>(std::move(pump).value(), file->limits_, chunk_bytes, staging_bytes,
                                    EdgeLock(own.direct_lock_fd, own.path), WriteSide::kShared));
  return file;
}

RandomAccess::~RandomAccess() {
  if (ForkGeneration() != generation_) {
    [[maybe_unused]] const RequestWorker* const left_alone[] = {worker_.release(), edge_worker_.release()};
    return;
  }
  worker_.reset();
  edge_worker_.reset();
  delete edge_mutex_;
}

Result<RequestWorker*> RandomAccess::EdgeWorker() {
  const std::lock_guard lock(*edge_mutex_);
  if (edge_worker_ == nullptr) {
    Result<std::unique_ptr<Wakeup>> wakeup = Wakeup::Create();
    if (!wakeup.ok()) return wakeup.status();
    PumpOptions pump_options{.engines = options_.edge_engines,
                             .queue_depth = options_.queue_depth,
                             .thread_count = options_.thread_count,
                             .wake_fd = wakeup.value()->fd(),
                             .poll = {},
                             .outlives_failures = true};
    Result<std::unique_ptr<IoPump>> pump = IoPump::Open(options_.buffered_fd, options_.path, std::move(pump_options));
    if (!pump.ok()) return pump.status();
    FP_CHECK(!pump.value()->direct());
    edge_worker_ = std::make_unique<RequestWorker>(
        std::move(wakeup).value(),
        std::make_unique<RequestFlow>(std::move(pump).value(), limits_, options_.chunk_bytes,
                                      kEdgeCount * write_unit_bytes_, EdgeLock(options_.edge_lock_fd, options_.path),
                                      WriteSide::kAlone));
  }
  return edge_worker_.get();
}

std::shared_ptr<FileRequest> RandomAccess::Begin(IoOp op) {
  FP_CHECK(ForkGeneration() == generation_);
  {
    const std::lock_guard lock(tally_->mutex);
    ++tally_->open_count;
  }
  return std::make_shared<FileRequest>(op, [tally = tally_](const std::shared_ptr<FileRequest>& request) {
    const std::lock_guard lock(tally->mutex);
    if (request->op() == IoOp::kWrite && request->failed_count() > 0) tally->failed_writes.push_back(request);
    if (--tally->open_count == 0) tally->none_open.notify_all();
  });
}

void RandomAccess::Add(const std::shared_ptr<FileRequest>& request, std::vector<FilePart> parts) {
  FP_CHECK(ForkGeneration() == generation_);
  std::erase_if(parts, [](const FilePart& part) { return part.size_bytes == 0; });
  if (!parts.empty() && parts.front().device != nullptr) ReleaseComplete();
  std::vector<FilePart> edges;
  if (request->op() == IoOp::kWrite && write_unit_bytes_ > 1) {
    // [1000, 9000) becomes [4096, 8192), and through the page cache [1000, 4096) and [8192, 9000).
    for (FilePart& part : parts) {
      const FilePart whole = part;
      const uint64_t end = whole.offset_bytes + whole.size_bytes;
      const auto cut = [&whole](uint64_t from, uint64_t until) {
        return FilePart{whole.address + (from - whole.offset_bytes), until - from, from, whole.device};
      };
      const uint64_t low = std::min(end, AlignUp(whole.offset_bytes, write_unit_bytes_));
      const uint64_t high = std::max(low, AlignDown(end, write_unit_bytes_));
      part = cut(low, high);
      if (low > whole.offset_bytes) edges.push_back(cut(whole.offset_bytes, low));
      if (end > high) edges.push_back(cut(high, end));
    }
    std::erase_if(parts, [](const FilePart& part) { return part.size_bytes == 0; });
  }
  if (!parts.empty()) {
    request->AddJob();
    worker_->Add(request, std::move(parts));
  }
  if (edges.empty()) return;
  request->AddJob();
  Result<RequestWorker*> edge_worker = EdgeWorker();
  if (edge_worker.ok()) {
    edge_worker.value()->Add(request, std::move(edges));
  } else {
    request->CompleteJob(0, 1, {.status = edge_worker.status(), .part = edges.front(), .done_bytes = 0});
  }
}

void RandomAccess::End(const std::shared_ptr<FileRequest>& request) { request->CompleteJob(0, 0, {}); }

void RandomAccess::GiveUpOnDevices() {
  worker_->GiveUpOnDevices();
  const std::lock_guard lock(*edge_mutex_);
  if (edge_worker_ != nullptr) edge_worker_->GiveUpOnDevices();
}

bool RandomAccess::WaitForAll(std::chrono::milliseconds time) {
  std::unique_lock lock(tally_->mutex);
  return tally_->none_open.wait_for(lock, time, [this] { return tally_->open_count == 0; });
}

std::vector<std::shared_ptr<FileRequest>> RandomAccess::TakeFailedWrites() {
  const std::lock_guard lock(tally_->mutex);
  return std::exchange(tally_->failed_writes, {});
}

Status RandomAccess::WrittenBack() {
  FP_RETURN_IF_ERROR(worker_->write_back_error());
  const std::lock_guard lock(*edge_mutex_);
  return edge_worker_ == nullptr ? Status::Ok() : edge_worker_->write_back_error();
}

std::string RandomAccess::engine_name() const { return worker_->engine_name(); }
std::vector<std::string> RandomAccess::demotions() const { return worker_->demotions(); }

}  // namespace fastpersist
