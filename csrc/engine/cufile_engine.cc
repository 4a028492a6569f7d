// The cufile engine: it moves bytes between files and the memory of a device by GPUDirect Storage (device/cufile.h), in
// one of two ways: worker threads that each make one call after the other, or batches, which libcufile runs by itself.
// Requests' buffers are addresses inside a DeviceStaging, or host memory. Which way the bytes took is CuFile::Traffic's
// to say: libcufile goes through host memory, without a word, where it cannot do better.
#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fork.h"
#include "device/cufile.h"
#include "device/cufile_batch.h"
#include "engine/builtin_engines.h"
#include "engine/deadline.h"
#include "engine/engine.h"
#include "engine/worker_engine.h"

namespace fastpersist {
namespace {

using SharedDescriptor = std::shared_ptr<const CuFileDescriptor>;

// What one engine has used: registered at the first request, until the engine's end. Never more than a few: transfers
// have one file. Thread-safe.
class Descriptors {
 public:
  explicit Descriptors(CuFile& cufile) : cufile_(cufile) {}

  Result<SharedDescriptor> Of(int fd);

 private:
  CuFile& cufile_;
  std::mutex mutex_;
  std::vector<SharedDescriptor> known_;
};

// A descriptor that the engine has seen is meant to stay open until the engine's end; one that was closed all the same
// is not mistaken for the file that has its number now.
Result<SharedDescriptor> Descriptors::Of(int fd) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [&](const auto& known) { return known->fd() == fd && !known->IsStillOpen(); });
  for (const SharedDescriptor& known : known_) {
    if (known->fd() == fd) return known;
  }
  Result<CuFileDescriptor> fresh = CuFileDescriptor::Open(cufile_, fd);
  if (!fresh.ok()) return fresh.status();
  known_.push_back(std::make_shared<const CuFileDescriptor>(std::move(fresh).value()));
  return known_.back();
}

// Of a file that libcufile does not take.
CuFileOutcome Refused(const Status& status) {
  if (status.sys_errno() != 0) return {.sys_errno = status.sys_errno(), .error = {}};
  return {.sys_errno = status.code() == StatusCode::kUnsupported ? EOPNOTSUPP : EIO, .error = status.message()};
}

IoCompletion AsCompletion(uint64_t tag, const CuFileOutcome& outcome) {
  if (outcome.sys_errno != 0) return {.tag = tag, .done_bytes = 0, .sys_errno = outcome.sys_errno};
  return {.tag = tag, .done_bytes = static_cast<uint32_t>(outcome.done_bytes), .sys_errno = 0};
}

// --- calls ---

class CuFileIo final : public BlockingIo {
 public:
  explicit CuFileIo(CuFile& cufile) : descriptors_(cufile) {}

  IoCompletion Perform(const IoRequest& request) override;

  std::string last_failure() const override {
    const std::lock_guard lock(mutex_);
    return last_failure_;
  }

 private:
  Descriptors descriptors_;
  mutable std::mutex mutex_;
  std::string last_failure_;
};

IoCompletion CuFileIo::Perform(const IoRequest& request) {
  Result<SharedDescriptor> descriptor = descriptors_.Of(request.fd);
  CuFileOutcome outcome;
  if (!descriptor.ok()) {
    outcome = Refused(descriptor.status());
  } else if (request.op == IoOp::kRead) {
    outcome = descriptor.value()->Read(request.buffer, request.size_bytes, request.offset_bytes);
  } else {
    outcome = descriptor.value()->Write(request.buffer, request.size_bytes, request.offset_bytes);
  }
  if (!outcome.error.empty()) {
    const std::lock_guard lock(mutex_);
    last_failure_ = outcome.error;
  }
  return AsCompletion(request.tag, outcome);
}

// --- batches ---

