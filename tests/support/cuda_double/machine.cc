#include "machine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace cuda_double {
namespace {

constexpr uint64_t kAllocationAlignment = uint64_t{2} << 20;
constexpr uint64_t kRegionBytes = uint64_t{1} << 40;
constexpr uint64_t kLeastRegionBytes = uint64_t{1} << 33;
constexpr int kFreshByte = 0xAB;
constexpr int kFreedByte = 0xDD;
// A thread without work ends after it, so that checks for threads left behind find none.
constexpr std::chrono::milliseconds kIdle{100};

constexpr std::string_view kCalls[] = {
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetCurrent",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuDeviceGetAttribute",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemGetAddressRange_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
};

std::string_view Bare(std::string_view name) {
  if (name.starts_with("cu")) name.remove_prefix(2);
  if (name.ends_with("_v2")) name.remove_suffix(3);
  return name;
}

// Not steady_clock: TSan of gcc 12 does not know the wait that goes by it.
using Clock = std::chrono::system_clock;

Machine* g_machine = nullptr;

// A fork copies the machine as it is between two calls.
void BeforeFork() { g_machine->mutex.lock(); }
void AfterForkInParent() { g_machine->mutex.unlock(); }
void AfterForkInChild() {
  Machine& machine = *g_machine;
  // As with CUDA: what was in use in the parent cannot be used here. Before cuInit nothing was.
  machine.is_forked = machine.is_initialized || !machine.streams.empty();
  for (const auto& [id, stream] : machine.streams) stream->is_dead = true;  // its thread is not here
  machine.worker_count = 0;
  machine.mutex.unlock();
}

uint64_t AlignUp(uint64_t number, uint64_t unit) { return (number + unit - 1) / unit * unit; }

// Addresses without memory; 0: there are none to be had.
uint64_t ReserveRegion(uint64_t* size_bytes) {
  for (*size_bytes = kRegionBytes; *size_bytes >= kLeastRegionBytes; *size_bytes /= 2) {
    void* const region = mmap(nullptr, *size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) continue;
    madvise(region, *size_bytes, MADV_DONTDUMP);
    return reinterpret_cast<uintptr_t>(region);
  }
  return 0;
}

}  // namespace

bool IsSticky(int error) {
  return error == 214 || error == 700 || error == 702 || error == 710 || (error >= 714 && error <= 719) || error == 999;
}

bool IsMapped(const void* memory, size_t size_bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(memory) / kPageBytes * kPageBytes;
  const uintptr_t end = AlignUp(reinterpret_cast<uintptr_t>(memory) + size_bytes, kPageBytes);
  // Has no effect but this answer.
  return msync(reinterpret_cast<void*>(first), end - first, MS_ASYNC) == 0;
}

std::string Hex(uint64_t number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(number));
  return text;
}

std::string_view CallNamed(std::string_view name) {
  for (const std::string_view call : kCalls) {
    if (Bare(call) == Bare(name)) return call;
  }
  return {};
}

Allocation::~Allocation() {
  if (memory != nullptr) munmap(memory, size_bytes);
}

bool Point::Reached() const { return stream->done_count >= position || stream->is_dead; }

Machine& Machine::Get() {
  static Machine* const machine = new Machine;
  return *machine;
}

Machine::Machine() {
  uint64_t size_bytes = 0;
  const uint64_t region = ReserveRegion(&size_bytes);
  region_next = AlignUp(region, kAllocationAlignment);
  region_end = region == 0 ? 0 : region + size_bytes;
  first_address = region_next;
  ForgetPlans();
  bus_ids.resize(1);
  g_machine = this;
  pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild);
}

// --- contexts and streams ---

std::shared_ptr<Context> Machine::ContextOf(int device) {
  std::shared_ptr<Context>& context = contexts[device];
  if (context == nullptr) {
    context = std::make_shared<Context>();
    context->id = NewHandle(0);
    context->device = device;
    context->default_stream = NewStream(context, true);
    context->default_stream->is_default = true;
  }
  return context;
}

std::shared_ptr<Context> Machine::FindContext(Handle id) const {
  for (const auto& [device, context] : contexts) {
    if (context->id == id) return context;
  }
  return nullptr;
}

std::shared_ptr<Stream> Machine::NewStream(const std::shared_ptr<Context>& context, bool is_blocking) {
  auto stream = std::make_shared<Stream>();
  stream->id = NewHandle(1);
  stream->context = context;
  stream->is_blocking = is_blocking;
  streams[stream->id] = stream;
  return stream;
}

std::shared_ptr<Stream> Machine::FindStream(Handle id) const {
  const auto found = streams.find(id);
  return found == streams.end() || found->second->is_destroyed ? nullptr : found->second;
}

