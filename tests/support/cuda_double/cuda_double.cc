// The calls of the CUDA driver that the product uses, and some that tests use, over the machine of machine.h. They
// refuse what CUDA refuses. Where CUDA would let misuse pass, or answer with an error that could be overlooked, the
// misuse is written down as a violation, too.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "error_words.h"
#include "machine.h"

namespace cuda_double {

namespace {

// CUstreamCaptureMode: whether captures elsewhere keep a thread from calls that could break into them.
enum CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct ThreadState {
  uint64_t generation = 0;
  std::vector<Handle> contexts;
  int capture_mode = kGlobal;
};

// Of the calling thread; that from before a reset is gone.
ThreadState& OfThread(const Machine& machine) {
  thread_local ThreadState state;
  if (state.generation != machine.generation) state = {machine.generation, {}, kGlobal};
  return state;
}

std::vector<Handle>& CurrentStack(const Machine& machine) { return OfThread(machine).contexts; }

// Each with what those before it need. kContextOnly: and is safe while a stream is captured.
enum Needs { kNothing, kInit, kContextOnly, kContext };

// One call: holds the machine's mutex for its time, and knows first what makes any call fail.
class Call {
 public:
  Call(const char* name, Needs needs) : name_(name), machine_(Machine::Get()), lock_(machine_.mutex) {
    result_ = Begin(needs);
    machine_.Notify();
  }

  bool ok() const { return result_ == kSuccess; }
  int result() const { return result_; }
  Machine& machine() { return machine_; }
  Lock& lock() { return lock_; }
  const std::string& name() const { return name_; }
  const std::shared_ptr<Context>& context() const { return context_; }

  int Fail(int error) { return result_ = error; }
  // Refuse misuse, which shows in the violations, too.
  int Refuse(int error, const std::string& what) {
    machine_.Violate(name_ + ": " + what);
    return Fail(error);
  }

  // The stream of a handle; null, refused, where there is none or it cannot be used any more.
  std::shared_ptr<Stream> StreamOf(Handle id) {
    auto stream = FindStream(id);
    if (stream != nullptr && stream->capture != kNoCapture) {
      stream->capture = kCaptureInvalidated;
      Refuse(kCaptureUnsupported, "the stream " + Hex(id) + " is captured");
      return nullptr;
    }
    if (stream != nullptr && IsImplicitlyCaptured(*stream)) {
      Refuse(kCaptureImplicit, "the default stream is used while a stream that it waits for is captured");
      return nullptr;
    }
    if (stream == nullptr) {
      Refuse(kInvalidHandle, "the stream " + Hex(id) + " was destroyed or never made");
    } else if (stream->context->error != kSuccess) {
      Fail(stream->context->error);
      stream = nullptr;
    } else if (stream->error != kSuccess) {
      Fail(stream->error);
      stream = nullptr;
    }
    return stream;
  }

  std::shared_ptr<Stream> FindStream(Handle id) const {
    return id <= 1 ? context_->default_stream : machine_.FindStream(id);  // 1: CU_STREAM_LEGACY
  }

  bool IsImplicitlyCaptured(const Stream& stream) const {
    return stream.is_default && std::ranges::any_of(machine_.streams, [&](const auto& of_id) {
             const Stream& other = *of_id.second;
             return other.capture != kNoCapture && other.is_blocking && other.context == stream.context;
           });
  }

  std::shared_ptr<Event> EventOf(Handle id) {
    const auto found = machine_.events.find(id);
    if (found != machine_.events.end()) {
      const int error = found->second->context->error;
      if (error == kSuccess) return found->second;
      Fail(error);
    } else {
      Refuse(kInvalidHandle, "the event " + Hex(id) + " was destroyed or never made");
    }
    return nullptr;
  }