// With libcufile at once. It was reported to wait in a submission, without end, for a buffer of host memory to go
// through, of which it has 64 of each size; several engines may run side by side.
// Source: github.com/ai-dynamo/nixl, pull request 2070.
constexpr size_t kSubmittedMax = 32;
// A batch takes no more before all it has is done, so there is always another one on its way while requests come.
constexpr size_t kBatchCount = 4;
// Of several batches one can be waited for; so often all are looked at.
constexpr auto kLookInterval = std::chrono::milliseconds(1);

class CuFileBatchEngine final : public IoEngine {
 public:
  CuFileBatchEngine(std::string name, EngineLimits limits, CuFile& cufile);
  ~CuFileBatchEngine() override;

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override;
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return in_flight_count_; }
  std::string last_failure() const override { return last_failure_; }

 private:
  // Of a request, from Queue until its completion is known: the batch's tag is its place among these.
  struct Slot {
    IoRequest request;
    SharedDescriptor descriptor;
  };

  void SubmitInto(CuFileBatch& batch);
  void Complete(size_t slot, const CuFileOutcome& outcome);
  void Collect(CuFileBatch& batch, std::chrono::nanoseconds timeout);
  size_t TakeCompleted(std::span<IoCompletion> out);

  const uint64_t generation_ = ForkGeneration();
  const std::string name_;
  const EngineLimits limits_;
  std::unique_ptr<Descriptors> descriptors_;
  std::array<std::unique_ptr<CuFileBatch>, kBatchCount> batches_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
  std::vector<size_t> queued_;  // slots that no batch has
  size_t submitted_count_ = 0;
  std::vector<CuFileBatch::Answer> answers_;
  std::vector<IoCompletion> completed_;  // not reaped
  size_t in_flight_count_ = 0;
  std::string last_failure_;
};

CuFileBatchEngine::CuFileBatchEngine(std::string name, EngineLimits limits, CuFile& cufile)
    : name_(std::move(name)),
      limits_(limits),
      descriptors_(std::make_unique<Descriptors>(cufile)),
      slots_(limits.queue_depth) {
  for (std::unique_ptr<CuFileBatch>& batch : batches_) batch = std::make_unique<CuFileBatch>(cufile);
  for (size_t i = slots_.size(); i > 0; --i) free_slots_.push_back(i - 1);
  queued_.reserve(slots_.size());
  completed_.reserve(slots_.size());
  answers_.reserve(kSubmittedMax);
}

CuFileBatchEngine::~CuFileBatchEngine() {
  if (ForkGeneration() == generation_) return;  // what is queued is dropped, and each batch waits for what it has
  for (std::unique_ptr<CuFileBatch>& batch : batches_) [[maybe_unused]]
    const auto* const left = batch.release();
  [[maybe_unused]] const auto* const left = descriptors_.release();  // its mutex may be locked
}

QueueResult CuFileBatchEngine::Queue(const IoRequest& request) {
  FP_CHECK(ForkGeneration() == generation_);
  CheckRequest(request);
  if (in_flight_count_ == limits_.queue_depth) return QueueResult::kFull;
  const size_t slot = free_slots_.back();
  free_slots_.pop_back();
  slots_[slot].request = request;
  queued_.push_back(slot);
  ++in_flight_count_;
  return QueueResult::kQueued;
}

void CuFileBatchEngine::Complete(size_t slot, const CuFileOutcome& outcome) {
  if (!outcome.error.empty()) last_failure_ = outcome.error;
  completed_.push_back(AsCompletion(slots_[slot].request.tag, outcome));
  slots_[slot].descriptor.reset();
  free_slots_.push_back(slot);
}

