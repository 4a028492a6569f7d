// Moves bytes into and out of a ring whose buffers are a device's memory (GPUDirect Storage, engine "cufile"). No CPU
// sees these bytes, so there are no CRCs. The transfers decide which buffer is filled when.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/status.h"
#include "device/device.h"

namespace fastpersist {

// Buffers are device addresses. One owner thread at a time. Puts run in the order of the device's to_host() stream,
// takes to the ring's device in that of to_device(). Where no comment says "waits", a call only starts the copy: a
// later mark on that stream completes it.
class DeviceRing {
 public:
  // A call that waits asks `poll`; its error ends the wait. If a device may still write to host memory then, the
  // quarantine keeps `destinations` until the device has ended.
  DeviceRing(Device& device, std::function<Status()> poll, std::shared_ptr<const void> destinations)
      : device_(device), poll_(std::move(poll)), destinations_(std::move(destinations)) {}

  Device& device() const { return device_; }

  // Into a buffer: from host memory, which must not change until the copy is complete; from a device, which waits
  // unless it is the ring's own; zeros.
  Status PutHost(std::byte* buffer, const std::byte* source, size_t size_bytes);
  Status PutDevice(std::byte* buffer, Device& from, CudaAddress source, size_t size_bytes);
  Status PutZeros(std::byte* buffer, size_t size_bytes);

  // Out of a buffer: to host memory, which waits; to a device, which waits unless it is the ring's own.
  Status TakeHost(std::byte* target, const std::byte* buffer, size_t size_bytes);
  Status TakeDevice(Device& to, CudaAddress target, const std::byte* buffer, size_t size_bytes);

  // Returns at least size_bytes of host memory for bytes that pass through it; valid until the next call.
  std::byte* Bounce(size_t size_bytes);
  // Wait until all puts are complete.
  Status Wait();

 private:
  Status AwaitRoom(CopyStream& stream, bool with_host);
  Status WaitFor(CopyStream& stream);

  Device& device_;
  const std::function<Status()> poll_;
  const std::shared_ptr<const void> destinations_;
  std::shared_ptr<std::vector<std::byte>> bounce_;
};

}  // namespace fastpersist
