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
#include <fstream>
#include <map>
#include <memory>
#include <thread>

#include "core/check.h"

namespace fastpersist {
namespace {

constexpr uintptr_t kPageBytes = 4096;
// Copies of a ring's buffer take 100 µs and more, so that most waits end while asleep. The first looks catch those
// that are as good as there.
constexpr int kSpinCount = 16;
constexpr std::chrono::microseconds kSleepMin{20};
constexpr std::chrono::microseconds kSleepMax{200};
constexpr std::chrono::milliseconds kPollInterval{50};

int ReadNode(const std::string& path) {
  int node = -1;
  std::ifstream(path) >> node;
  return node;
}

bool OneNodeOnly() {
  std::string online;  // "0", "0-1", "0,2"
  std::ifstream("/sys/devices/system/node/online") >> online;
  return online.find_first_of("-,") == std::string::npos;
}

// Advice: a sandbox may refuse the call, and pages on another node are only slower.
void PreferNode(std::span<std::byte> memory, int node) {
  constexpr size_t kWordBits = CHAR_BIT * sizeof(unsigned long);
  std::array<unsigned long, 16> nodes = {};
  if (node < 0 || static_cast<size_t>(node) >= nodes.size() * kWordBits) return;
  nodes[static_cast<size_t>(node) / kWordBits] = 1UL << (static_cast<size_t>(node) % kWordBits);
  // The kernel takes one bit less than it is told.
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
  // Beyond this line no process comes whose parent was here: what these guard is never held or half-made by a thread
  // that did not come along.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>;
  const std::lock_guard lock(*mutex);
  if (const auto known = devices->find(ordinal); known != devices->end() && known->second->is_open()) {
    return known->second.get();  // whatever the driver has to say by now
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
      numa_node_ = ReadNode("/sys/bus/pci/devices/" + name + "/numa_node");
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
  FP_RETURN_IF_ERROR(Check(driver_.StreamIsCapturing(caller, &capturing), "looking at the caller's stream on"));
  if (capturing == 0) return Status::Ok();
  return Status::Error(StatusCode::kUnsupported, "the stream of cuda:" + std::to_string(ordinal_) +
                                                     " is being captured into a CUDA graph: save or load before or "
                                                     "after the capture");
}

Status Device::Order(CudaStream earlier, CudaStream later) {
  Result<CudaEvent> event = TakeEvent();
  if (!event.ok()) return event.status();
  CudaResult result = driver_.EventRecord(event.value(), earlier);
  if (result == kCudaSuccess) result = driver_.StreamWaitEvent(later, event.value(), 0);
  // A stream waits for what the event stood for when it was told to; the event may stand for something else now.
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

Status ContextScope::Enter(const Device& device) {
  FP_RETURN_IF_ERROR(CudaDriver::Get().status());
  const CudaDriver& driver = device.driver_;
  const CudaResult result = driver.CtxPushCurrent(device.context_);
  if (result != kCudaSuccess) return device.Check(result, "using");
  driver_ = &driver;
  relaxed_ = driver.ThreadExchangeStreamCaptureMode(&mode_) == kCudaSuccess;
  return Status::Ok();
}

ContextScope::~ContextScope() {
  if (driver_ == nullptr) return;
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

Result<bool> CopyMark::Reached() const {
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
    Result<bool> reached = Reached();
    if (!reached.ok()) return reached.status();
    if (reached.value()) return Status::Ok();
    if (look < kSpinCount) continue;
    std::this_thread::sleep_for(sleep);
    sleep = std::min(2 * sleep, kSleepMax);
    if (!poll || std::chrono::steady_clock::now() < next_poll) continue;
    FP_RETURN_IF_ERROR(poll());
    next_poll = std::chrono::steady_clock::now() + kPollInterval;
  }
}

void CopyMark::WaitOrSynchronize() const {
  if (!Wait({}).ok()) stream_->Synchronize();
}

Status CopyStream::FollowCaller(uintptr_t caller_stream) {
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  auto* const caller = reinterpret_cast<CudaStream>(caller_stream);
  FP_RETURN_IF_ERROR(device_.RefuseCapture(caller));
  return device_.Order(caller, stream_);
}

Status CopyStream::HoldCaller(uintptr_t caller_stream) {
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  auto* const caller = reinterpret_cast<CudaStream>(caller_stream);
  FP_RETURN_IF_ERROR(device_.RefuseCapture(caller));
  return device_.Order(stream_, caller);
}

Status CopyStream::ToHost(std::byte* target, CudaAddress source, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return device_.Check(device_.driver_.MemcpyDtoHAsync(target, source, size_bytes, stream_),
                       "copying to the host from");
}

Status CopyStream::ToDevice(CudaAddress target, const std::byte* source, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return device_.Check(device_.driver_.MemcpyHtoDAsync(target, source, size_bytes, stream_),
                       "copying from the host to");
}

Status CopyStream::Within(CudaAddress target, CudaAddress source, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return device_.Check(device_.driver_.MemcpyDtoDAsync(target, source, size_bytes, stream_), "copying within");
}

Status CopyStream::Zero(CudaAddress target, size_t size_bytes) {
  if (size_bytes == 0) return Status::Ok();
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  return device_.Check(device_.driver_.MemsetD8Async(target, 0, size_bytes, stream_), "clearing memory of");
}

void CopyStream::Synchronize() {
  const ContextScope scope(device_);
  if (scope.status().ok()) (void)device_.driver_.StreamSynchronize(stream_);
}

Result<CopyMark> CopyStream::Mark() {
  const ContextScope scope(device_);
  FP_RETURN_IF_ERROR(scope.status());
  Result<CudaEvent> event = device_.TakeEvent();
  if (!event.ok()) return event.status();
  CopyMark mark(&device_, this, event.value());  // gives the event back where this fails
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

Pinned::~Pinned() {
  if (memory_ == nullptr) return;
  const ContextScope scope(*device_);
  if (scope.status().ok()) device_->driver_.MemHostUnregister(memory_);  // an error: the device is lost
}

}  // namespace fastpersist
