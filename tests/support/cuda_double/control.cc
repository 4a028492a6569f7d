// What tests steer the double by; see interface.h.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "interface.h"
#include "machine.h"

namespace cuda_double {

int ContextDepth(Machine& machine);  // cuda_double.cc

namespace {

[[noreturn]] void Mistake(const char* function, const std::string& what) {
  std::fprintf(stderr, "the double of the CUDA driver: %s: %s\n", function, what.c_str());
  std::fflush(stderr);
  std::abort();
}

std::string CallOrDie(const char* function, const char* name) {
  const std::string_view call = CallNamed(name);
  if (call.empty()) Mistake(function, "there is no call named " + std::string(name));
  return std::string(call);
}

std::shared_ptr<Context> ContextOrDie(Machine& machine, const char* function, int device) {
  if (device < 0 || device >= machine.device_count) {
    Mistake(function, "there is no device " + std::to_string(device) + " of " + std::to_string(machine.device_count));
  }
  return machine.ContextOf(device);
}

std::shared_ptr<Stream> StreamOrDie(Machine& machine, const char* function, uint64_t id) {
  if (id == 0) return ContextOrDie(machine, function, 0)->default_stream;
  auto stream = machine.FindStream(id);
  if (stream == nullptr) Mistake(function, "there is no stream " + Hex(id));
  return stream;
}

uint64_t CountOf(const Machine& machine, const std::string& call) {
  if (!call.empty()) return machine.call_counts.find(call)->second;
  uint64_t count = 0;
  for (const auto& [name, of_this] : machine.call_counts) count += of_this;
  return count;
}

template <class Condition>
int WaitFor(int timeout_ms, const Condition& holds) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  if (machine.is_forked) return holds(machine) ? 1 : 0;
  const auto end = std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms);
  return machine.changed.wait_until(lock, end, [&] { return holds(machine); }) ? 1 : 0;
}

// A number of the machine.
template <class Read>
auto Locked(const Read& read) {
  Machine& machine = Machine::Get();
  const Lock lock(machine.mutex);
  return read(machine);
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;  // NOLINT(google-build-using-namespace): what follows is its C interface

EXPORT void double_reset(int device_count) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  if (!machine.is_forked) machine.Reset(lock, device_count);
}

EXPORT void double_clear() {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  if (!machine.is_forked) machine.Clear(lock);
}

EXPORT void double_set_driver_version(int version) {
  Locked([&](Machine& machine) { machine.driver_version = version; });
}

EXPORT void double_set_pci_bus_id(int device, const char* text) {
  Locked([&](Machine& machine) {
    ContextOrDie(machine, "double_set_pci_bus_id", device);
    machine.bus_ids[static_cast<size_t>(device)] = text;
  });
}

EXPORT void double_set_reads_host_pointers(int on) {
  Locked([&](Machine& machine) { machine.reads_host_pointers = on != 0; });
}

// --- memory of the device ---

EXPORT uint64_t double_alloc(size_t size_bytes) { return double_alloc_on(kAnyDevice, size_bytes); }

EXPORT uint64_t double_alloc_on(int device, size_t size_bytes) {
  return Locked([&](Machine& machine) {
    const auto allocation = machine.Allocate(device, size_bytes);
    return allocation == nullptr ? uint64_t{0} : allocation->address;
  });
}

EXPORT void double_free(uint64_t address) {
  Locked([&](Machine& machine) {
    if (address < machine.first_address) return;
    const auto allocation = machine.FindAllocation(address, 0);
    if (allocation == nullptr || allocation->address != address) {
      machine.Violate("double_free: " + Hex(address) + " is no allocation (freed already, or never made)");
    } else {
      machine.Free(allocation, "double_free");
    }
  });
}

EXPORT int double_read(uint64_t address, void* target, size_t size_bytes) {
  return Locked([&](Machine& machine) {
    if (machine.IsRegistered(address, size_bytes)) {
      std::memcpy(target, reinterpret_cast<const void*>(address), size_bytes);
      return 0;
    }
    const auto allocation = machine.FindAllocation(address, size_bytes);
    if (allocation == nullptr) {
      machine.Violate("double_read: " + std::to_string(size_bytes) + " bytes at " + Hex(address) +
                      " are not inside one allocation");
      return 1;
    }
    std::memcpy(target, allocation->At(address), size_bytes);
    return 0;
  });
}

