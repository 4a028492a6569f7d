// The bytes of one file between save() and the writer, while training goes on. The writer takes them from the front,
// in file order, from where they are. Before a thread changes them, it copies from the back into the arena what the
// writer has not passed yet; the two meet in the middle, each at the speed of its own core, and what was copied is
// then taken from the arena. The barrier waits no longer than for the bytes that are neither written nor copied.
//
// Bytes in the memory of a device are copied by the device, in the order of its own stream (device/device.h): where a
// host copy "has returned", a device's "has been started". So a thread that has waited here makes the stream that
// changes the bytes wait too (CopyStream::HoldCaller), and no thread waits for the device. Small sources that lie close
// together there, as an allocator places them, go into the arena in one copy.
//
// Which bytes may change when, and who must call Capture before, is decided above (fastpersist/saving/capture.py). What
// is done next, and by whom, is decided in capture_core; here threads do it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/status.h"
#include "device/device.h"
#include "transfer/capture_core.h"

namespace fastpersist {

// Thread-safe: guarded by the arena's mutex, which is not held while bytes are copied. One writer at a time. A device
// that fails while it captures fails the writer; there is nothing to protect then.
class Snapshot {
 public:
  using Counts = CaptureLedger::Counts;
  using Taken = CaptureCore::Taken;
  using Poll = std::function<Status()>;

  explicit Snapshot(std::shared_ptr<Arena> arena) : arena_(std::move(arena)), core_(*arena_) {}
  ~Snapshot() { Close(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Called before anybody takes or captures. Returns the source's index: 0, 1, 2 … The writer takes sources in this
  // order. The memory, of the host or of a device, stays where it is, and allocated, until the writer has passed or
  // Close().
  uint32_t Add(const std::byte* address, uint64_t size_bytes, SourceKind kind) {
    return core_.Add(reinterpret_cast<uintptr_t>(address), size_bytes, kind, nullptr);
  }
  uint32_t Add(Device& device, CudaAddress address, uint64_t size_bytes, SourceKind kind);

  // From now on a source is these bytes of it, which the writer takes from offset 0 on; the others need no protection
  // any more, and their copies are given back. For a writer that learns only after save() which bytes it will write.
  // REQUIRES: the writer has taken none of the source; from_bytes <= until_bytes <= its size.
  void Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes);

  // Make it safe to change the bytes of all sources of a kind. Copies while the arena has blocks; what does not fit is
  // waited for: the writer passes it, or blocks come back. wait == false: return when there are none.
  // After Close() there is nothing to protect, and it returns at once. `poll` is asked about every 50 ms while waiting;
  // its error ends the wait, and nothing is safe to change then. Bytes of devices are safe to change for a stream that
  // then waits for the devices' copies.
  Status Capture(SourceKind kind, bool wait, const Poll& poll);

  // For the writer: lease the next bytes of a source, from `offset_bytes` on, 1 … max_bytes of them; valid and
  // unchanging until EndLease(). REQUIRES: offset_bytes is where the last take of this source ended.
  Result<Taken> Take(uint32_t source, uint64_t offset_bytes, uint64_t max_bytes, const Poll& poll);
  void EndLease();

  // Make the caller's stream wait for the copies from a device that have been started, after Capture. False: it cannot,
  // since it is being captured into a CUDA graph; then a thread has to wait until AreCopiesComplete().
  bool HoldCaller(Device& device, uintptr_t caller_stream);

  // Whether Capture has nothing left to do of stable and volatile sources, and all copies that devices were told to
  // make are complete: no stream has to wait any more. The error is what a device has failed with.
  Result<bool> AreCopiesComplete();

  // Let the writer spread its work over `duration`, beginning `delay` from now: the first byte is taken no earlier than
  // that begins, the last no earlier than it ends, unless Hurry() was called, which Capture(kStable) does when it
  // waits.
  void Pace(std::chrono::nanoseconds delay, std::chrono::nanoseconds duration);
  void Hurry();

  // Give the arena's blocks back and let every thread go that waits: the writer has finished, or never will. Blocks
  // into which a device still copies after the grace time are quarantined, and the sources may go all the same: the
  // device only reads them, as in FileWriter. On any thread; a writer between Take() and EndLease() keeps its lease,
  // and gets no more.
  void Close();

  Counts counts();

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool Wait(Lock& lock, std::chrono::nanoseconds timeout, const Poll& poll, Status& stopped);
  void TellOthers();
  Status Perform(const CaptureCore::Copy& copy, const Poll& poll);
  void ReturnIncomplete(Lock& lock, bool give_up);

  const std::shared_ptr<Arena> arena_;
  CaptureCore core_;
  std::vector<CopyMark> last_marks_;  // one for each device, once Capture has nothing left to do
  bool are_copies_complete_ = false;
};

}  // namespace fastpersist
