// A CUDA device for transfers: its own streams copy between pinned host memory and the device, beside the caller's
// kernels; events order them against the caller's streams. A call waits for the device only if its comment says so;
// none synchronises the device or the caller's streams.
//
// A started copy is *complete* when the device touches neither of its sides any more.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/status.h"
#include "device/cuda_driver.h"

namespace fastpersist {

class CopyStream;
class Device;

// A point in the order of a stream's copies. The destructor returns its event to the device. Move-only; empty after a
// move and by default.
class CopyMark {
 public:
  CopyMark() = default;
  CopyMark(CopyMark&& other) noexcept;
  CopyMark& operator=(CopyMark&& other) noexcept;
  ~CopyMark();
  CopyMark(const CopyMark&) = delete;
  CopyMark& operator=(const CopyMark&) = delete;

  explicit operator bool() const { return device_ != nullptr; }

  // Whether every copy before the mark is complete. Also returns errors of the device. REQUIRES here and in Wait: not
  // empty.
  Result<bool> IsComplete() const;
  // Wait until IsComplete, checked every 20 … 200 µs. Calls `poll` about every 50 ms, unless it is empty; its error
  // ends the wait.
  Status Wait(const std::function<Status()>& poll) const;

 private:
  friend class CopyEnd;
  friend class CopyStream;
  CopyMark(Device* device, CopyStream* stream, CudaEvent event) : device_(device), stream_(stream), event_(event) {}

  Device* device_ = nullptr;
  CopyStream* stream_ = nullptr;
  CudaEvent event_ = nullptr;
};

// The end of started copies. It guards their memory: unlike a mark it has no errors, and it is complete only when the
// device makes none of these copies any more. Copyable; thread-safe.
class CopyEnd {
 public:
  // The end of all copies that were started in the stream so far. If no mark can be made: of all copies that will ever
  // be started in it.
  explicit CopyEnd(CopyStream& stream);
  // REQUIRES: the mark is not empty.
  explicit CopyEnd(std::shared_ptr<const CopyMark> mark);

  bool IsComplete() const;

 private:
  friend class Grace;

  std::shared_ptr<const CopyMark> mark_;  // none could be made
  CopyStream* stream_;
  // Shared by all copies of this object: once complete, it stays complete, even if the stream has new copies.
  std::shared_ptr<std::atomic<bool>> seen_ = std::make_shared<std::atomic<bool>>(false);
};

// The condition for a quarantine: all of these are complete.
CopiesComplete CompletionOf(std::vector<CopyEnd> ends);

// How long a transfer that gives up waits for its started copies. A stream that never ends, behind a collective whose
// peer is gone, must not block a caller for ever. Memory whose copies are incomplete after that time is quarantined
// (core/quarantine.h).
class Grace {
 public:
  static constexpr std::chrono::milliseconds kDefault{10'000};
  // Set the duration of objects that are made later. For tests.
  static void Set(std::chrono::milliseconds duration);

  // Start the time.
  Grace();

  // Whether the time has passed. The second function is also true if the stream of these copies was given up before.
  bool IsOver() const;
  bool IsOver(const CopyEnd& end) const;
  // Wait until all ends are complete; returns false if the time runs out first. Does not wait for streams that were
  // given up before. Calls `meanwhile` about every 50 ms, unless it is empty.
  bool WaitFor(std::span<const CopyEnd> ends, const std::function<void()>& meanwhile = {}) const;
  // Call this after WaitFor returned false: the streams refuse further copies until these ends are complete. So the
  // quarantine stays bounded, and the next save of the device fails at once. Returns the condition for the quarantine.
  static CopiesComplete GiveUp(std::vector<CopyEnd> ends);

 private:
  std::chrono::steady_clock::time_point deadline_;
};

// One direction of a device: it makes its copies in the order in which they were started. Thread-safe. While the stream
// is given up (Grace::GiveUp), calls that start or order copies fail with kDeviceError.
class CopyStream {
 public:
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Order later copies after everything that the caller's stream holds now. `caller_stream` is a CUstream as an
  // integer, as in torch.cuda.Stream.cuda_stream; 0: the legacy default stream. kUnsupported, here and in HoldCaller,
  // while that stream is captured into a CUDA graph, because its work has not begun then.
  Status FollowCaller(uintptr_t caller_stream);
  // Order the caller's later work after everything started here so far.
  Status HoldCaller(uintptr_t caller_stream);

  // Wait until the next copy can start without blocking inside the driver, where nothing could end the wait: until few
  // copies are queued, or none if the host memory is not pinned. `poll` as of CopyMark::Wait. For one thread: copies
  // that other threads queue meanwhile may block the next one all the same.
  Status AwaitRoom(bool is_pinned, const std::function<Status()>& poll);

  // Whether AwaitRoom would return at once. For any thread if the memory is pinned, else for one.
  Result<bool> HasRoom(bool is_pinned);

