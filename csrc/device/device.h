// A CUDA device as transfers use it: streams of its own, on which copies between pinned host memory and the device run
// beside the caller's kernels, ordered against the caller's streams by events. A call waits for the device only where
// its comment says so; none synchronises the device or the caller's streams.
//
// A copy that was started is *complete* when the device touches neither of its sides any more.
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

// A point in the order of a stream's copies. Its event goes back to the device for reuse. Move-only; empty after a
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

  // Whether every copy before the mark is complete. An error of the device shows here, too.
  // REQUIRES of both: not empty.
  Result<bool> IsComplete() const;
  // Waits until IsComplete, which it asks every 20 … 200 µs. `poll` is called about every 50 ms, and its error ends the
  // wait; it may be empty.
  Status Wait(const std::function<Status()>& poll) const;

 private:
  friend class CopyEnd;
  friend class CopyStream;
  CopyMark(Device* device, CopyStream* stream, CudaEvent event) : device_(device), stream_(stream), event_(event) {}

  Device* device_ = nullptr;
  CopyStream* stream_ = nullptr;
  CudaEvent event_ = nullptr;
};

// The end of copies that were started. It guards their memory: unlike a mark it has no errors, and it is complete only
// when the device makes none of these copies any more. Copyable; thread-safe.
class CopyEnd {
 public:
  // Of all that the stream was given so far. Where no mark can be had, the end of all that the stream is ever given.
  explicit CopyEnd(CopyStream& stream);
  // REQUIRES: the mark is not empty.
  explicit CopyEnd(std::shared_ptr<const CopyMark> mark);

  bool IsComplete() const;

 private:
  friend class Grace;

  std::shared_ptr<const CopyMark> mark_;  // null: none could be had
  CopyStream* stream_;
  // Shared by all copies of this object. What was complete once stays so, also where a later look at the whole stream
  // would not show it.
  std::shared_ptr<std::atomic<bool>> seen_ = std::make_shared<std::atomic<bool>>(false);
};

// The condition for a quarantine: all of these are complete.
CopiesComplete CompletionOf(std::vector<CopyEnd> ends);

// How long a transfer that gives up waits for the copies that it started. A stream that never ends, since it follows a
// collective whose peer is gone, must not hold up anybody for ever. Memory whose copies are not complete after that
// time is quarantined (core/quarantine.h).
class Grace {
 public:
  static constexpr std::chrono::milliseconds kDefault{10'000};
  // The duration for all objects that are made later. For tests.
  static void Set(std::chrono::milliseconds duration);

  // The time starts now.
  Grace();

  // Whether the time has passed, or the stream of these copies was given up before.
  bool IsOver() const;
  bool IsOver(const CopyEnd& end) const;
  // Whether all ends are complete in time. Streams that were given up before are not waited for again. `meanwhile` is
  // called about every 50 ms; it may be empty.
  bool WaitFor(std::span<const CopyEnd> ends, const std::function<void()>& meanwhile = {}) const;
  // After WaitFor returned false: the streams take no more copies until these ends are complete. So the quarantine
  // stays bounded, and the next save of the device fails at once. Returns the condition for the quarantine.
  static CopiesComplete GiveUp(std::vector<CopyEnd> ends);

 private:
  std::chrono::steady_clock::time_point deadline_;
};

// One direction of a device: its copies are done in the order in which they were started. Thread-safe. What starts or
// orders copies fails with kDeviceError while the stream is given up (Grace::GiveUp).
class CopyStream {
 public:
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // What is started from now on comes after everything that the caller's stream (a CUstream as an integer, as
  // torch.cuda.Stream.cuda_stream gives it; 0: the legacy default stream) holds at this moment. kUnsupported, here and
  // in HoldCaller, while that stream is captured into a CUDA graph: its work has not begun when this returns.
  Status FollowCaller(uintptr_t caller_stream);
  // What the caller's stream is given from now on comes after everything started here so far.
  Status HoldCaller(uintptr_t caller_stream);

