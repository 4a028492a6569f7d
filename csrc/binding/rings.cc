#include "binding/rings.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "binding/bindings.h"
#include "binding/errors.h"
#include "core/fork.h"
#include "device/cufile.h"

namespace fastpersist {
namespace {

// One ring for the process, made at first use; one more for each other pair of sizes, for tuned file systems, and for
// each device whose memory is a ring. A forked child, which lacks the parent's pages, forgets them and makes its own.
// Leaked on purpose: other threads' transfers may outlive the interpreter's shutdown.
struct RingKey {
  size_t ring_bytes;
  size_t chunk_bytes;
  int device;  // -1: host memory

  auto operator<=>(const RingKey&) const = default;
};
using Rings = std::map<RingKey, BufferPool*>;
std::mutex* g_ring_mutex = new std::mutex;
Rings* g_rings = new Rings;
uint64_t g_ring_generation = 0;

Result<std::unique_ptr<BufferPool>> MakeRing(const RingKey& key) {
  const size_t buffer_count = key.ring_bytes / key.chunk_bytes;
  if (key.device < 0) return BufferPool::Create(buffer_count, key.chunk_bytes);
  Result<Device*> device = Device::Get(key.device);
  if (!device.ok()) return device.status();
  Result<std::unique_ptr<DeviceStaging>> made = DeviceStaging::Create(*device.value(), buffer_count, key.chunk_bytes);
  if (!made.ok()) return made.status();
  const std::shared_ptr<DeviceStaging> staging = std::move(made).value();
  std::byte* memory = nullptr;  // the buffers are contiguous
  while (std::byte* const buffer = staging->Take()) memory = memory == nullptr ? buffer : std::min(memory, buffer);
  return BufferPool::Over(memory, buffer_count, key.chunk_bytes, staging);
}

// An error is raised by the caller, without the mutex: its constructor is Python code, in which another thread that
// waits for the mutex may get the GIL.
Result<BufferPool*> Ring(const RingKey& key) {
  if (g_ring_generation != ForkGeneration()) {
    g_ring_mutex = new std::mutex;  // a parent's thread may hold the old one; the child has one thread now
    g_rings = new Rings;
    g_ring_generation = ForkGeneration();
  }
  const std::lock_guard lock(*g_ring_mutex);
  BufferPool*& ring = (*g_rings)[key];
  if (ring == nullptr) {
    Result<std::unique_ptr<BufferPool>> made = MakeRing(key);
    if (!made.ok()) {
      return Status::Error(made.status().code(),
                           made.status().message() + "; set FASTPERSIST_RING_BYTES for a smaller one");
    }
    ring = std::move(made).value().release();
  }
  return ring;
}

template <class Count>
size_t SumOverRings(Count count) {
  if (g_ring_generation != ForkGeneration()) return 0;
  std::vector<BufferPool*> rings;  // rings are never freed; counting may run code that needs a ring
  {
    const std::lock_guard lock(*g_ring_mutex);
    for (const auto& [key, ring] : *g_rings) rings.push_back(ring);
  }
  size_t sum = 0;
  for (BufferPool* const ring : rings) sum += ring == nullptr ? 0 : count(*ring);
  return sum;
}

}  // namespace

size_t RingFreeCount() {
  return SumOverRings([](BufferPool& ring) { return ring.free_count(); });
}
size_t RingQuarantinedCount() {
  return SumOverRings([](const BufferPool& ring) { return ring.quarantined_count(); });
}
size_t RingBufferCount() {
  return SumOverRings([](const BufferPool& ring) { return ring.buffer_count(); });
}

OpenTransfer::OpenTransfer(const TransferOptions& options) : open_count_(OfThisThread()) {
  if (*open_count_ > 0) {
    Result<std::unique_ptr<BufferPool>> made = BufferPool::Create(BufferPool::kBuffersPerTransfer, options.chunk_bytes);
    if (!made.ok()) Throw(made.status(), "");
    own_buffers_ = std::move(made).value();
    buffers_ = own_buffers_.get();
  } else {
    if (options.ring_device.has_value()) ring_device_ = &DeviceOf(*options.ring_device);
    Result<BufferPool*> ring = Ring({options.ring_bytes, options.chunk_bytes, options.ring_device.value_or(-1)});
    ThrowIfError(ring.status(), "");
    buffers_ = ring.value();
  }
  ++*open_count_;
}

const std::shared_ptr<std::atomic<int>>& OpenTransfer::OfThisThread() {
  thread_local const auto count = std::make_shared<std::atomic<int>>(0);
  return count;
}

}  // namespace fastpersist
