// Holds the bytes of one file between save() and the writer, while training goes on. The writer takes them from the
// front, in file order, from where they are. Before a thread changes bytes that the writer has not taken yet, it copies
// them into the arena, from the back. The two meet in the middle, each at the speed of its own core, and the writer
// takes the copied bytes from the arena. The barrier waits only for bytes that are neither written nor copied.
//
// A device copies its own memory, in the order of its own stream (device/device.h): where a host copy "has returned", a
// device's "has been started". A thread that has waited here therefore makes the stream that changes the bytes wait too
// (CopyStream::HoldCaller), and no thread waits for the device. Small sources that lie close together go into the arena
// in one copy.
//
// fastpersist/saving/capture.py decides which bytes may change when, and who must call Capture before. capture_core
// decides the steps; threads perform them here.
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

// Thread-safe: guarded by the arena's mutex, which is released during copies. One writer at a time. A device that fails
// during a capture fails the writer, and nothing needs protection any more.
class Snapshot {
 public:
  using Counts = CaptureLedger::Counts;
  using Taken = CaptureCore::Taken;
  using Poll = std::function<Status()>;

  // `thread_count`: the number of threads that share the copy of a large source in host memory.
  explicit Snapshot(std::shared_ptr<Arena> arena, size_t thread_count = 1)
      : arena_(std::move(arena)), thread_count_(thread_count), core_(*arena_) {}
  ~Snapshot() { Close(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Make room for so many more sources.
  void Reserve(size_t count) { core_.Reserve(count); }

  // Add a source and return its index: 0, 1, 2 … REQUIRES: nothing was taken or captured yet. The writer takes sources
  // in this order. The memory, of the host or of a device, stays allocated at its place until the writer has taken it
  // or Close().
  uint32_t Add(const std::byte* address, uint64_t size_bytes, SourceKind kind) {
    return core_.Add(reinterpret_cast<uintptr_t>(address), size_bytes, kind, nullptr);
  }
  uint32_t Add(Device& device, CudaAddress address, uint64_t size_bytes, SourceKind kind);

  // Reduce a source to these bytes, which the writer takes from offset 0 on. The others lose their protection and their
  // copies. For a writer that learns only after save() which bytes it will write. REQUIRES: the writer has taken none
  // of the source; from_bytes <= until_bytes <= its size.
  void Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes);

  // Make it safe to change the bytes of all sources of a kind. Copies while the arena has blocks, then waits until the
  // writer takes the rest or blocks come back; with `wait` false it returns instead. After Close() it returns at once.
  // While it waits, it calls `poll` about every 50 ms; its error ends the wait, and no byte is safe to change. Bytes of
  // devices are safe to change only for a stream that waits for the devices' copies.
  Status Capture(SourceKind kind, bool wait, const Poll& poll);

  // For the writer: lease 1 … max_bytes bytes of a source from `offset_bytes` on. They stay valid and unchanged until
  // EndLease(). REQUIRES: offset_bytes is where the last take of this source ended.
  Result<Taken> Take(uint32_t source, uint64_t offset_bytes, uint64_t max_bytes, const Poll& poll);
  void EndLease();

  // After Capture: make the caller's stream wait for the started copies of a device. Returns false for a stream that is
  // being captured into a CUDA graph and cannot wait; then a thread has to wait until AreCopiesComplete().
  bool HoldCaller(Device& device, uintptr_t caller_stream);

  // Whether no stream has to wait any more: Capture has nothing left to copy of stable and volatile sources, and all
  // copies of devices are complete. The error is that of a failed device.
  Result<bool> AreCopiesComplete();

  // Let the writer spread its work over `duration`, beginning `delay` from now: it takes the first byte no earlier than
  // the beginning and the last no earlier than the end. Hurry() ends that; Capture(kStable) calls it when it waits.
  void Pace(std::chrono::nanoseconds delay, std::chrono::nanoseconds duration);
  void Hurry();

  // End the snapshot, because the writer has finished or never will: give the arena's blocks back and wake all waiting
  // threads. Blocks into which a device still copies after the grace time are quarantined. The sources may be freed
  // even so: the device only reads them, as in FileWriter. Any thread may call it; a writer between Take() and
  // EndLease() keeps its lease and gets no more.
  void Close();

  Counts counts();

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool Wait(Lock& lock, std::chrono::nanoseconds timeout, const Poll& poll, Status& stopped);
  void TellOthers();
  Status Perform(const CaptureCore::Copy& copy, const Poll& poll);
  void ReturnIncomplete(Lock& lock, bool give_up);

  const std::shared_ptr<Arena> arena_;
  const size_t thread_count_;
  CaptureCore core_;
  std::vector<CopyMark> last_marks_;  // one for each device, once nothing is left to capture
  bool are_copies_complete_ = false;
};

}  // namespace fastpersist