 private:
  int Begin(Needs needs) {
    const uint64_t count = ++machine_.call_counts.find(name_)->second;
    if (machine_.is_forked) {
      machine_.Violate(name_ + ": called in a child of the process that uses CUDA");
      return kNotInitialized;
    }
    if (needs >= kContextOnly && machine_.is_initialized) {
      const auto& stack = CurrentStack(machine_);
      context_ = stack.empty() ? nullptr : machine_.FindContext(stack.back());
    }
    for (const FailurePlan& plan : machine_.failures) {
      if (plan.call != name_ || (plan.at_count != 0 && plan.at_count != count)) continue;
      if (context_ != nullptr && IsSticky(plan.error)) context_->error = plan.error;
      return plan.error;
    }
    if (needs == kNothing) return kSuccess;
    if (!machine_.is_initialized) return Refuse(kNotInitialized, "called before cuInit");
    if (needs == kInit) return kSuccess;
    if (context_ == nullptr) return Refuse(kInvalidContext, "no context is current in this thread");
    if (context_->error != kSuccess || needs == kContextOnly) return context_->error;
    return BreakIntoCaptures();
  }

  // Calls that could break into the capture of a stream are forbidden to all threads that did not relax that, and make
  // it invalid. CUDA lets some of them pass; the product has no reason to make use of that.
  int BreakIntoCaptures() {
    const int mode = OfThread(machine_).capture_mode;
    for (const auto& [id, stream] : machine_.streams) {
      if (stream->capture == kNoCapture || mode == kRelaxed) continue;
      if (mode == kThreadLocal && stream->captured_by != std::this_thread::get_id()) continue;
      stream->capture = kCaptureInvalidated;
      return Refuse(kCaptureUnsupported, "called while the stream " + Hex(id) + " is captured");
    }
    return kSuccess;
  }

  const std::string name_;
  Machine& machine_;
  Lock lock_;
  std::shared_ptr<Context> context_;  // the current one
  int result_ = kSuccess;
};

std::string BytesAt(uint64_t address, size_t size_bytes) {
  return std::to_string(size_bytes) + " bytes at " + Hex(address);
}

// The allocation under a side of a copy; null: refused.
std::shared_ptr<Allocation> DeviceSide(Call& call, const Stream& stream, uint64_t address, size_t size_bytes) {
  auto allocation = call.machine().FindAllocation(address, size_bytes);
  if (allocation == nullptr) {
    call.Refuse(kInvalidValue,
                BytesAt(address, size_bytes) + " are not inside one allocation of device memory (freed?)");
  } else if (allocation->device != kAnyDevice && allocation->device != stream.context->device) {
    // Works with CUDA, by way of the other device.
    call.machine().Violate(call.name() + ": memory of device " + std::to_string(allocation->device) +
                           " is copied in a stream of device " + std::to_string(stream.context->device));
  }
  return allocation;
}

enum class HostMemory { kPinned, kPageable, kRefused };

HostMemory HostSide(Call& call, const Stream& stream, const void* memory, size_t size_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t end = first + size_bytes;
  if (memory == nullptr) {
    call.Refuse(kInvalidValue, "the host memory is null");
    return HostMemory::kRefused;
  }
  for (const auto& [first_page, registration] : call.machine().registrations) {
    if (end <= registration.first || first >= registration.end) continue;
    if (first < registration.first || end > registration.end) {
      call.Refuse(kInvalidValue, BytesAt(first, size_bytes) + " of host memory are registered in part only (" +
                                     Hex(registration.first) + " … " + Hex(registration.end) + ")");
      return HostMemory::kRefused;
    }
    const bool is_seen = registration.is_portable || registration.context == stream.context->id;
    return is_seen ? HostMemory::kPinned : HostMemory::kPageable;
  }
  return HostMemory::kPageable;
}

// Count a copy, and plan its failure where a test wants it.
void CountCopy(Call& call, Work& work) {
  Machine& machine = call.machine();
  const uint64_t count = ++machine.copy_counts[call.name()];
  for (const FailurePlan& plan : machine.async_failures) {
    if (plan.call == call.name() && (plan.at_count == 0 || plan.at_count == count)) work.error = plan.error;
  }
  work.is_copy = true;
}

// Start a copy that has a side in host memory. Pageable memory makes it wait, mostly.
int StartHostCopy(Call& call, Work::Kind kind, void* host, uint64_t address, size_t size_bytes, Handle stream_id) {
  if (!call.ok()) return call.result();
  const auto stream = call.StreamOf(stream_id);
  if (stream == nullptr || size_bytes == 0) return call.result();
  auto allocation = DeviceSide(call, *stream, address, size_bytes);
  if (allocation == nullptr) return call.result();
  const HostMemory memory = HostSide(call, *stream, host, size_bytes);
  if (memory == HostMemory::kRefused) return call.result();
  Work work;
  work.kind = kind;
  work.size_bytes = size_bytes;
  std::byte* const on_device = allocation->At(address);
  if (kind == Work::Kind::kToHost) {
    work.target = static_cast<std::byte*>(host);
    work.source = on_device;
    work.source_allocation = std::move(allocation);
  } else {
    work.target = on_device;
    work.source = static_cast<const std::byte*>(host);
    work.target_allocation = std::move(allocation);
  }
  CountCopy(call, work);
  const Point end = call.machine().Enqueue(stream, std::move(work));
  if (memory == HostMemory::kPinned) return kSuccess;
  ++call.machine().pageable_copy_count;
  if (!call.machine().pageable_waits) return kSuccess;
  call.machine().Wait(call.lock(), end);
  return call.machine().StateAt(end);
}

}  // namespace

int ContextDepth(Machine& machine) { return static_cast<int>(CurrentStack(machine).size()); }

}  // namespace cuda_double