// As many of what is queued, in its order, as the batch takes.
void CuFileBatchEngine::SubmitInto(CuFileBatch& batch) {
  size_t done_count = 0;
  for (; done_count < queued_.size() && submitted_count_ < kSubmittedMax; ++done_count) {
    const size_t index = queued_[done_count];
    Slot& slot = slots_[index];
    Result<SharedDescriptor> descriptor = descriptors_->Of(slot.request.fd);
    if (!descriptor.ok()) {
      Complete(index, Refused(descriptor.status()));
      continue;
    }
    CuFileOutcome why_never;
    const CuFileBatch::Taken taken = batch.Take(*descriptor.value(),
                                                {.write = slot.request.op == IoOp::kWrite,
                                                 .buffer = slot.request.buffer,
                                                 .size_bytes = slot.request.size_bytes,
                                                 .offset_bytes = slot.request.offset_bytes,
                                                 .tag = index},
                                                why_never);
    if (taken == CuFileBatch::Taken::kNo) break;
    if (taken == CuFileBatch::Taken::kNever) {
      Complete(index, why_never);
      continue;
    }
    slot.descriptor = std::move(descriptor).value();
    ++submitted_count_;
  }
  queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(done_count));
  if (!batch.is_empty()) batch.Submit();
}

Status CuFileBatchEngine::Submit() {
  FP_CHECK(ForkGeneration() == generation_);
  for (const std::unique_ptr<CuFileBatch>& batch : batches_) {
    if (queued_.empty()) break;
    if (!batch->is_submitted()) SubmitInto(*batch);
  }
  return Status::Ok();
}

void CuFileBatchEngine::Collect(CuFileBatch& batch, std::chrono::nanoseconds timeout) {
  answers_.clear();
  batch.Collect(answers_, timeout);
  submitted_count_ -= answers_.size();
  for (const CuFileBatch::Answer& answer : answers_) Complete(static_cast<size_t>(answer.tag), answer.outcome);
}

size_t CuFileBatchEngine::TakeCompleted(std::span<IoCompletion> out) {
  const size_t count = std::min(out.size(), completed_.size());
  std::copy_n(completed_.begin(), count, out.begin());
  completed_.erase(completed_.begin(), completed_.begin() + static_cast<ptrdiff_t>(count));
  in_flight_count_ -= count;
  return count;
}

Result<size_t> CuFileBatchEngine::Reap(std::span<IoCompletion> out, size_t min_count,
                                       std::chrono::milliseconds timeout) {
  FP_CHECK(min_count <= out.size());
  const Deadline deadline(timeout);
  size_t taken = 0;
  for (bool last_look = false;; last_look = deadline.Passed()) {
    FP_RETURN_IF_ERROR(Submit());
    CuFileBatch* waited_for = nullptr;
    size_t busy_count = 0;
    for (const std::unique_ptr<CuFileBatch>& batch : batches_) {
      if (batch->is_submitted()) Collect(*batch, {});
      if (!batch->is_submitted()) continue;
      if (busy_count++ == 0) waited_for = batch.get();
    }
    taken += TakeCompleted(out.subspan(taken));
    if (taken >= std::min(min_count, taken + in_flight_count_) || last_look) return taken;
    // Idle batches, and something queued: what was just done has made room.
    if (waited_for == nullptr) continue;
    const std::chrono::nanoseconds remaining = deadline.Remaining();
    Collect(*waited_for, busy_count == 1 ? remaining : std::min<std::chrono::nanoseconds>(remaining, kLookInterval));
  }
}

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateCuFileEngine(const EngineOptions& options, bool direct) {
  Result<CuFile*> cufile = CuFile::Get();
  if (!cufile.ok()) return cufile.status();
  CuFileDescriptor::DropClosed();  // of transfers before
  const EngineLimits limits = {.queue_depth = options.queue_depth, .direct = direct};
  if (options.cufile_api == CuFileApi::kCalls) {
    return CreateWorkerEngine(options.name, limits, options.thread_count, std::make_unique<CuFileIo>(*cufile.value()));
  }
  FP_RETURN_IF_ERROR(CuFileBatch::WhyNot(*cufile.value()));
  return std::unique_ptr<IoEngine>(std::make_unique<CuFileBatchEngine>(options.name, limits, *cufile.value()));
}

}  // namespace fastpersist
