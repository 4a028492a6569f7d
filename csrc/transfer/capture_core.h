// Decides the next step of the threads that capture and of the snapshot's writer: copy this, wait until that copy is
// complete, wait for a change, or end. No step copies, waits or reads a clock. Threads perform the steps in
// snapshot.cc, simulations in tests/csrc/capture_simulation_test.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/status.h"
#include "device/device.h"
#include "transfer/capture_ledger.h"
#include "transfer/captured_blocks.h"
#include "transfer/clock.h"

namespace fastpersist {

// Guarded by the arena's mutex: every caller holds it. A function that takes `lock` may release it meanwhile.
class CaptureCore {
 public:
  explicit CaptureCore(Arena& arena) : arena_(arena), blocks_(arena) {}

  void Reserve(size_t count) {
    memories_.reserve(memories_.size() + count);
    ledger_.Reserve(count);
  }
  uint32_t Add(uintptr_t address, uint64_t size_bytes, SourceKind kind, Device* device);

  enum class Next : uint8_t {
    kEnd,    // nothing is left to do; the run holds the result
    kWait,   // until another step changes something (TakeChanged), or until run.until
    kCopy,   // perform run.copy without the lock, then call EndCopy
    kAwait,  // until run.mark is reached, without the lock; then call NextOf again
  };

  // A copy into the arena, performed without the lock.
  struct Copy {
    Device* device = nullptr;  // makes the copy; null: the calling thread does
    uintptr_t from = 0;
    std::byte* target = nullptr;
    uint64_t size_bytes = 0;
    bool is_pinned = false;

    // For the core only.
    CapturedBlocks::Filler filler = CapturedBlocks::Filler::kCapture;
    std::vector<uint32_t> sources;               // one, or all that are gathered
    std::vector<CapturedBlocks::Block*> blocks;  // consecutive in memory
    uint64_t first_bytes = 0;                    // the offset of the run's first block
  };
  void EndCopy(Copy& copy, Status status);

  // Capture all sources of a kind.
  struct CaptureRun {
    SourceKind kind = SourceKind::kStable;
    bool may_wait = false;  // false: end where there is no room
    Copy copy;

    bool is_first = false;  // the others wait
    bool is_swept = false;  // nothing is left to copy
    size_t turn = 0;
  };
  Next NextOf(CaptureRun& run, std::unique_lock<std::mutex>& lock);
  // After kEnd, or earlier to give the run up.
  void End(CaptureRun& run);

  // The next bytes of a source for the writer.
  struct Taken {
    uintptr_t address;
    uint64_t size_bytes;
    Device* device;  // null: host memory. Else the caller starts the device's copy before it calls EndLease().

    std::span<const std::byte> host_bytes() const {
      FP_CHECK(device == nullptr);
      return {reinterpret_cast<const std::byte*>(address), size_bytes};
    }
  };
  struct TakeRun {
    uint32_t source = 0;
    uint64_t offset_bytes = 0;  // where the last take of this source ended
    uint64_t max_bytes = 0;
    Copy copy;
    std::shared_ptr<const CopyMark> mark = nullptr;
    bool marks_block = false;  // the mark is behind all copies into the segment's block
    std::optional<TimePoint> until = std::nullopt;
    Status status;                              // kEnd: an error, or
    std::optional<Taken> taken = std::nullopt;  // these bytes, leased until EndLease

    enum class Stage : uint8_t { kPace, kFirst, kGathering, kGathered, kLease, kCompleting } stage = Stage::kPace;
  };
  Next NextOf(TakeRun& run, TimePoint now, std::unique_lock<std::mutex>& lock);
  // The wait for run.mark failed: the run is over.
  void Fail(TakeRun& run, Status status);
  void EndLease();

  // Let the writer spread its work over `duration` from `start` on, until Hurry() is called.
  void Pace(TimePoint start, std::chrono::nanoseconds duration);
  void Hurry();

  bool is_copying() const { return copying_count_ > 0; }
  // REQUIRES: !is_copying().
  void Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes);

  // To end: Close; wait while is_copying; ReleaseAll; then Return each block of TakeIncomplete; wait while
  // is_returning.
  void Close();
  bool is_closed() const { return closed_; }
  void ReleaseAll();

  // A block without users into which a device still copies; null: there is none.
  CapturedBlocks::Block* TakeIncomplete() { return blocks_.TakeIncomplete(); }
  void Return(CapturedBlocks::Block* block, CopiesComplete landed);
  bool is_returning() const { return blocks_.returning_count() > 0; }

  // A device has failed: the writer gets this error, and barriers stop waiting.
  void SetFailed(Status status);
  const Status& failed() const { return failed_; }

  const std::vector<Device*>& devices() const { return devices_; }
  const CaptureLedger& ledger() const { return ledger_; }

  // Whether a waiting thread has to look again: something has changed since the last call.
  bool TakeChanged() { return std::exchange(changed_, false); }

 private:
  using Block = CapturedBlocks::Block;
  using Filler = CapturedBlocks::Filler;
  using Segment = CapturedBlocks::Segment;
  static constexpr size_t kNoCluster = SIZE_MAX;
  // The memory of a source, and its copied segments. The ledger counts the bytes.
  struct Memory {
    uintptr_t address;
    Device* device;
    std::vector<Segment> segments;  // the lowest is the last: it was copied last, and is taken first
    size_t cluster = kNoCluster;
  };
  struct Lease {
    uint32_t source;
    bool is_live;
  };

  void FindClusters();
  bool EnsureRoom(std::unique_lock<std::mutex>& lock, Filler filler, Device* device, size_t size_bytes);
  bool Gather(std::unique_lock<std::mutex>& lock, Filler filler, uint32_t source, Copy& copy);
  void BeginCopy(uint32_t source, Copy& copy);
  void AddSegments(const Copy& copy);
  Next Sweep(CaptureRun& run, std::unique_lock<std::mutex>& lock);
  TimePoint DueTime(const TakeRun& run) const;
  Next First(TakeRun& run, std::unique_lock<std::mutex>& lock);
  Next AwaitGathered(TakeRun& run);
  Next LeaseNext(TakeRun& run);
  Next EndWith(TakeRun& run, Status status);
  void CloseCaptureBlock();
  void Release(const Segment& segment) { changed_ |= blocks_.Release(segment); }

  Arena& arena_;
  CaptureLedger ledger_;
  CapturedBlocks blocks_;
  std::vector<Memory> memories_;                 // by source
  std::vector<std::vector<uint32_t>> clusters_;  // device_clusters.h
  bool are_clusters_found_ = false;
  std::vector<Device*> devices_;
  std::optional<Lease> lease_;
  Status failed_;
  bool capturing_ = false;  // a thread is inside a CaptureRun
  int copying_count_ = 0;   // copies, and waits for blocks, without the lock
  bool closed_ = false;
  bool hurry_ = false;
  bool changed_ = false;
  TimePoint pace_start_;
  std::chrono::nanoseconds pace_duration_{0};
};

}  // namespace fastpersist
