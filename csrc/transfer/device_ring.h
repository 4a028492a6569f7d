// A ring whose buffers are memory of a device (GPUDirect Storage, engine "cufile"): how bytes come into a buffer and
// out of it, since no thread can look into one. So nothing here has a CRC. Which buffer is filled when is the
// transfers'.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/status.h"
#include "device/device.h"

namespace fastpersist {

// The addresses of buffers are the device's. One owner thread at a time. Copies into buffers are made in the order of
// the device's to_host() stream, those out of them to the device in that of to_device(): what does not say that it
// waits is done when a mark behind it is reached.
class DeviceRing {
 public:
  // `poll` is asked while it waits; its error ends the wait. Where a device may still copy then, `destinations`, of
  // what is taken to host memory, are kept until it has ended.
  DeviceRing(Device& device, std::function<Status()> poll, std::shared_ptr<const void> destinations)
      : device_(device), poll_(std::move(poll)), destinations_(std::move(destinations)) {}

  Device& device() const { return device_; }

  // Into a buffer: from host memory that stays as it is until then; from the ring's device, or, and then it waits, from
  // another one; zeros.
  Status PutHost(std::byte* buffer, const std::byte* source, size_t size_bytes);
  Status PutDevice(std::byte* buffer, Device& from, CudaAddress source, size_t size_bytes);
  Status PutZeros(std::byte* buffer, size_t size_bytes);

  // Out of a buffer: to host memory, which waits; to the ring's device, or, and then it waits, to another one.
  Status TakeHost(std::byte* target, const std::byte* buffer, size_t size_bytes);
  Status TakeDevice(Device& to, CudaAddress target, const std::byte* buffer, size_t size_bytes);

  // Host memory of at least this size, for bytes that have to pass through it; until the next call of this object.
  std::byte* Bounce(size_t size_bytes);
  // Wait for everything that was put.
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