using namespace cuda_double;  // NOLINT(google-build-using-namespace): what follows is a C interface

// --- the driver, its devices, their contexts ---

EXPORT int cuInit(unsigned flags) {
  Call call("cuInit", kNothing);
  if (!call.ok()) return call.result();
  if (flags != 0) return call.Refuse(kInvalidValue, "flags are not 0");
  if (call.machine().device_count <= 0) return call.Fail(kNoDevice);
  call.machine().is_initialized = true;
  return kSuccess;
}

EXPORT int cuDriverGetVersion(int* version) {
  Call call("cuDriverGetVersion", kNothing);
  if (call.ok()) *version = call.machine().driver_version;
  return call.result();
}

// The next two need no driver that works, and are not counted.
EXPORT int cuGetErrorName(int error, const char** name) {
  const ErrorWords* const words = WordsOf(error);
  *name = words == nullptr ? nullptr : words->name;
  return words == nullptr ? kInvalidValue : kSuccess;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  const ErrorWords* const words = WordsOf(error);
  *text = words == nullptr ? nullptr : words->text;
  return words == nullptr ? kInvalidValue : kSuccess;
}

EXPORT int cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount", kInit);
  if (call.ok()) *count = call.machine().device_count;
  return call.result();
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  Call call("cuDeviceGet", kInit);
  if (!call.ok()) return call.result();
  if (ordinal < 0 || ordinal >= call.machine().device_count) return call.Fail(kInvalidDevice);
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetPCIBusId(char* text, int size, int device) {
  Call call("cuDeviceGetPCIBusId", kInit);
  if (!call.ok()) return call.result();
  if (device < 0 || device >= call.machine().device_count)
    return call.Refuse(kInvalidDevice, "there is no such device");
  char made[32];
  std::snprintf(made, sizeof(made), "0000:%02X:00.0", 0x3B + device);  // in capitals, where sysfs has small letters
  const std::string& given = call.machine().bus_ids[static_cast<size_t>(device)];
  const std::string id = given.empty() ? made : given;
  if (text == nullptr || size <= static_cast<int>(id.size())) return call.Refuse(kInvalidValue, "the text has no room");
  std::memcpy(text, id.c_str(), id.size() + 1);
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  Call call("cuDevicePrimaryCtxRetain", kInit);
  if (!call.ok()) return call.result();
  if (device < 0 || device >= call.machine().device_count)
    return call.Refuse(kInvalidDevice, "there is no such device");
  *context = call.machine().ContextOf(device)->id;
  return kSuccess;
}