EXPORT int double_write(uint64_t address, const void* source, size_t size_bytes) {
  return Locked([&](Machine& machine) {
    const auto allocation = machine.FindAllocation(address, size_bytes);
    if (allocation == nullptr) {
      machine.Violate("double_write: " + std::to_string(size_bytes) + " bytes at " + Hex(address) +
                      " are not inside one allocation");
      return 1;
    }
    std::memcpy(allocation->At(address), source, size_bytes);
    return 0;
  });
}

// --- failures ---

EXPORT void double_fail(const char* call, int nth, int error) {
  Locked([&](Machine& machine) {
    const std::string name = CallOrDie("double_fail", call);
    const uint64_t at_count = nth == 0 ? 0 : machine.call_counts[name] + static_cast<uint64_t>(nth);
    machine.failures.push_back({name, at_count, error});
  });
}

EXPORT void double_fail_async(const char* copy, int nth, int error) {
  Locked([&](Machine& machine) {
    const std::string name = CallOrDie("double_fail_async", copy);
    if (!name.starts_with("cuMemcpy") && !name.starts_with("cuMemset"))
      Mistake("double_fail_async", name + ": no copy");
    const uint64_t at_count = nth == 0 ? 0 : machine.copy_counts[name] + static_cast<uint64_t>(nth);
    machine.async_failures.push_back({name, at_count, error});
  });
}

EXPORT void double_set_registration_limit(uint64_t bytes) {
  Locked([&](Machine& machine) { machine.registration_limit_bytes = bytes; });
}

EXPORT void double_set_pageable_waits(int on) {
  Locked([&](Machine& machine) { machine.pageable_waits = on != 0; });
}

// --- time and order ---

EXPORT void double_delay_us(int us) {
  Locked([&](Machine& machine) { machine.copy_delay = std::chrono::microseconds(us); });
}

EXPORT uint64_t double_stream_new(int device) {
  return Locked([&](Machine& machine) {
    return machine.NewStream(ContextOrDie(machine, "double_stream_new", device), false)->id;
  });
}

EXPORT uint64_t double_default_stream(int device) {
  return Locked(
      [&](Machine& machine) { return ContextOrDie(machine, "double_default_stream", device)->default_stream->id; });
}

EXPORT void double_stream_free(uint64_t stream) {
  Locked([&](Machine& machine) { StreamOrDie(machine, "double_stream_free", stream)->is_destroyed = true; });
}

namespace {

std::shared_ptr<Allocation> AllocationOrDie(Machine& machine, const char* function, uint64_t address, size_t bytes) {
  auto allocation = machine.FindAllocation(address, bytes);
  if (allocation == nullptr) {
    Mistake(function, Hex(address) + ", " + std::to_string(bytes) + " bytes: not inside an allocation");
  }
  return allocation;
}

}  // namespace

EXPORT void double_stream_add_work(uint64_t stream, int us, uint64_t target, int byte_value, size_t size_bytes) {
  Locked([&](Machine& machine) {
    Work work;
    work.kind = Work::Kind::kFill;
    work.duration = std::chrono::microseconds(us);
    work.size_bytes = size_bytes;
    work.byte_value = byte_value;
    if (size_bytes > 0) {
      work.target_allocation = AllocationOrDie(machine, "double_stream_add_work", target, size_bytes);
      work.target = work.target_allocation->At(target);
    }
    machine.Enqueue(StreamOrDie(machine, "double_stream_add_work", stream), std::move(work));
  });
}

EXPORT void double_stream_add_copy(uint64_t stream, int us, uint64_t target, uint64_t source, size_t size_bytes) {
  Locked([&](Machine& machine) {
    Work work;
    work.kind = Work::Kind::kOnDevice;
    work.duration = std::chrono::microseconds(us);
    work.size_bytes = size_bytes;
    work.target_allocation = AllocationOrDie(machine, "double_stream_add_copy", target, size_bytes);
    work.source_allocation = AllocationOrDie(machine, "double_stream_add_copy", source, size_bytes);
    work.target = work.target_allocation->At(target);
    work.source = work.source_allocation->At(source);
    machine.Enqueue(StreamOrDie(machine, "double_stream_add_copy", stream), std::move(work));
  });
}

EXPORT void double_stream_wait(uint64_t stream, uint64_t other) {
  Locked([&](Machine& machine) {
    const auto first = StreamOrDie(machine, "double_stream_wait", other);
    Work work;
    work.after.push_back({first, first->queued_count});
    machine.Enqueue(StreamOrDie(machine, "double_stream_wait", stream), std::move(work));
  });
}

EXPORT void double_stream_block(uint64_t stream) {
  Locked([&](Machine& machine) { StreamOrDie(machine, "double_stream_block", stream)->is_held = true; });
}

