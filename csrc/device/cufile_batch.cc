#include "device/cufile_batch.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "core/check.h"

namespace fastpersist {
namespace {

// Until 1.14 a request of more than 1 MiB was seen to be refused, and so was all that was submitted with it.
constexpr int kFirstVersion = 1150;

// One call waits no longer: a library that stays in it for too long then costs this much.
constexpr auto kWaitMax = std::chrono::milliseconds(100);
// The pause after an answer that came at once and was empty.
constexpr auto kPause = std::chrono::microseconds(200);
// How long it may answer so, or with errors ("retry later"), before it is taken at its word: it knows of no request.
constexpr auto kSilenceMax = std::chrono::seconds(5);
// Such answers that lie further apart are none of the same silence: nobody may have asked meanwhile.
constexpr auto kSilenceGap = std::chrono::seconds(1);

// Handles that wait for their next batch: ending one was seen to take 30 to 110 ms, as long as a save of 100 MB. Never
// held by a thread that did not come along into a forked child: there, nobody gets so far.
struct Spares {
  static constexpr size_t kCountMax = 8;
  std::mutex mutex;
  std::vector<void*> handles;
};

Spares& TheSpares() {
  static auto* const spares = new Spares;  // never destroyed: engines may run while the process exits
  return *spares;
}

bool IsOver(int status) { return status != kBatchWaiting && status != kBatchPending; }

// Of an event that is over.
CuFileOutcome OutcomeOfEvent(const CuFileBatchEvent& event, size_t size_bytes) {
  const auto answer = static_cast<ssize_t>(event.answer);
  if (event.status == kBatchComplete || (event.status == kBatchFailed && answer < 0)) {
    return OutcomeOf(answer, size_bytes, 0);  // -1 is an error of which no errno is left
  }
  switch (event.status) {
    case kBatchInvalid:
      return {.sys_errno = EINVAL, .error = "CUFILE_INVALID"};
    case kBatchCanceled:
      return {.sys_errno = EIO, .error = "CUFILE_CANCELED"};
    case kBatchTimeout:
      return {.sys_errno = ETIMEDOUT, .error = "CUFILE_TIMEOUT"};
    default:
      return {.sys_errno = EIO, .error = "batch status " + std::to_string(event.status)};
  }
}

}  // namespace

Status CuFileBatch::WhyNot(const CuFile& cufile) {
  const CuFile::Calls& calls = *cufile.calls_;
  const bool has_calls = calls.batch_set_up != nullptr && calls.batch_submit != nullptr &&
                         calls.batch_get_status != nullptr && calls.batch_cancel != nullptr &&
                         calls.batch_destroy != nullptr;
  if (has_calls && cufile.version() >= kFirstVersion) return Status::Ok();
  return Status::Error(StatusCode::kUnsupported,
                       "cuFile " + cufile.version_text() +
                           " takes no batches of requests as long as these: that comes " +
                           "with cuFile 1.15 (CUDA 13.0); FASTPERSIST_CUFILE_API=calls does without");
}

uint32_t CuFileBatch::Capacity(const CuFile& cufile) {
  std::array<uint32_t, kPropertiesRoomWords> words = {};
  const CuFile::Calls& calls = *cufile.calls_;
  if (calls.get_properties == nullptr || calls.get_properties(words.data()).code != kCuFileSuccess) return kRequestsMax;
  const uint32_t said = words[kMaxBatchWord];
  return said == 0 ? kRequestsMax : std::min(said, kRequestsMax);
}

CuFileBatch::CuFileBatch(CuFile& cufile) : cufile_(cufile), capacity_(Capacity(cufile)), events_(capacity_) {
  requests_.reserve(capacity_);
  tags_.reserve(capacity_);
  is_answered_.reserve(capacity_);
}

CuFileBatch::~CuFileBatch() {
  std::vector<Answer> nobody_asks;
  while (is_submitted_) Collect(nobody_asks, kWaitMax);
  if (handle_ == nullptr) return;
  Spares& spares = TheSpares();
  {
    const std::lock_guard lock(spares.mutex);
    if (spares.handles.size() < Spares::kCountMax) {
      spares.handles.push_back(std::exchange(handle_, nullptr));
      return;
    }
  }
  DropHandle();
}

CuFileBatch::Taken CuFileBatch::Take(const CuFileDescriptor& descriptor, const Request& request,
                                     CuFileOutcome& why_never) {
  FP_CHECK(!is_submitted_);
  if (requests_.size() == capacity_) return Taken::kNo;
  CuFileDescriptor::Memory memory;
  why_never = descriptor.Locate(request.write, request.buffer, request.size_bytes, memory);
  if (why_never.sys_errno != 0) return Taken::kNever;
  if (!requests_.empty() && memory.device != device_) return Taken::kNo;
  device_ = memory.device;
  requests_.push_back({.base = memory.base,
                       .offset_bytes = static_cast<off_t>(request.offset_bytes),
                       .base_offset_bytes = static_cast<off_t>(memory.base_offset_bytes),
                       .size_bytes = request.size_bytes,
                       .file = descriptor.file(),
                       .opcode = request.write ? 1 : 0,
                       .cookie = reinterpret_cast<void*>(requests_.size() + 1)});
  tags_.push_back(request.tag);
  is_answered_.push_back(false);
  return Taken::kYes;
}

void CuFileBatch::Submit() {
  FP_CHECK(!is_submitted_ && !requests_.empty());
  is_submitted_ = true;
  is_silent_ = false;
  const ContextScope context(*device_);
  if (!context.status().ok()) return FailWhatIsOpen({.sys_errno = EIO, .error = context.status().message()});
  CuFileError error = {.code = kCuFileSuccess, .cuda = kCudaSuccess};
  const char* call = "cuFileBatchIOSetUp";
  if (handle_ == nullptr) {
    Spares& spares = TheSpares();
    const std::lock_guard lock(spares.mutex);
    if (!spares.handles.empty()) {
      handle_ = spares.handles.back();
      spares.handles.pop_back();
    } else {
      error = cufile_.calls_->batch_set_up(&handle_, capacity_);
      if (error.code != kCuFileSuccess) handle_ = nullptr;
    }
  }
  if (error.code == kCuFileSuccess) {
    call = "cuFileBatchIOSubmit";
    error = cufile_.calls_->batch_submit(handle_, static_cast<unsigned>(requests_.size()), requests_.data(), 0);
    if (error.code == kCuFileSuccess) return;
  }
  // Some of them may be on their way all the same, and nothing is told of these any more. Ending the batch waits for
  // them.
  DropHandle();
  FailWhatIsOpen({.sys_errno = NameOf(error.code).sys_errno, .error = std::string(call) + ": " + Describe(error)});
}

void CuFileBatch::Collect(std::vector<Answer>& answers, std::chrono::nanoseconds timeout) {
  if (!is_submitted_) return;
  if (open_count() > 0) Ask(answers, std::clamp<std::chrono::nanoseconds>(timeout, {}, kWaitMax));
  if (open_count() > 0) return;
  if (!failed_.empty()) DropHandle();
  answers.insert(answers.end(), std::make_move_iterator(failed_.begin()), std::make_move_iterator(failed_.end()));
  failed_.clear();
  requests_.clear();
  tags_.clear();
  is_answered_.clear();
  answered_count_ = 0;
  is_submitted_ = false;
}

// REQUIRES: something is open.
void CuFileBatch::Ask(std::vector<Answer>& answers, std::chrono::nanoseconds timeout) {
  const auto start = Clock::now();
  const size_t answered_before = answered_count_;
  auto count = static_cast<unsigned>(events_.size());
  CuFileError error = {.code = kCuFileSuccess, .cuda = kCudaSuccess};
  {
    const ContextScope context(*device_);
    if (!context.status().ok()) return FailWhatIsOpen({.sys_errno = EIO, .error = context.status().message()});
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    timespec wait = {.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
    error = cufile_.calls_->batch_get_status(handle_, timeout.count() > 0 ? 1 : 0, &count, events_.data(), &wait);
  }
  if (error.code == kCuFileSuccess) {
    for (const CuFileBatchEvent& event : std::span(events_).first(std::min<size_t>(count, events_.size()))) {
      Hear(event, answers);
    }
  }
  const auto waited = Clock::now() - start;
  const bool has_waited = error.code == kCuFileSuccess && waited >= timeout / 2;
  if (answered_count_ > answered_before || (has_waited && timeout.count() > 0)) is_silent_ = false;
  if (answered_count_ > answered_before || has_waited) return;

  // It has not waited, as where it knows of no request (or a signal came), or it has an error.
  if (!std::exchange(is_silent_, true) || start - silent_until_ > kSilenceGap) silent_since_ = start;
  silent_until_ = Clock::now();
  if (silent_until_ - silent_since_ <= kSilenceMax) {
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(kPause, timeout));
    return;
  }
  DropHandle();
  FailWhatIsOpen({.sys_errno = EIO,
                  .error = error.code == kCuFileSuccess ? "libcufile tells nothing of this request any more"
                                                        : "cuFileBatchIOGetStatus: " + Describe(error)});
}

// Once for each request, however often libcufile tells of it.
void CuFileBatch::Hear(const CuFileBatchEvent& event, std::vector<Answer>& answers) {
  const auto index = reinterpret_cast<uintptr_t>(event.cookie) - 1;
  if (index >= requests_.size() || is_answered_[index] || !IsOver(event.status)) return;
  is_answered_[index] = true;
  ++answered_count_;
  Answer answer = {.tag = tags_[index], .outcome = OutcomeOfEvent(event, requests_[index].size_bytes)};
  (answer.outcome.sys_errno == 0 ? answers : failed_).push_back(std::move(answer));
}

void CuFileBatch::FailWhatIsOpen(const CuFileOutcome& outcome) {
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (!is_answered_[i]) failed_.push_back({.tag = tags_[i], .outcome = outcome});
  }
  answered_count_ = requests_.size();
}

// Cancelling was seen to wait for what was on its way, and the documentation has it that ending a batch ends its
// operations. A device that is lost has no context to do it in, and nothing on its way.
void CuFileBatch::DropHandle() {
  void* const handle = std::exchange(handle_, nullptr);
  if (handle == nullptr) return;
  const ContextScope context(*device_);
  if (!context.status().ok()) return;
  cufile_.calls_->batch_cancel(handle);
  cufile_.calls_->batch_destroy(handle);
}

}  // namespace fastpersist
