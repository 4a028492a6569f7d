#include "device/pinning.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "core/pinned_cache.h"

namespace fastpersist {
namespace {

std::mutex g_mutex;
std::string g_why_not;  // guarded by g_mutex
std::atomic<uint64_t> g_pinned_bytes{0};

// A pinned range whose bytes are counted while it lives.
class CountedPin {
 public:
  CountedPin(Pinned pinned, uint64_t size_bytes) : pinned_(std::move(pinned)), size_bytes_(size_bytes) {
    g_pinned_bytes += size_bytes_;
  }
  ~CountedPin() {
    if (pinned_.Release()) g_pinned_bytes -= size_bytes_;
  }
  CountedPin(const CountedPin&) = delete;
  CountedPin& operator=(const CountedPin&) = delete;

 private:
  Pinned pinned_;
  const uint64_t size_bytes_;
};

}  // namespace

Pin PinFor(Device& device) {
  return [&device](std::span<std::byte> memory) -> std::shared_ptr<void> {
    Pinned pinned = Pinned::Register(device, memory);
    if (!pinned.ok() && EmptyPinnedCache() > 0)
      pinned = Pinned::Register(device, memory);  // the driver may have a limit
    if (!pinned.ok()) {
      const std::lock_guard lock(g_mutex);
      g_why_not = pinned.why_not();
      return nullptr;
    }
    return std::make_shared<CountedPin>(std::move(pinned), memory.size());
  };
}

std::string WhyNotPinned() {
  const std::lock_guard lock(g_mutex);
  return g_why_not;
}

uint64_t PinnedBytes() { return g_pinned_bytes; }

}  // namespace fastpersist