Point Machine::Enqueue(const std::shared_ptr<Stream>& stream, Work work) {
  // The default stream and the blocking ones wait for each other.
  if (stream->is_default) {
    for (const auto& [id, other] : streams) {
      if (other == stream || other->context != stream->context || !other->is_blocking) continue;
      if (!other->queue.empty()) work.after.push_back({other, other->queued_count});
    }
  } else if (stream->is_blocking) {
    const auto& first = stream->context->default_stream;
    if (!first->queue.empty()) work.after.push_back({first, first->queued_count});
  }
  if (work.is_copy) peak_queued_copy_count = std::max(peak_queued_copy_count, ++queued_copy_count);
  stream->queue.push_back(std::move(work));
  ++stream->queued_count;
  if (!stream->has_worker && !is_stepped) {
    // The application's signals are for its own threads.
    sigset_t all_signals;
    sigset_t before;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &before);
    std::thread(&Machine::WorkOff, this, stream).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stream->has_worker = true;
    ++worker_count;
  }
  Notify();
  return {stream, stream->queued_count};
}

bool Machine::MayStart(const Stream& stream) const {
  if (stream.is_held || stream.queue.empty()) return false;
  const Work& work = stream.queue.front();
  if (stream.error != kSuccess || stream.context->error != kSuccess) return true;  // dropped, then
  if (work.is_copy && allowed_copy_count == 0) return false;
  return std::ranges::all_of(work.after, &Point::Reached);
}

void Machine::WorkOff(const std::shared_ptr<Stream>& stream) {
  pthread_setname_np(pthread_self(), "cuda-double");
  Lock lock(mutex);
  for (;;) {
    while (!stream->is_dead && !MayStart(*stream)) {
      if (!stream->queue.empty()) {
        changed.wait(lock);
      } else if (changed.wait_until(lock, Clock::now() + kIdle) == std::cv_status::timeout && stream->queue.empty()) {
        break;
      }
    }
    if (stream->is_dead || stream->queue.empty()) break;
    Work& work = stream->queue.front();  // stays where it is: the others add at the end only
    if (work.is_copy && allowed_copy_count > 0) --allowed_copy_count;
    const auto end = Clock::now() + work.duration + (work.is_copy ? copy_delay : std::chrono::microseconds(0));
    while (!stream->is_dead && stream->context->error == kSuccess && Clock::now() < end) changed.wait_until(lock, end);
    if (stream->is_dead) break;
    Finish(lock, *stream);
    Notify();
  }
  stream->has_worker = false;
  --worker_count;
  Notify();
}

// Do the first work of a stream, or let it fail. The stream may be dead afterwards.
void Machine::Finish(Lock& lock, Stream& stream) {
  const Work& work = stream.queue.front();
  int& context_error = stream.context->error;
  if (stream.error == kSuccess && context_error == kSuccess) {
    if (work.error == kSuccess) {
      Do(lock, work);
    } else {
      stream.error = work.error;
      stream.error_position = stream.done_count + 1;
      if (IsSticky(work.error)) context_error = work.error;
    }
  }
  if (stream.is_dead) return;
  if (work.is_copy) --queued_copy_count;
  stream.queue.pop_front();
  ++stream.done_count;
}

bool Machine::Step(Lock& lock, uint64_t choice) {
  std::vector<std::shared_ptr<Stream>> ready;
  for (const auto& [id, stream] : streams) {
    if (MayStart(*stream)) ready.push_back(stream);
  }
  if (ready.empty()) return false;
  Stream& stream = *ready[choice % ready.size()];
  if (stream.queue.front().is_copy && allowed_copy_count > 0) --allowed_copy_count;
  Finish(lock, stream);
  return true;
}

void Machine::Do(Lock& lock, const Work& work) {
  if (work.kind == Work::Kind::kMark || work.size_bytes == 0) return;
  if (work.host() != nullptr && !IsMapped(work.host(), work.size_bytes)) {
    Violate("a copy between device memory and " + Hex(reinterpret_cast<uintptr_t>(work.host())) + ", " +
            std::to_string(work.size_bytes) + " bytes: the host memory was unmapped before the copy was done");
    return;
  }
  lock.unlock();
  if (work.kind == Work::Kind::kFill) {
    std::memset(work.target, work.byte_value, work.size_bytes);
  } else if (work.kind == Work::Kind::kRows) {
    const size_t row_bytes = work.size_bytes;
    for (uint32_t i = 0; i < work.row_count; ++i) {
      std::memcpy(work.target + (work.places[i] * row_bytes), work.source + (work.rows[i] * row_bytes), row_bytes);
    }
  } else {
    std::memmove(work.target, work.source, work.size_bytes);
  }
  lock.lock();
  if (!work.is_copy) return;
  if (work.kind == Work::Kind::kToHost) copied_to_host_bytes += work.size_bytes;
  if (work.kind == Work::Kind::kToDevice) copied_to_device_bytes += work.size_bytes;
}

void Machine::Wait(Lock& lock, const Point& point) {
  const Stream& stream = *point.stream;
  changed.wait(lock, [&] {
    return point.Reached() || stream.context->error != kSuccess ||
           (stream.error != kSuccess && stream.error_position <= point.position);
  });
}

