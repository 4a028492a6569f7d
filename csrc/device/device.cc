#include "device/device.h"

#include <linux/mempolicy.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <climits>
#include <map>
#include <memory>
#include <thread>

#include "core/check.h"
#include "core/kernel_file.h"

namespace fastpersist {
namespace {

constexpr uintptr_t kPageBytes = 4096;
// A copy of a ring's buffer takes 100 µs or more, so most waits end in a sleep. The first checks do not sleep: they
// catch copies that are almost complete.
constexpr int kSpinCount = 16;
constexpr std::chrono::microseconds kSleepMin{20};
constexpr std::chrono::microseconds kSleepMax{200};
constexpr std::chrono::milliseconds kPollInterval{50};

// The driver queues about a thousand commands (copies, and some marks) ahead of the device and blocks at the next one.
constexpr uint64_t kWindowCopies = 128;
constexpr size_t kWindowCount = 6;

std::atomic<std::chrono::milliseconds> g_grace{Grace::kDefault};

bool OneNodeOnly() {
  // "0", "0-1", "0,2"
  return ReadKernelFile("/sys/devices/system/node/online").find_first_of("-,") == std::string::npos;
}

// Advice: a sandbox may refuse the call, and pages on another node are only slower.
void PreferNode(std::span<std::byte> memory, int node) {
  constexpr size_t kWordBits = CHAR_BIT * sizeof(unsigned long);
  std::array<unsigned long, 16> nodes = {};
  if (node < 0 || static_cast<size_t>(node) >= nodes.size() * kWordBits) return;
  nodes[static_cast<size_t>(node) / kWordBits] = 1UL << (static_cast<size_t>(node) % kWordBits);
  // The kernel uses one bit less than the given number.
  syscall(SYS_mbind, memory.data(), memory.size(), MPOL_PREFERRED, nodes.data(), nodes.size() * kWordBits + 1, 0);
}

std::string LockLimit(size_t size_bytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= size_bytes)
    return "";
  return "; this process may lock " + std::to_string(limit.rlim_cur) +
         " bytes in all (RLIMIT_MEMLOCK; ulimit -l shows and raises it, in KiB)";
}

}  // namespace

Result<Device*> Device::Get(int ordinal) {
  Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  // CudaDriver::Get has refused the child of a process that was here. So no thread that the child lacks holds the mutex
  // or has left a device half-made.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>;
  const std::lock_guard lock(*mutex);
  if (const auto known = devices->find(ordinal); known != devices->end() && known->second->is_open()) {
    return known->second.get();  // even if the driver reports errors by now
  }
  int count = 0;
  FP_RETURN_IF_ERROR(driver.value()->Check(driver.value()->DeviceGetCount(&count), "counting the CUDA devices"));
  if (ordinal < 0 || ordinal >= count) {
    return Status::Error(StatusCode::kDeviceError, "there is no cuda:" + std::to_string(ordinal) +
                                                       ": this process has " + std::to_string(count) +
                                                       " CUDA devices, of those that CUDA_VISIBLE_DEVICES names");
  }
  std::unique_ptr<Device>& device = (*devices)[ordinal];
  if (device == nullptr) device.reset(new Device(*driver.value(), ordinal));
  FP_RETURN_IF_ERROR(device->Open());
  return device.get();
}

Status Device::Open() {
  if (is_open()) return Status::Ok();
  if (context_ == nullptr) {
    CudaDeviceId id = 0;
    FP_RETURN_IF_ERROR(Check(driver_.DeviceGet(&id, ordinal_), "opening"));
    std::array<char, 64> bus_id = {};
    if (driver_.DeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()) - 1, id) == kCudaSuccess &&
        !OneNodeOnly()) {
      std::string name(bus_id.data());
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
      numa_node_ = static_cast<int>(ReadKernelNumber("/sys/bus/pci/devices/" + name + "/numa_node").value_or(-1));
    }
    CudaContext context = nullptr;
    FP_RETURN_IF_ERROR(Check(driver_.DevicePrimaryCtxRetain(&context, id), "opening"));
    context_ = context;
  }
  const ContextScope scope(*this);
  FP_RETURN_IF_ERROR(scope.status());
  for (CopyStream* const copies : {&to_host_, &to_device_}) {
    if (copies->stream_ != nullptr) continue;
    CudaStream stream = nullptr;
    FP_RETURN_IF_ERROR(Check(driver_.StreamCreate(&stream, kCudaStreamNonBlocking), "making a stream on"));
    copies->stream_ = stream;
  }
  return Status::Ok();
}