  // Wait until a copy can be started that does not wait inside the driver, where nobody could end the wait: until few
  // copies are queued, or none where the host memory is not pinned. `poll` as of CopyMark::Wait. For one thread: copies
  // that others queue meanwhile may make the next one wait all the same.
  Status AwaitRoom(bool is_pinned, const std::function<Status()>& poll);

  // Whether AwaitRoom would return at once. For any thread where the memory is pinned, else for one.
  Result<bool> HasRoom(bool is_pinned);

  // Start one copy. The memory of both sides stays allocated, and the source unchanged, until a mark that was made
  // afterwards is complete. Host memory that is not pinned is legal: the call may then wait for the copy.
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
// transfers of other threads may outlive the interpreter's shutdown. Thread-safe.
class Device {
 public:
  // By the ordinal that torch uses ("cuda:1" is 1; CUDA_VISIBLE_DEVICES counts). kUnsupported as CudaDriver::Get, and
  // in a forked child of a process that has used it; kDeviceError when the device cannot be had (not remembered: the
  // next call tries again).
  static Result<Device*> Get(int ordinal);

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  // Of host memory that is nearest to it; -1: unknown, or the machine has one node.
  int numa_node() const { return numa_node_; }

  CopyStream& to_host() { return to_host_; }
  CopyStream& to_device() { return to_device_; }

  // The allocation that an address lies in, as the driver knows it.
  Result<std::pair<CudaAddress, size_t>> RangeOf(CudaAddress address);

 private:
  friend class CopyEnd;
  friend class CopyMark;
  friend class CopyStream;
  friend class ContextScope;
  friend class Pinned;

  Device(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status Open();                                                  // again after a failure: goes on where it stopped
  bool is_open() const { return to_device_.stream_ != nullptr; }  // the last step
  Status Check(CudaResult result, const char* what) const;
  Result<CudaEvent> TakeEvent();
  void PutEvent(CudaEvent event);
  Status Order(CudaStream earlier, CudaStream later);
  Status RefuseCapture(CudaStream caller) const;

  const CudaDriver& driver_;
  const int ordinal_;
  int numa_node_ = -1;
  CudaContext context_ = nullptr;
  CopyStream to_host_{*this};
  CopyStream to_device_{*this};
  std::mutex events_mutex_;
  std::vector<CudaEvent> free_events_;
};

// Makes the device's context current for the calling thread while this lives; afterwards the former context is current
// again. Calls of this file enter it by themselves; others that call the driver, or a library above it, need one.
// Scopes may be nested, and a scope inside one of the same device costs no call of the driver. So one scope around many
// calls is quicker, but no foreign code, which could make another context current, may run inside it.
//
// The thread is in the relaxed capture mode meanwhile. Otherwise a call of ours would break a CUDA graph that the
// application captures at that moment.
class ContextScope {
 public:
  explicit ContextScope(const Device& device) : status_(Enter(device)) {}
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  // Where this is an error, no call may be made. kUnsupported in a forked child and at the end of the process.
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

// Host memory that is registered with the device while this lives, so that the device reads and writes it without a
// copy by the driver. Where the driver refuses, copies from and to the memory are slower, and why_not() says why.
// Move-only.
class Pinned {
 public:
  Pinned() = default;
  // Binds pages that are not touched yet to the device's NUMA node (advice), then registers them for all devices.
  // REQUIRES: memory of MapBuffers, from its start, or that is never unmapped; it outlives this.
  static Pinned Register(Device& device, std::span<std::byte> memory);
  Pinned(Pinned&& other) noexcept;
  Pinned& operator=(Pinned&& other) noexcept;
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  bool ok() const { return memory_ != nullptr; }
  const std::string& why_not() const { return why_not_; }

  // What the destructor does, earlier. False: the device is lost and the driver does not release the memory, which then
  // stays mapped (KeepMapped). Does nothing in a forked child, and at the end of the process, when the driver is gone.
  bool Release();

 private:
  std::byte* memory_ = nullptr;
  Device* device_ = nullptr;
  std::string why_not_;
};

}  // namespace fastpersist