void Machine::Notify() {
  if (!is_forked) changed.notify_all();
}

void Machine::WaitForAll(Lock& lock) {
  const auto all = streams;
  for (const auto& [id, stream] : all) {
    changed.wait(lock, [&stream = stream] { return stream->queue.empty() || stream->is_dead; });
  }
}

int Machine::StateAt(const Point& point) const {
  const Stream& stream = *point.stream;
  if (stream.context->error != kSuccess) return stream.context->error;
  if (stream.is_dead) return kInvalidHandle;
  if (stream.error != kSuccess && stream.error_position <= point.position) return stream.error;
  return point.Reached() ? kSuccess : kNotReady;
}

// --- memory ---

std::shared_ptr<Allocation> Machine::Allocate(int device, size_t size_bytes) {
  if (size_bytes == 0 || size_bytes > region_end - std::min(region_end, region_next)) return nullptr;
  void* const memory =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  std::memset(memory, kFreshByte, size_bytes);
  auto allocation = std::make_shared<Allocation>();
  allocation->address = region_next;
  allocation->size_bytes = size_bytes;
  allocation->device = device;
  allocation->memory = static_cast<std::byte*>(memory);
  // The gap keeps an address behind the end from being one of the next.
  region_next += AlignUp(size_bytes + 1, kAllocationAlignment);
  allocations[allocation->address] = allocation;
  return allocation;
}

std::shared_ptr<Allocation> Machine::FindAllocation(uint64_t address, size_t size_bytes) const {
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return nullptr;
  const auto& allocation = (--found)->second;
  const uint64_t inside = address - allocation->address;
  if (inside >= allocation->size_bytes || size_bytes > allocation->size_bytes - inside) return nullptr;
  return allocation;
}

bool Machine::IsRegistered(uint64_t address, size_t size_bytes) const {
  const uint64_t end = address + size_bytes;
  while (address < end) {
    const auto after = registrations.upper_bound(address);
    if (after == registrations.begin() || address >= std::prev(after)->second.end) return false;
    address = std::prev(after)->second.end;
  }
  return true;
}

void Machine::Free(const std::shared_ptr<Allocation>& allocation, const char* call) {
  for (const auto& [id, stream] : streams) {
    for (const Work& work : stream->queue) {
      if (work.target_allocation != allocation && work.source_allocation != allocation) continue;
      Violate(std::string(call) + ": the memory at " + Hex(allocation->address) + " is used by work that is queued");
    }
  }
  std::memset(allocation->memory, kFreedByte, allocation->size_bytes);
  allocations.erase(allocation->address);
}

uint64_t Machine::CountQueued(uintptr_t first, uintptr_t end) const {
  uint64_t count = 0;
  for (const auto& [id, stream] : streams) {
    for (const Work& work : stream->queue) {
      const auto host = reinterpret_cast<uintptr_t>(work.host());
      if (host != 0 && host < end && host + work.size_bytes > first) ++count;
    }
  }
  return count;
}

// --- between tests ---

void Machine::ForgetPlans() {
  for (const std::string_view call : kCalls) call_counts[std::string(call)] = 0;
  copy_counts.clear();
  failures.clear();
  async_failures.clear();
  violations.clear();
  registration_limit_bytes = UINT64_MAX;
  pageable_waits = true;
  registrations_are_held = false;
  copy_delay = std::chrono::microseconds(0);
  allowed_copy_count = -1;
  peak_queued_copy_count = queued_copy_count;
  pageable_copy_count = 0;
  copied_to_host_bytes = 0;
  copied_to_device_bytes = 0;
}

void Machine::Reset(Lock& lock, int new_device_count) {
  for (const auto& [id, stream] : streams) stream->is_dead = true;
  Notify();
  changed.wait(lock, [this] { return worker_count == 0; });
  for (const auto& [id, stream] : streams) stream->queue.clear();
  for (const auto& [device, context] : contexts) context->default_stream = nullptr;  // each holds the other
  streams.clear();
  events.clear();
  contexts.clear();
  allocations.clear();
  registrations.clear();
  modules.clear();
  row_kernels.clear();
  first_address = region_next;
  queued_copy_count = 0;
  ForgetPlans();
  device_count = new_device_count;
  bus_ids.assign(static_cast<size_t>(std::max(device_count, 0)), "");
  driver_version = 12040;
  reads_host_pointers = true;
  ++generation;
}

void Machine::Clear(Lock& lock) {
  registrations_are_held = false;
  copy_delay = std::chrono::microseconds(0);
  allowed_copy_count = -1;
  for (const auto& [id, stream] : streams) {
    stream->is_held = false;
    stream->capture = kNoCapture;
  }
  Notify();
  WaitForAll(lock);
  for (const auto& [id, stream] : streams) stream->error = kSuccess;
  for (const auto& [device, context] : contexts) context->error = kSuccess;
  ForgetPlans();
}

}  // namespace cuda_double