EXPORT int cuCtxPushCurrent_v2(Handle context) {
  Call call("cuCtxPushCurrent_v2", kInit);
  if (!call.ok()) return call.result();
  if (call.machine().FindContext(context) == nullptr) {
    return call.Refuse(kInvalidContext, Hex(context) + " is no context");
  }
  CurrentStack(call.machine()).push_back(context);
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(Handle* context) {
  Call call("cuCtxPopCurrent_v2", kInit);
  if (!call.ok()) return call.result();
  auto& stack = CurrentStack(call.machine());
  if (stack.empty()) return call.Refuse(kInvalidContext, "no context is current in this thread");
  if (context != nullptr) *context = stack.back();
  stack.pop_back();
  return kSuccess;
}

EXPORT int cuCtxGetCurrent(Handle* context) {
  Call call("cuCtxGetCurrent", kInit);
  if (!call.ok()) return call.result();
  const auto& stack = CurrentStack(call.machine());
  *context = stack.empty() ? 0 : stack.back();
  return kSuccess;
}

// --- streams ---

EXPORT int cuStreamCreate(Handle* stream, unsigned flags) {
  Call call("cuStreamCreate", kContext);
  if (!call.ok()) return call.result();
  if (stream == nullptr || flags > 1) return call.Refuse(kInvalidValue, "flags are none of 0 and 1");
  *stream = call.machine().NewStream(call.context(), flags == 0)->id;
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(Handle stream_id) {
  Call call("cuStreamDestroy_v2", kContext);
  if (!call.ok()) return call.result();
  if (stream_id <= 1) return call.Refuse(kInvalidHandle, "the default stream cannot be destroyed");
  if (const auto stream = call.StreamOf(stream_id)) stream->is_destroyed = true;
  return call.result();
}

EXPORT int cuStreamQuery(Handle stream_id) {
  Call call("cuStreamQuery", kContext);
  if (!call.ok()) return call.result();
  const auto stream = call.StreamOf(stream_id);
  return stream == nullptr ? call.result() : call.machine().StateAt({stream, stream->queued_count});
}

EXPORT int cuStreamSynchronize(Handle stream_id) {
  Call call("cuStreamSynchronize", kContext);
  if (!call.ok()) return call.result();
  const auto stream = call.StreamOf(stream_id);
  if (stream == nullptr) return call.result();
  const Point end{stream, stream->queued_count};
  call.machine().Wait(call.lock(), end);
  return call.machine().StateAt(end);
}

EXPORT int cuStreamWaitEvent(Handle stream_id, Handle event_id, unsigned flags) {
  Call call("cuStreamWaitEvent", kContext);
  if (!call.ok()) return call.result();
  if (flags != 0) return call.Refuse(kInvalidValue, "flags are not 0");
  const auto stream = call.StreamOf(stream_id);
  const auto event = stream == nullptr ? nullptr : call.EventOf(event_id);
  if (event == nullptr || !event->recorded) return call.result();
  Work work;
  work.after.push_back(*event->recorded);
  call.machine().Enqueue(stream, std::move(work));
  return kSuccess;
}

EXPORT int cuStreamIsCapturing(Handle stream_id, int* status) {
  Call call("cuStreamIsCapturing", kContextOnly);
  if (!call.ok()) return call.result();
  const auto stream = call.FindStream(stream_id);
  if (stream == nullptr) return call.Refuse(kInvalidHandle, "the stream " + Hex(stream_id) + " is not a live one");
  if (call.IsImplicitlyCaptured(*stream)) return call.Fail(kCaptureImplicit);
  *status = stream->capture;
  return kSuccess;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  Call call("cuThreadExchangeStreamCaptureMode", kInit);
  if (!call.ok()) return call.result();
  if (mode == nullptr || *mode < kGlobal || *mode > kRelaxed)
    return call.Refuse(kInvalidValue, "there is no such mode");
  std::swap(*mode, OfThread(call.machine()).capture_mode);
  return kSuccess;
}

// --- events ---

EXPORT int cuEventCreate(Handle* event, unsigned flags) {
  Call call("cuEventCreate", kContext);
  if (!call.ok()) return call.result();
  const bool is_interprocess = (flags & 4) != 0;
  const bool has_timing = (flags & 2) == 0;
  if (event == nullptr || flags > 7 || (is_interprocess && has_timing)) {
    return call.Refuse(kInvalidValue, "the flags " + std::to_string(flags));
  }
  Machine& machine = call.machine();
  const auto made = std::make_shared<Event>(Event{machine.NewHandle(2), call.context(), {}});
  machine.events[made->id] = made;
  *event = made->id;
  return kSuccess;
}

EXPORT int cuEventDestroy_v2(Handle event) {
  Call call("cuEventDestroy_v2", kContext);
  if (call.ok() && call.EventOf(event) != nullptr) call.machine().events.erase(event);
  return call.result();
}

EXPORT int cuEventRecord(Handle event_id, Handle stream_id) {
  Call call("cuEventRecord", kContext);
  if (!call.ok()) return call.result();
  const auto event = call.EventOf(event_id);
  const auto stream = event == nullptr ? nullptr : call.StreamOf(stream_id);
  if (stream == nullptr) return call.result();
  if (event->context != stream->context) return call.Refuse(kInvalidHandle, "event and stream are of two contexts");
  event->recorded = call.machine().Enqueue(stream, Work());
  return kSuccess;
}

EXPORT int cuEventQuery(Handle event_id) {
  Call call("cuEventQuery", kContext);
  if (!call.ok()) return call.result();
  const auto event = call.EventOf(event_id);
  return event == nullptr || !event->recorded ? call.result() : call.machine().StateAt(*event->recorded);
}

EXPORT int cuEventSynchronize(Handle event_id) {
  Call call("cuEventSynchronize", kContext);
  if (!call.ok()) return call.result();
  const auto event = call.EventOf(event_id);
  if (event == nullptr || !event->recorded) return call.result();
  const Point end = *event->recorded;  // another record meanwhile does not count
  call.machine().Wait(call.lock(), end);
  return call.machine().StateAt(end);
}

// --- copies ---

EXPORT int cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t size_bytes, Handle stream) {
  Call call("cuMemcpyDtoHAsync_v2", kContext);
  return StartHostCopy(call, Work::Kind::kToHost, target, source, size_bytes, stream);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t size_bytes, Handle stream) {
  Call call("cuMemcpyHtoDAsync_v2", kContext);
  return StartHostCopy(call, Work::Kind::kToDevice, const_cast<void*>(source), target, size_bytes, stream);
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size_bytes, Handle stream_id) {
  Call call("cuMemcpyDtoDAsync_v2", kContext);
  if (!call.ok()) return call.result();
  const auto stream = call.StreamOf(stream_id);
  if (stream == nullptr || size_bytes == 0) return call.result();
  Work work;
  work.kind = Work::Kind::kOnDevice;
  work.size_bytes = size_bytes;
  work.target_allocation = DeviceSide(call, *stream, target, size_bytes);
  work.source_allocation = DeviceSide(call, *stream, source, size_bytes);
  if (!call.ok()) return call.result();
  work.target = work.target_allocation->At(target);
  work.source = work.source_allocation->At(source);
  CountCopy(call, work);
  call.machine().Enqueue(stream, std::move(work));
  return kSuccess;
}

EXPORT int cuMemsetD8Async(uint64_t target, unsigned char byte_value, size_t size_bytes, Handle stream_id) {
  Call call("cuMemsetD8Async", kContext);
  if (!call.ok()) return call.result();
  const auto stream = call.StreamOf(stream_id);
  if (stream == nullptr || size_bytes == 0) return call.result();
  Work work;
  work.kind = Work::Kind::kFill;
  work.size_bytes = size_bytes;
  work.byte_value = byte_value;
  work.target_allocation = DeviceSide(call, *stream, target, size_bytes);
  if (!call.ok()) return call.result();
  work.target = work.target_allocation->At(target);
  CountCopy(call, work);
  call.machine().Enqueue(stream, std::move(work));
  return kSuccess;
}

// --- kernels: those of the product, which copy rows of host memory to their places ---

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  Call call("cuDeviceGetAttribute", kInit);
  if (!call.ok()) return call.result();
  if (device < 0 || device >= call.machine().device_count)
    return call.Refuse(kInvalidDevice, "there is no such device");
  constexpr int kCanUseHostPointerForRegisteredMemory = 91;
  *value = attribute == kCanUseHostPointerForRegisteredMemory && call.machine().reads_host_pointers ? 1 : 0;
  return kSuccess;
}

