// The bytes of one file between save() and the writer, while training goes on. The writer takes them from the front,
// in file order, from where they are. Whoever is about to change them copies from the back into the arena what the
// writer has not reached yet; the two meet in the middle, each at the speed of its own core, and what was copied is
// then taken from the arena. Nobody waits longer than for the bytes that are neither written nor copied.
//
// Bytes in the memory of a device are copied by the device, in the order of its own stream (device/device.h): what
// holds for the thread of a host copy, "has returned", holds there for the stream, "has been started". So whoever has
// waited here makes the stream that changes the bytes wait too (CopyStream::HoldCaller), and no thread waits for the
// device. Small sources that lie close together there, as an allocator places them, go into the arena in one copy.
//
// Which bytes may change when, and who must call Capture before, is decided above (fastpersist/saving/capture.py).
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/status.h"
#include "device/device.h"

namespace fastpersist {

enum class SourceKind : uint8_t {
  kStable,    // may change once Capture(kStable) has returned
  kVolatile,  // may change once Capture(kVolatile) has returned
  kConstant,  // does not change before the writer has passed
};
constexpr size_t kSourceKindCount = 3;

// Thread-safe: guarded by the arena's mutex, which is not held while bytes are copied. One writer at a time. A device
// that fails while it captures fails the writer; there is nothing to protect then.
class Snapshot {
 public:
  explicit Snapshot(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
  ~Snapshot() { Close(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Called before anybody takes or captures. Returns the source's index: 0, 1, 2 … The writer takes sources in this
  // order. The memory, of the host or of a device, stays where it is, and allocated, until the writer has passed or
  // Close().
  uint32_t Add(const std::byte* address, uint64_t size_bytes, SourceKind kind) {
    return AddSource(reinterpret_cast<uintptr_t>(address), size_bytes, kind, nullptr);
  }
  uint32_t Add(Device& device, CudaAddress address, uint64_t size_bytes, SourceKind kind);

  // From now on a source is these bytes of it, which the writer takes from offset 0 on; the others are nobody's concern
  // any more, and their copies are given back. For whoever learns only after save() which bytes will be written.
  // REQUIRES: the writer has taken none of the source; from_bytes <= until_bytes <= its size.
  void Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes);

  using Poll = std::function<Status()>;

  // Make it safe to change the bytes of all sources of a kind. Copies while the arena has room; what does not fit is
  // waited for: the writer passes it, or blocks come back. wait == false: return when there is no room.
  // After Close() there is nothing to protect, and it returns at once. `poll` is asked about every 50 ms while waiting;
  // its error ends the wait, and nothing is safe to change then. Bytes of devices are safe to change for a stream that
  // then waits for the devices' copies.
  Status Capture(SourceKind kind, bool wait, const Poll& poll);

  // For the writer: the next bytes of a source, from `offset_bytes` on, 1 … max_bytes of them; valid and unchanging
  // until Done(). REQUIRES: offset_bytes is where the last take of this source ended.
  struct Taken {
    uintptr_t address;
    uint64_t size_bytes;
    Device* device;  // null: host memory. Else the copy from there is started before Done() is called.

    std::span<const std::byte> host_bytes() const {
      FP_CHECK(device == nullptr);
      return {reinterpret_cast<const std::byte*>(address), size_bytes};
    }
  };
  Result<Taken> Take(uint32_t source, uint64_t offset_bytes, uint64_t max_bytes, const Poll& poll);
  void Done();

  // Make the caller's stream wait for the copies from a device that have been started, after Capture. False: it cannot,
  // since it is being captured into a CUDA graph; then a thread has to wait until Settled().
  bool HoldCaller(Device& device, uintptr_t caller_stream);

  // Whether Capture has nothing left to do of stable and volatile sources, and all copies that devices were told to
  // make have landed: no stream has to wait any more. The error is what a device has failed with.
  Result<bool> Settled();

  // Let the writer spread its work over `duration`, beginning `delay` from now: the first byte is taken no earlier than
  // that begins, the last no earlier than it ends, unless Hurry() was called, which Capture(kStable) does when it
  // waits.
  void Pace(std::chrono::nanoseconds delay, std::chrono::nanoseconds duration);
  void Hurry();

  // Give the arena's blocks back and let everybody who waits go: the writer has finished, or never will. Blocks into
  // which a device still copies after the grace time go to quarantine, and the sources may go all the same: the device
  // only reads them, as in FileWriter. On any thread; a writer that is between Take() and Done() keeps what it looks at
  // until Done(), and gets no more.
  void Close();

  struct Counts {
    std::array<uint64_t, kSourceKindCount> remaining_bytes = {};  // by kind: neither written nor copied
    std::array<uint64_t, kSourceKindCount> copied_bytes = {};     // by kind: copied into the arena
    uint64_t taken_bytes = 0;
  };
  Counts counts();

 private:
  struct Block {
    std::byte* memory;
    uint32_t user_count;             // segments in it, and one while it is being filled
    Device* device;                  // that fills it; null: a thread does
    std::shared_ptr<CopyMark> mark;  // behind the copies into it; null: it is being filled, or there are none
    bool unmarked;                   // there are copies into it, and no mark: not yet, or none could be had
    bool landed;
  };
  // The block that is being filled: the thread that captures has one, and the writer, when it gathers.
  struct OpenBlock {
    Block* block = nullptr;
    size_t fill_bytes = 0;
  };
  struct Segment {
    uint64_t from_bytes;  // in the source
    uint64_t size_bytes;
    const std::byte* memory;
    Block* block;
    bool landed;  // whatever the block says
  };
  struct Source {
    uintptr_t address;
    Device* device;
    uint64_t size_bytes;
    SourceKind kind;
    uint64_t taken_bytes = 0;       // the writer has passed these,
    uint64_t leased_bytes = 0;      // and is looking at these behind them
    uint64_t claimed_bytes;         // from here on it is in the arena, or is being copied there,
    uint64_t copied_from_bytes;     // and from here on it is in the arena
    std::vector<Segment> segments;  // the lowest is the last: it was copied last, and is taken first
    size_t cluster = kNoCluster;

    bool untouched() const { return taken_bytes == 0 && leased_bytes == 0 && claimed_bytes == size_bytes; }
  };
  static constexpr size_t kNoCluster = SIZE_MAX;

  uint32_t AddSource(uintptr_t address, uint64_t size_bytes, SourceKind kind, Device* device);
  bool Wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout, const Poll& poll, Status& stopped);
  bool EnsureRoom(std::unique_lock<std::mutex>& lock, OpenBlock& open, Device* device, size_t size_bytes);
  void CloseBlock(OpenBlock& open);
  void AddUnmarked(Block& block);
  void MarkFull();
  void CopyOnce(std::unique_lock<std::mutex>& lock, Source& source, uint64_t live_bytes);
  Block* AddBlock(std::byte* memory, Device* device);
  Status Land(std::unique_lock<std::mutex>& lock, const Segment& segment, const Poll& poll);
  void Release(Block* block);
  void ReturnUnlanded(std::unique_lock<std::mutex>& lock, bool give_up);
  void FindClusters();
  bool Gather(std::unique_lock<std::mutex>& lock, OpenBlock& open, const Source& source, const Poll& poll);
  Status CopyToHost(Device& device, std::byte* target, CudaAddress from, uint64_t size_bytes, bool is_pinned,
                    const Poll& poll);
  Status GatherAndLand(std::unique_lock<std::mutex>& lock, const Source& source, const Poll& poll);
  void EndLease();

  const std::shared_ptr<Arena> arena_;
  std::vector<Source> sources_;
  std::deque<Block> blocks_;      // a deque: addresses stay
  std::vector<Block*> unmarked_;  // full, and waiting for a mark together with others
  std::vector<Block*> unlanded_;  // nobody's, and not back in the arena
  int returning_count_ = 0;       // of those, being waited for by somebody
  OpenBlock capture_block_;
  OpenBlock writer_block_;
  std::vector<std::vector<uint32_t>>
      clusters_;  // indexes of small sources that lie close together in a device's memory
  bool clusters_found_ = false;
  Counts counts_;
  std::vector<Device*> devices_;
  std::vector<CopyMark> settling_;  // one for each device, once Capture has nothing left to do
  bool settled_ = false;
  Status failed_;  // a device could not copy what Capture told it to: the writer gets this, and no gate waits any more
  uint64_t total_bytes_ = 0;
  Source* leased_ = nullptr;
  bool leased_live_ = false;
  bool capturing_ = false;  // a thread is inside Capture
  int copying_count_ = 0;   // threads that read a source without the lock
  bool closed_ = false;
  bool hurry_ = false;
  std::chrono::steady_clock::time_point pace_start_;
  std::chrono::nanoseconds pace_duration_{0};
};

}  // namespace fastpersist