  // Start one copy. Both sides stay allocated, and the source unchanged, until a mark made afterwards is complete. The
  // call may wait for the copy if the host memory is not pinned.
  Status ToHost(std::byte* target, CudaAddress source, size_t size_bytes);
  Status ToDevice(CudaAddress target, const std::byte* source, size_t size_bytes);
  // Start one copy between two places of the device, or set bytes of it to zero.
  Status Within(CudaAddress target, CudaAddress source, size_t size_bytes);
  Status Zero(CudaAddress target, size_t size_bytes);

  Result<CopyMark> Mark();

 private:
  friend class CopyEnd;
  friend class Device;
  friend class Grace;
  explicit CopyStream(Device& device) : device_(device) {}

  bool AllComplete() const;
  std::optional<std::chrono::steady_clock::time_point> GivenUpSince();
  Status RefuseGivenUp();
  Status Started(CudaResult result, const char* what);

  Device& device_;
  CudaStream stream_ = nullptr;
  std::mutex windows_mutex_;
  uint64_t started_count_ = 0;
  std::deque<std::shared_ptr<const CopyMark>> windows_;  // one for each kWindowCopies that may be incomplete
  std::atomic<bool> has_given_up_{false};                // given_up_ is not empty
  std::mutex given_up_mutex_;
  std::vector<CopyEnd> given_up_;
  std::chrono::steady_clock::time_point given_up_since_;
};

// One for each device of the process, made at first use and never freed: torch keeps the same primary context, and
// other threads' transfers may outlive the interpreter's shutdown. Thread-safe.
class Device {
 public:
  // Returns the device with torch's ordinal ("cuda:1" is 1; CUDA_VISIBLE_DEVICES counts). kUnsupported as
  // CudaDriver::Get, and in a forked child of a process that has used the device; kDeviceError if the device fails (the
  // next call tries again).
  static Result<Device*> Get(int ordinal);

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }

  CopyStream& to_host() { return to_host_; }
  CopyStream& to_device() { return to_device_; }

  // Returns the driver's allocation that contains an address: its start and size in bytes.
  Result<std::pair<CudaAddress, size_t>> RangeOf(CudaAddress address);

 private:
  friend class CopyEnd;
  friend class CopyMark;
  friend class CopyStream;
  friend class ContextScope;
  friend class Pinned;

  Device(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status Open();  // can be called again after a failure, and continues there
  bool is_open() const { return to_device_.stream_ != nullptr; }  // Open sets it last
  Status Check(CudaResult result, const char* what) const;
  Result<CudaEvent> TakeEvent();
  void PutEvent(CudaEvent event);
  Status Order(CudaStream earlier, CudaStream later);
  Status RefuseCapture(CudaStream caller) const;

  const CudaDriver& driver_;
  const int ordinal_;
  int numa_node_ = -1;  // the node of the nearest host memory; -1: unknown, or the machine has one node
  CudaContext context_ = nullptr;
  CopyStream to_host_{*this};
  CopyStream to_device_{*this};
  std::mutex events_mutex_;
  std::vector<CudaEvent> free_events_;
};

// Makes the device's context current for the calling thread while it lives; the former context is current again
// afterwards. The functions of this file enter it themselves; other calls of the driver, or of a library above it, need
// a scope. A scope inside another one of the same device makes no driver call, so one scope around many calls is
// faster; but code that may change the context must not run inside it.
//
// The thread is in the relaxed capture mode meanwhile. Otherwise the driver calls would break a CUDA graph that the
// application captures at that moment.
class ContextScope {
 public:
  explicit ContextScope(const Device& device) : status_(Enter(device)) {}
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  // If this is an error, make no calls. kUnsupported in a forked child and at the end of the process.
  const Status& status() const { return status_; }

 private:
  Status Enter(const Device& device);

  friend class CopyStream;

  const CudaDriver* driver_ = nullptr;
  CudaResult result_ = kCudaSuccess;
  const Device* outer_ = nullptr;
  bool relaxed_ = false;
  int mode_ = kCudaCaptureModeRelaxed;
  Status status_;
};

// Host memory that is registered with the device while this lives, so that the device reads and writes it without an
// extra copy by the driver. If the driver refuses, copies of this memory are slower, and why_not() gives the reason.
// Move-only.
class Pinned {
 public:
  Pinned() = default;
  // Bind untouched pages to the device's NUMA node (advice), then register all for all devices. REQUIRES: memory of
  // MapBuffers, or memory that is never unmapped, from a page's start; it outlives this.
  static Pinned Register(Device& device, std::span<std::byte> memory);
  Pinned(Pinned&& other) noexcept;
  Pinned& operator=(Pinned&& other) noexcept;
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  bool ok() const { return memory_ != nullptr; }
  const std::string& why_not() const { return why_not_; }

  // Unregister before the destructor does. Returns false if the device is lost and the driver does not release the
  // memory, which then stays mapped (KeepMapped). Does nothing in a forked child, and at the end of the process.
  bool Release();

 private:
  std::byte* memory_ = nullptr;
  Device* device_ = nullptr;
  std::string why_not_;
};

}  // namespace fastpersist