EXPORT int cuModuleLoadData(Handle* module, const void* image) {
  Call call("cuModuleLoadData", kContext);
  if (!call.ok()) return call.result();
  const std::string text = static_cast<const char*>(image);
  if (!text.starts_with(".version ")) return call.Refuse(kInvalidValue, "this is no PTX");
  *module = call.machine().NewHandle(3);
  call.machine().modules[*module] = text;
  return kSuccess;
}

EXPORT int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  Call call("cuModuleGetFunction", kContext);
  if (!call.ok()) return call.result();
  const auto found = call.machine().modules.find(module);
  if (found == call.machine().modules.end()) return call.Refuse(kInvalidHandle, "there is no such module");
  const std::string prefix = "copy_rows_";
  const std::string wanted = name;
  if (!wanted.starts_with(prefix) || found->second.find(".entry " + wanted + "(") == std::string::npos) {
    return call.Refuse(kNotFound, "the module has no " + wanted);
  }
  *function = call.machine().NewHandle(4);
  call.machine().row_kernels[*function] = static_cast<uint32_t>(std::stoul(wanted.substr(prefix.size())));
  return kSuccess;
}

EXPORT int cuLaunchKernel(Handle function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                          unsigned threads_y, unsigned threads_z, unsigned, Handle stream_id, void** arguments,
                          void** extra) {
  Call call("cuLaunchKernel", kContext);
  if (!call.ok()) return call.result();
  const auto stream = call.StreamOf(stream_id);
  if (stream == nullptr) return call.result();
  const auto kernel = call.machine().row_kernels.find(function);
  if (kernel == call.machine().row_kernels.end()) return call.Refuse(kInvalidHandle, "there is no such kernel");
  if (blocks_x == 0 || blocks_y != 1 || blocks_z != 1 || threads_x % 32 != 0 || threads_x == 0 || threads_x > 1024 ||
      threads_y != 1 || threads_z != 1 || extra != nullptr) {
    return call.Refuse(kInvalidValue, "an odd shape");
  }
  const auto argument = [&]<class Value>(int at, Value) { return *static_cast<Value*>(arguments[at]); };
  Work work;
  work.kind = Work::Kind::kRows;
  work.source = argument(0, work.source);
  const auto target = argument(1, uint64_t{});
  work.rows = argument(2, work.rows);
  work.places = argument(3, work.places);
  work.row_count = argument(4, uint32_t{});
  work.size_bytes = argument(5, uint32_t{});
  if ((reinterpret_cast<uintptr_t>(work.source) | target) % 16 != 0) {
    return call.Refuse(kInvalidValue, "a table that does not lie on 16 bytes");
  }
  if (work.size_bytes % kernel->second != 0) return call.Refuse(kInvalidValue, "rows that are no whole words");
  const size_t index_bytes = work.row_count * sizeof(uint32_t);
  if (HostSide(call, *stream, work.rows, index_bytes) != HostMemory::kPinned ||
      HostSide(call, *stream, work.places, index_bytes) != HostMemory::kPinned) {
    return call.Refuse(kInvalidValue, "the rows' numbers or places are not pinned");
  }
  const uint32_t last_row = *std::max_element(work.rows, work.rows + work.row_count);
  const uint32_t last_place = *std::max_element(work.places, work.places + work.row_count);
  if (HostSide(call, *stream, work.source, (last_row + size_t{1}) * work.size_bytes) == HostMemory::kPageable) {
    return call.Refuse(kInvalidValue, "the rows are not pinned");
  }
  work.target_allocation = DeviceSide(call, *stream, target, (last_place + size_t{1}) * work.size_bytes);
  if (!call.ok()) return call.result();
  work.target = work.target_allocation->At(target);
  call.machine().Enqueue(stream, std::move(work));
  return kSuccess;
}

