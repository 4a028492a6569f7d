// Provides the buffers of transfers that Python starts: the process's ring, and extra ones for nested transfers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/buffer_pool.h"
#include "device/device.h"

namespace fastpersist {

struct TransferOptions {
  int fd;
  std::string path;
  std::vector<std::string> engines;
  size_t ring_bytes;
  size_t chunk_bytes;
  size_t queue_depth;  // requests in flight; a transfer uses one buffer more
  uint32_t thread_count;
  std::optional<int> ring_device;  // the device whose memory the ring is; none: host memory
};

// Counts over all rings of this process: all buffers; buffers without a transfer; buffers in quarantine.
size_t RingBufferCount();
size_t RingFreeCount();
size_t RingQuarantinedCount();

// One open transfer of a thread. A transfer started while another of the same thread is open (by a signal handler or a
// hook that saves) must not wait for buffers that the outer one cannot give back: it gets two of its own. Any thread
// may destroy it. REQUIRES of the constructor: the GIL is held; it raises if there is no memory.
class OpenTransfer {
 public:
  explicit OpenTransfer(const TransferOptions& options);
  ~OpenTransfer() { --*open_count_; }
  OpenTransfer(const OpenTransfer&) = delete;
  OpenTransfer& operator=(const OpenTransfer&) = delete;

  BufferPool& buffers() { return *buffers_; }
  // The device whose memory the buffers are; null: host memory.
  Device* ring_device() const { return ring_device_; }

 private:
  static const std::shared_ptr<std::atomic<int>>& OfThisThread();

  const std::shared_ptr<std::atomic<int>> open_count_;
  std::unique_ptr<BufferPool> own_buffers_;
  BufferPool* buffers_ = nullptr;
  Device* ring_device_ = nullptr;
};

}  // namespace fastpersist