EXPORT void double_stream_unblock(uint64_t stream) {
  Locked([&](Machine& machine) {
    StreamOrDie(machine, "double_stream_unblock", stream)->is_held = false;
    machine.Notify();
  });
}

EXPORT void double_capture(uint64_t stream, int on) {
  Locked([&](Machine& machine) {
    const auto of_id = StreamOrDie(machine, "double_capture", stream);
    of_id->capture = on != 0 ? kCapturing : kNoCapture;
    of_id->captured_by = std::this_thread::get_id();
  });
}

EXPORT void double_stream_synchronize(uint64_t stream) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  const auto of_id = StreamOrDie(machine, "double_stream_synchronize", stream);
  machine.Wait(lock, {of_id, of_id->queued_count});
}

EXPORT void double_synchronize() {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  machine.WaitForAll(lock);
}

EXPORT void double_hold_copies(int64_t allowed_count) {
  Locked([&](Machine& machine) {
    machine.allowed_copy_count = allowed_count;
    machine.Notify();
  });
}

EXPORT void double_step_by_step(int on) {
  Locked([&](Machine& machine) { machine.is_stepped = on != 0; });
}

EXPORT int double_step(uint64_t choice) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  return machine.Step(lock, choice) ? 1 : 0;
}

EXPORT void double_hold_registrations(int on) {
  Locked([&](Machine& machine) {
    machine.registrations_are_held = on != 0;
    machine.Notify();
  });
}

EXPORT int double_wait_for_calls(const char* call, uint64_t count, int timeout_ms) {
  const std::string name = CallOrDie("double_wait_for_calls", call);
  return WaitFor(timeout_ms, [&](const Machine& machine) { return CountOf(machine, name) >= count; });
}

EXPORT int double_wait_for_queued_copies(uint64_t count, int timeout_ms) {
  return WaitFor(timeout_ms, [&](const Machine& machine) { return machine.queued_copy_count >= count; });
}

// --- what happened ---

EXPORT uint64_t double_call_count(const char* call) {
  const std::string name = *call == '\0' ? "" : CallOrDie("double_call_count", call);
  return Locked([&](const Machine& machine) { return CountOf(machine, name); });
}

EXPORT int double_has_call(const char* call) { return CallNamed(call).empty() ? 0 : 1; }

EXPORT int double_violation_count() {
  return Locked([](const Machine& machine) { return static_cast<int>(machine.violations.size()); });
}

EXPORT const char* double_violation(int index) {
  return Locked([&](const Machine& machine) -> const char* {
    const auto at = static_cast<size_t>(index);
    return index < 0 || at >= machine.violations.size() ? nullptr : machine.violations[at].c_str();
  });
}

EXPORT uint64_t double_queued_copy_count() {
  return Locked([](const Machine& machine) { return machine.queued_copy_count; });
}

EXPORT uint64_t double_peak_queued_copy_count() {
  return Locked([](const Machine& machine) { return machine.peak_queued_copy_count; });
}

EXPORT uint64_t double_pageable_copy_count() {
  return Locked([](const Machine& machine) { return machine.pageable_copy_count; });
}

EXPORT uint64_t double_copied_to_host_bytes() {
  return Locked([](const Machine& machine) { return machine.copied_to_host_bytes; });
}

EXPORT uint64_t double_copied_to_device_bytes() {
  return Locked([](const Machine& machine) { return machine.copied_to_device_bytes; });
}

EXPORT uint64_t double_registration_count() {
  return Locked([](const Machine& machine) { return uint64_t{machine.registrations.size()}; });
}

EXPORT int double_is_registered(uint64_t address, size_t size_bytes) {
  return Locked([&](const Machine& machine) { return machine.IsRegistered(address, size_bytes) ? 1 : 0; });
}

EXPORT uint64_t double_registered_bytes() {
  return Locked([](const Machine& machine) {
    uint64_t bytes = 0;
    for (const auto& [first, registration] : machine.registrations) bytes += registration.end - first;
    return bytes;
  });
}

EXPORT uint64_t double_stream_count() {
  return Locked([](const Machine& machine) {
    uint64_t count = 0;
    for (const auto& [id, stream] : machine.streams) count += !stream->is_default && !stream->is_destroyed ? 1 : 0;
    return count;
  });
}

EXPORT uint64_t double_event_count() {
  return Locked([](const Machine& machine) { return uint64_t{machine.events.size()}; });
}

EXPORT uint64_t double_allocation_count() {
  return Locked([](const Machine& machine) { return uint64_t{machine.allocations.size()}; });
}

EXPORT int double_context_depth() {
  return Locked([](Machine& machine) { return ContextDepth(machine); });
}
