// A kernel that copies rows from pinned host memory to their places in a device's memory. The device reads them over
// the bus, so the host copies nothing, and one call is enough for any number of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/status.h"
#include "device/cuda_driver.h"
#include "device/device.h"

namespace fastpersist {

// Copyable; thread-safe.
class RowKernel {
 public:
  // The size of a row is a multiple of so many bytes.
  static constexpr uint32_t kWordBytesMin = 4;

  // The first load for a device makes the driver compile the kernel, which takes milliseconds; if that fails, later
  // loads fail in the same way. kUnsupported: the device does not read pinned host memory at its address. REQUIRES:
  // row_bytes is a multiple of kWordBytesMin.
  static Result<RowKernel> Load(Device& device, uint32_t row_bytes);

  // Start to copy in a stream of the caller (as of CopyStream::FollowCaller): for each i the row `rows[i]` of `source`
  // becomes the row `places[i]` of `target`. Source, rows and places are pinned, and both tables lie on boundaries of
  // 16 bytes. None of this memory may change until the stream has made the copies.
  Status Start(uintptr_t stream, const std::byte* source, CudaAddress target, std::span<const int32_t> rows,
               const int32_t* places) const;
  // Wait until a stream has completed all its work.
  Status Wait(uintptr_t stream) const;

 private:
  RowKernel(const Device& device, CudaFunction function, uint32_t row_bytes)
      : device_(&device), function_(function), row_bytes_(row_bytes) {}

  const Device* device_;
  CudaFunction function_;
  uint32_t row_bytes_;
};

}  // namespace fastpersist