Status Device::Check(CudaResult result, const char* what) const {
  if (result == kCudaSuccess) return Status::Ok();
  return driver_.Check(result, std::string(what) + " cuda:" + std::to_string(ordinal_));
}

// REQUIRES of the three below: in a ContextScope.
Result<CudaEvent> Device::TakeEvent() {
  {
    const std::lock_guard lock(events_mutex_);
    if (!free_events_.empty()) {
      CudaEvent event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
  }
  CudaEvent event = nullptr;
  FP_RETURN_IF_ERROR(Check(driver_.EventCreate(&event, kCudaEventDisableTiming), "making an event on"));
  return event;
}

Status Device::RefuseCapture(CudaStream caller) const {
  int capturing = 0;
  const CudaResult result = driver_.StreamIsCapturing(caller, &capturing);
  if (result != kCudaCaptureImplicit) {  // the default stream waits for one that is captured
    FP_RETURN_IF_ERROR(Check(result, "looking at the caller's stream on"));
    if (capturing == 0) return Status::Ok();
  }
  return Status::Error(StatusCode::kUnsupported, "the stream of cuda:" + std::to_string(ordinal_) +
                                                     " is being captured into a CUDA graph: save or load before or "
                                                     "after the capture");
}

Status Device::Order(CudaStream earlier, CudaStream later) {
  Result<CudaEvent> event = TakeEvent();
  if (!event.ok()) return event.status();
  CudaResult result = driver_.EventRecord(event.value(), earlier);
  if (result == kCudaSuccess) result = driver_.StreamWaitEvent(later, event.value(), 0);
  // A waiting stream remembers what the event stood for; the event may be recorded again.
  PutEvent(event.value());
  return Check(result, "ordering streams of");
}

void Device::PutEvent(CudaEvent event) {
  const std::lock_guard lock(events_mutex_);
  free_events_.push_back(event);
}

Result<std::pair<CudaAddress, size_t>> Device::RangeOf(CudaAddress address) {
  const ContextScope scope(*this);
  FP_RETURN_IF_ERROR(scope.status());
  CudaAddress base = 0;
  size_t size_bytes = 0;
  FP_RETURN_IF_ERROR(
      Check(driver_.MemGetAddressRange(&base, &size_bytes, address), "finding the allocation of an address on"));
  return std::pair(base, size_bytes);
}

namespace {

thread_local const Device* t_entered = nullptr;  // the device of this thread's innermost scope; null: none

}  // namespace

Status ContextScope::Enter(const Device& device) {
  FP_RETURN_IF_ERROR(CudaDriver::Get().status());
  if (t_entered == &device) return Status::Ok();
  const CudaDriver& driver = device.driver_;
  result_ = driver.CtxPushCurrent(device.context_);
  if (result_ != kCudaSuccess) return device.Check(result_, "using");
  driver_ = &driver;
  outer_ = std::exchange(t_entered, &device);
  relaxed_ = driver.ThreadExchangeStreamCaptureMode(&mode_) == kCudaSuccess;
  return Status::Ok();
}

ContextScope::~ContextScope() {
  if (driver_ == nullptr) return;
  t_entered = outer_;
  if (relaxed_) driver_->ThreadExchangeStreamCaptureMode(&mode_);
  CudaContext context = nullptr;
  driver_->CtxPopCurrent(&context);
}

CopyMark::CopyMark(CopyMark&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      stream_(std::exchange(other.stream_, nullptr)),
      event_(std::exchange(other.event_, nullptr)) {}

CopyMark& CopyMark::operator=(CopyMark&& other) noexcept {
  CopyMark taken(std::move(other));  // also from itself
  std::swap(device_, taken.device_);
  std::swap(stream_, taken.stream_);
  std::swap(event_, taken.event_);
  return *this;
}

CopyMark::~CopyMark() {
  // A forked child touches neither the event nor the mutex.
  if (device_ != nullptr && CudaDriver::Get().ok()) device_->PutEvent(event_);
}

Result<bool> CopyMark::IsComplete() const {
  FP_CHECK(device_ != nullptr);
  const ContextScope scope(*device_);
  FP_RETURN_IF_ERROR(scope.status());
  const CudaResult result = device_->driver_.EventQuery(event_);
  if (result == kCudaNotReady) return false;
  FP_RETURN_IF_ERROR(device_->Check(result, "waiting for copies of"));
  return true;
}

Status CopyMark::Wait(const std::function<Status()>& poll) const {
  auto next_poll = std::chrono::steady_clock::now() + kPollInterval;
  auto sleep = kSleepMin;
  for (int look = 0;; ++look) {
    Result<bool> complete = IsComplete();
    if (!complete.ok()) return complete.status();
    if (complete.value()) return Status::Ok();
    if (look < kSpinCount) continue;
    std::this_thread::sleep_for(sleep);
    sleep = std::min(2 * sleep, kSleepMax);
    if (!poll || std::chrono::steady_clock::now() < next_poll) continue;
    FP_RETURN_IF_ERROR(poll());
    next_poll = std::chrono::steady_clock::now() + kPollInterval;
  }
}

CopyEnd::CopyEnd(CopyStream& stream) : stream_(&stream) {
  Result<CopyMark> mark = stream.Mark();
  if (mark.ok()) mark_ = std::make_shared<const CopyMark>(std::move(mark).value());
}

CopyEnd::CopyEnd(std::shared_ptr<const CopyMark> mark) : mark_(std::move(mark)), stream_(mark_->stream_) {}

// An error of the query alone ends no copy.
bool CopyEnd::IsComplete() const {
  if (seen_->load()) return true;
  Result<bool> marked = mark_ == nullptr ? Result<bool>(stream_->AllComplete()) : mark_->IsComplete();
  const bool is_complete = marked.ok() ? marked.value() : stream_->AllComplete();
  if (is_complete) seen_->store(true);
  return is_complete;
}

CopiesComplete CompletionOf(std::vector<CopyEnd> ends) {
  return [ends = std::move(ends)] {
    return std::all_of(ends.begin(), ends.end(), [](const CopyEnd& end) { return end.IsComplete(); });
  };
}

void Grace::Set(std::chrono::milliseconds duration) { g_grace = duration; }

Grace::Grace() : deadline_(std::chrono::steady_clock::now() + g_grace.load()) {}

bool Grace::IsOver() const { return std::chrono::steady_clock::now() >= deadline_; }

bool Grace::IsOver(const CopyEnd& end) const { return IsOver() || end.stream_->GivenUpSince().has_value(); }

bool Grace::WaitFor(std::span<const CopyEnd> ends, const std::function<void()>& meanwhile) const {
  auto next_call = std::chrono::steady_clock::now() + kPollInterval;
  auto sleep = kSleepMin;
  for (size_t first = 0; first < ends.size();) {
    if (ends[first].IsComplete()) {
      ++first;
      continue;
    }
    if (IsOver(ends[first])) return false;
    std::this_thread::sleep_for(sleep);
    sleep = std::min(2 * sleep, kSleepMax);
    const auto now = std::chrono::steady_clock::now();
    if (!meanwhile || now < next_call) continue;
    meanwhile();
    next_call = now + kPollInterval;
  }
  return true;
}

CopiesComplete Grace::GiveUp(std::vector<CopyEnd> ends) {
  for (const CopyEnd& end : ends) {
    CopyStream& stream = *end.stream_;
    if (end.IsComplete()) continue;
    const std::lock_guard lock(stream.given_up_mutex_);
    if (stream.given_up_.empty()) stream.given_up_since_ = std::chrono::steady_clock::now();
    stream.given_up_.push_back(end);
    stream.has_given_up_ = true;
  }
  return CompletionOf(std::move(ends));
}

Status CopyStream::FollowCaller(uintptr_t caller_stream) {
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  auto* const caller = reinterpret_cast<CudaStream>(caller_stream);
  FP_RETURN_IF_ERROR(device_.RefuseCapture(caller));
  return device_.Order(caller, stream_);
}

Status CopyStream::HoldCaller(uintptr_t caller_stream) {
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  auto* const caller = reinterpret_cast<CudaStream>(caller_stream);
  FP_RETURN_IF_ERROR(device_.RefuseCapture(caller));
  return device_.Order(stream_, caller);
}

Status CopyStream::ToHost(std::byte* target, CudaAddress source, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return Started(device_.driver_.MemcpyDtoHAsync(target, source, size_bytes, stream_), "copying to the host from");
}

Status CopyStream::ToDevice(CudaAddress target, const std::byte* source, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return Started(device_.driver_.MemcpyHtoDAsync(target, source, size_bytes, stream_), "copying from the host to");
}

Status CopyStream::Within(CudaAddress target, CudaAddress source, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return Started(device_.driver_.MemcpyDtoDAsync(target, source, size_bytes, stream_), "copying within");
}

Status CopyStream::Zero(CudaAddress target, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return Started(device_.driver_.MemsetD8Async(target, 0, size_bytes, stream_), "clearing memory of");
}

// Marks every kWindowCopies-th copy for AwaitRoom. A failed mark is omitted: an error from here means that the copy was
// not started, and the caller would give away memory that the copy fills.
Status CopyStream::Started(CudaResult result, const char* what) {
  FP_RETURN_IF_ERROR(device_.Check(result, what));
  {
    const std::lock_guard lock(windows_mutex_);
    if (++started_count_ % kWindowCopies != 0) return Status::Ok();
  }
  Result<CopyMark> mark = Mark();
  if (!mark.ok()) return Status::Ok();
  const std::lock_guard lock(windows_mutex_);
  windows_.push_back(std::make_shared<const CopyMark>(std::move(mark).value()));
  if (windows_.size() > 2 * kWindowCount) windows_.pop_front();  // no thread waits in AwaitRoom: the driver blocks
  return Status::Ok();
}

Status CopyStream::AwaitRoom(bool is_pinned, const std::function<Status()>& poll) {
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  if (!is_pinned) {
    Result<CopyMark> mark = Mark();
    return mark.ok() ? mark.value().Wait(poll) : mark.status();
  }
  while (true) {
    std::shared_ptr<const CopyMark> first;
    {
      const std::lock_guard lock(windows_mutex_);
      if (windows_.size() < kWindowCount) return Status::Ok();
      first = windows_.front();
    }
    FP_RETURN_IF_ERROR(first->Wait(poll));
    const std::lock_guard lock(windows_mutex_);
    if (!windows_.empty() && windows_.front() == first) windows_.pop_front();
  }
}

Result<bool> CopyStream::HasRoom(bool is_pinned) {
  FP_RETURN_IF_ERROR(RefuseGivenUp());
  if (!is_pinned) {
    const ContextScope scope(device_);
    FP_RETURN_IF_ERROR(scope.status());
    const CudaResult result = device_.driver_.StreamQuery(stream_);
    if (result == kCudaNotReady) return false;
    FP_RETURN_IF_ERROR(device_.Check(result, "looking for room in a stream of"));
    return true;
  }
  const std::lock_guard lock(windows_mutex_);
  while (windows_.size() >= kWindowCount) {
    Result<bool> complete = windows_.front()->IsComplete();
    if (!complete.ok() || !complete.value()) return complete;
    windows_.pop_front();
  }
  return true;
}

// Whether all copies of the stream are complete. A lost device makes none any more; any other error says nothing about
// them. Never waits, unlike a synchronisation.
bool CopyStream::AllComplete() const {
  const ContextScope scope(device_);
  if (scope.status().code() == StatusCode::kUnsupported) return true;  // the process ends, and CUDA with it
  if (!scope.status().ok()) return device_.driver_.IsLost(scope.result_);
  const CudaResult result = device_.driver_.StreamQuery(stream_);
  return result == kCudaSuccess || device_.driver_.IsLost(result);
}

std::optional<std::chrono::steady_clock::time_point> CopyStream::GivenUpSince() {
  if (!has_given_up_.load(std::memory_order_relaxed)) return std::nullopt;
  const std::lock_guard lock(given_up_mutex_);
  std::erase_if(given_up_, [](const CopyEnd& end) { return end.IsComplete(); });
  if (!given_up_.empty()) return given_up_since_;
  has_given_up_ = false;
  return std::nullopt;
}

Status CopyStream::RefuseGivenUp() {
  const auto since = GivenUpSince();
  if (!since.has_value()) return Status::Ok();
  const auto given_up = std::chrono::steady_clock::now() - *since;
  const auto given_up_s = std::chrono::duration_cast<std::chrono::seconds>(given_up).count();
  return Status::Error(StatusCode::kDeviceError,
                       "cuda:" + std::to_string(device_.ordinal()) +
                           " has not completed the copies that a transfer gave up " + std::to_string(given_up_s) +
                           " s ago: the stream they follow stands still, as behind a collective whose peer is gone; "
                           "abort that (its process group) or start a new process; saves of CPU tensors go on");
}

Result<CopyMark> CopyStream::Mark() {
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  Result<CudaEvent> event = device_.TakeEvent();
  if (!event.ok()) return event.status();
  CopyMark mark(&device_, this, event.value());  // returns the event if recording fails
  FP_RETURN_IF_ERROR(device_.Check(device_.driver_.EventRecord(event.value(), stream_), "marking copies of"));
  return mark;
}

Pinned Pinned::Register(Device& device, std::span<std::byte> memory) {
  FP_CHECK(reinterpret_cast<uintptr_t>(memory.data()) % kPageBytes == 0);
  Pinned pinned;
  if (memory.empty()) {
    pinned.why_not_ = "there is no memory to pin";
    return pinned;
  }
  const ContextScope scope(device);
  if (!scope.status().ok()) {
    pinned.why_not_ = scope.status().message();
    return pinned;
  }
  PreferNode(memory, device.numa_node_);
  const CudaResult result = device.driver_.MemHostRegister(memory.data(), memory.size(), kCudaHostRegisterPortable);
  if (result == kCudaSuccess) {
    pinned.memory_ = memory.data();
    pinned.device_ = &device;
  } else {
    const std::string what = "pinning " + std::to_string(memory.size()) + " bytes for";
    pinned.why_not_ = device.Check(result, what.c_str()).message() + LockLimit(memory.size());
  }
  return pinned;
}

Pinned::Pinned(Pinned&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      device_(std::exchange(other.device_, nullptr)),
      why_not_(std::move(other.why_not_)) {}

Pinned& Pinned::operator=(Pinned&& other) noexcept {
  Pinned taken(std::move(other));  // also from itself
  std::swap(memory_, taken.memory_);
  std::swap(device_, taken.device_);
  why_not_.swap(taken.why_not_);
  return *this;
}

Pinned::~Pinned() { (void)Release(); }

bool Pinned::Release() {
  std::byte* const memory = std::exchange(memory_, nullptr);
  if (memory == nullptr) return true;
  const ContextScope scope(*device_);
  if (scope.status().code() == StatusCode::kUnsupported) return true;
  if (scope.status().ok() && device_->driver_.MemHostUnregister(memory) == kCudaSuccess) return true;
  KeepMapped(memory);  // the device is lost, and the memory still registered
  return false;
}

}  // namespace fastpersist
