// The buffers of transfers that Python starts: one ring for the process, and the rule for nested transfers.
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
  size_t queue_depth;  // requests in flight; a transfer touches one buffer more
  uint32_t thread_count;
  std::optional<int> ring_device;  // the ring is memory of that device
};

// Buffers of all rings of this process; those that no transfer has; those in quarantine.
size_t RingBufferCount();
size_t RingFreeCount();
size_t RingQuarantinedCount();

// The transfers that a thread has open. A transfer that is started while another of the same thread is open (a signal
// handler or a hook that saves) must not wait for buffers that the outer one cannot give back: it gets two of its own.
// Shared with each transfer, which may be closed on another thread. Made with the GIL; raises where there is no memory.
class OpenTransfer {
 public:
  explicit OpenTransfer(const TransferOptions& options);
  ~OpenTransfer() { --*open_count_; }
  OpenTransfer(const OpenTransfer&) = delete;
  OpenTransfer& operator=(const OpenTransfer&) = delete;

  BufferPool& buffers() { return *buffers_; }
  // Whose memory the buffers are; null: the host's.
  Device* ring_device() const { return ring_device_; }

 private:
  static const std::shared_ptr<std::atomic<int>>& OfThisThread();

  const std::shared_ptr<std::atomic<int>> open_count_;
  std::unique_ptr<BufferPool> own_buffers_;
  BufferPool* buffers_ = nullptr;
  Device* ring_device_ = nullptr;
};

}  // namespace fastpersist