// --- memory ---

EXPORT int cuMemHostRegister_v2(void* memory, size_t size_bytes, unsigned flags) {
  Call call("cuMemHostRegister_v2", kContext);
  if (!call.ok()) return call.result();
  if (memory == nullptr || size_bytes == 0 || flags > 15) return call.Refuse(kInvalidValue, "no memory, or odd flags");
  if (!IsMapped(memory, size_bytes)) return call.Refuse(kInvalidValue, "the memory is not mapped");
  Registration made;
  made.pointer = reinterpret_cast<uintptr_t>(memory);
  made.first = made.pointer / kPageBytes * kPageBytes;
  made.end = (made.pointer + size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  made.is_portable = (flags & 1) != 0;
  made.context = call.context()->id;
  Machine& machine = call.machine();
  machine.changed.wait(call.lock(), [&] { return !machine.registrations_are_held; });
  uint64_t total_bytes = made.end - made.first;
  for (const auto& [first, other] : machine.registrations) {
    total_bytes += other.end - other.first;
    if (made.first < other.end && made.end > other.first) {
      return call.Refuse(kAlreadyRegistered, BytesAt(made.pointer, size_bytes) + " are registered already, in part");
    }
  }
  if (total_bytes > machine.registration_limit_bytes) return call.Fail(kOutOfMemory);
  machine.registrations[made.first] = made;
  return kSuccess;
}

EXPORT int cuMemHostUnregister(void* memory) {
  Call call("cuMemHostUnregister", kContext);
  if (!call.ok()) return call.result();
  Machine& machine = call.machine();
  const auto pointer = reinterpret_cast<uintptr_t>(memory);
  const auto found = machine.registrations.find(pointer / kPageBytes * kPageBytes);
  if (found == machine.registrations.end() || found->second.pointer != pointer) {
    return call.Refuse(kNotRegistered, Hex(pointer) + " is not registered");
  }
  const Registration& registration = found->second;
  if (const uint64_t count = machine.CountQueued(registration.first, registration.end); count > 0) {
    machine.Violate("cuMemHostUnregister: " + std::to_string(count) + " queued copies use the memory at " +
                    Hex(pointer));
  }
  if (!IsMapped(memory, registration.end - pointer)) {
    machine.Violate("cuMemHostUnregister: the memory at " + Hex(pointer) + " was unmapped before");
  }
  machine.registrations.erase(found);
  return kSuccess;
}

EXPORT int cuMemGetAddressRange_v2(uint64_t* base, size_t* size_bytes, uint64_t address) {
  Call call("cuMemGetAddressRange_v2", kContext);
  if (!call.ok()) return call.result();
  const auto allocation = call.machine().FindAllocation(address, 0);
  if (allocation == nullptr) return call.Fail(kNotFound);
  if (base != nullptr) *base = allocation->address;
  if (size_bytes != nullptr) *size_bytes = allocation->size_bytes;
  return kSuccess;
}

EXPORT int cuMemAlloc_v2(uint64_t* address, size_t size_bytes) {
  Call call("cuMemAlloc_v2", kContext);
  if (!call.ok()) return call.result();
  if (size_bytes == 0) return call.Refuse(kInvalidValue, "0 bytes");
  const auto allocation = call.machine().Allocate(call.context()->device, size_bytes);
  if (allocation == nullptr) return call.Fail(kOutOfMemory);
  *address = allocation->address;
  return kSuccess;
}

EXPORT int cuMemFree_v2(uint64_t address) {
  Call call("cuMemFree_v2", kContext);
  if (!call.ok() || address == 0) return call.result();
  const auto allocation = call.machine().FindAllocation(address, 0);
  if (allocation == nullptr || allocation->address != address) {
    return call.Refuse(kInvalidValue, Hex(address) + " is no allocation (freed already, or never made)");
  }
  call.machine().Free(allocation, "cuMemFree_v2");
  return kSuccess;
}
