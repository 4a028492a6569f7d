// The double's machine: devices with memory, contexts, streams that threads work off, events, registered host memory,
// and the plans and counts of tests. Everything is guarded by one mutex, and one condition variable tells of every
// change. The calls themselves, with what they refuse, are in cuda_double.cc and control.cc.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_double {

// Of cuda.h's CUresult.
enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
};

// Whether a context is of no use after it.
bool IsSticky(int error);

// Handles are such numbers. They are no addresses (x86 and Arm have none there), so that following one crashes.
using Handle = uint64_t;

constexpr int kAnyDevice = -1;

struct Allocation {
  Allocation() = default;
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation();

  uint64_t address = 0;
  size_t size_bytes = 0;
  int device = kAnyDevice;
  std::byte* memory = nullptr;  // where the double itself reads and writes it

  std::byte* At(uint64_t inside) const { return memory + (inside - address); }
};

// Of a stream whose work becomes a graph; CUstreamCaptureStatus.
enum Capture : int { kNoCapture = 0, kCapturing = 1, kCaptureInvalidated = 2 };

struct Stream;

struct Context {
  Handle id = 0;
  int device = 0;
  int error = kSuccess;  // a sticky one
  std::shared_ptr<Stream> default_stream;
};

// A place in a stream: reached when so many of its works are done.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t position = 0;

  bool Reached() const;
};

struct Work {
  enum class Kind { kMark, kToHost, kToDevice, kOnDevice, kFill, kRows };

  Kind kind = Kind::kMark;
  bool is_copy = false;  // of the product, not a kernel
  int error = kSuccess;  // fails instead
  std::chrono::microseconds duration{0};
  std::vector<Point> after;
  std::byte* target = nullptr;
  const std::byte* source = nullptr;
  int byte_value = 0;
  size_t size_bytes = 0;  // of kRows: of each
  const uint32_t* rows = nullptr;
  const uint32_t* places = nullptr;
  uint32_t row_count = 0;
  std::shared_ptr<Allocation> target_allocation;  // null: host memory
  std::shared_ptr<Allocation> source_allocation;

  const std::byte* host() const { return kind == Kind::kToHost ? target : kind == Kind::kToDevice ? source : nullptr; }
};

struct Stream {
  Handle id = 0;
  std::shared_ptr<Context> context;
  bool is_default = false;
  bool is_blocking = true;    // it waits for the default stream, and that one for it
  bool is_destroyed = false;  // takes nothing more, but does what it has
  bool is_dead = false;       // drops what it has: double_reset
  bool is_held = false;
  int capture = kNoCapture;
  std::thread::id captured_by;
  bool has_worker = false;
  std::deque<Work> queue;  // its first may be under way
  uint64_t queued_count = 0;
  uint64_t done_count = 0;
  int error = kSuccess;  // of the first work that failed, at
  uint64_t error_position = 0;
};

struct Event {
  Handle id = 0;
  std::shared_ptr<Context> context;
  std::optional<Point> recorded;
};

struct Registration {
  uintptr_t pointer = 0;  // as it was given
  uintptr_t first = 0;    // its pages
  uintptr_t end = 0;
  bool is_portable = false;
  Handle context = 0;
};

struct FailurePlan {
  std::string call;
  uint64_t at_count = 0;  // 0: each
  int error = kSuccess;
};

using Lock = std::unique_lock<std::mutex>;

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_forked = false;  // a child's copy of what its parent has in use

  bool is_initialized = false;
  int driver_version = 12040;
  int device_count = 1;
  std::vector<std::string> bus_ids;
  uint64_t generation = 0;  // counts the resets
  uint64_t handle_count = 0;
  int64_t worker_count = 0;

  std::map<int, std::shared_ptr<Context>> contexts;  // by device
  std::map<Handle, std::shared_ptr<Stream>> streams;
  std::map<Handle, std::shared_ptr<Event>> events;
  std::map<uint64_t, std::shared_ptr<Allocation>> allocations;
  std::map<uintptr_t, Registration> registrations;  // by their first page
  std::map<Handle, std::string> modules;            // their text
  std::map<Handle, uint32_t> row_kernels;           // the bytes of the words that they copy
  bool reads_host_pointers = true;

  uint64_t region = 0;  // addresses that are given out: [region_next, region_end) are free
  uint64_t region_next = 0;
  uint64_t region_end = 0;
  uint64_t first_address = 0;  // since the last reset

  std::map<std::string, uint64_t, std::less<>> call_counts;
  std::map<std::string, uint64_t, std::less<>> copy_counts;
  std::vector<FailurePlan> failures;
  std::vector<FailurePlan> async_failures;
  std::deque<std::string> violations;
  uint64_t registration_limit_bytes = UINT64_MAX;
  bool pageable_waits = true;
  bool registrations_are_held = false;
  std::chrono::microseconds copy_delay{0};
  int64_t allowed_copy_count = -1;
  bool is_stepped = false;  // no threads: Step does the work
  uint64_t queued_copy_count = 0;
  uint64_t peak_queued_copy_count = 0;
  uint64_t pageable_copy_count = 0;
  uint64_t copied_to_host_bytes = 0;
  uint64_t copied_to_device_bytes = 0;

  // The one of this process; never freed.
  static Machine& Get();

  // The rest is called with the mutex held; what takes the lock gives it up meanwhile.

  Handle NewHandle(unsigned kind) { return (uint64_t{0x00C0 + kind} << 48) + 16 * ++handle_count; }
  void Violate(std::string text) { violations.push_back(std::move(text)); }
  void Notify();  // of a change; not in a child, where the waiting threads that `changed` counts are missing

  std::shared_ptr<Context> ContextOf(int device);  // the primary one, made at first use
  std::shared_ptr<Context> FindContext(Handle id) const;
  std::shared_ptr<Stream> NewStream(const std::shared_ptr<Context>& context, bool is_blocking);
  std::shared_ptr<Stream> FindStream(Handle id) const;  // null: no live one

  // The work's position. Starts the stream's thread where there is none.
  Point Enqueue(const std::shared_ptr<Stream>& stream, Work work);
  // Do one of the works that may start: the (choice modulo their count)th. False: there is none.
  bool Step(Lock& lock, uint64_t choice);
  // Until the point is reached, or never will be.
  void Wait(Lock& lock, const Point& point);
  void WaitForAll(Lock& lock);
  // What a query at this point says: success, not ready, or the error of its stream or context.
  int StateAt(const Point& point) const;

  std::shared_ptr<Allocation> Allocate(int device, size_t size_bytes);  // null: no memory
  // The allocation that holds the whole range; null: none does.
  std::shared_ptr<Allocation> FindAllocation(uint64_t address, size_t size_bytes) const;
  bool IsRegistered(uint64_t address, size_t size_bytes) const;
  void Free(const std::shared_ptr<Allocation>& allocation, const char* call);
  // Of queued copies that use this host memory.
  uint64_t CountQueued(uintptr_t first, uintptr_t end) const;

  // Drop all and begin anew; waits for the threads.
  void Reset(Lock& lock, int new_device_count);
  void Clear(Lock& lock);

 private:
  Machine();
  void WorkOff(const std::shared_ptr<Stream>& stream);
  bool MayStart(const Stream& stream) const;
  void Do(Lock& lock, const Work& work);
  void Finish(Lock& lock, Stream& stream);
  void ForgetPlans();
};

// Whether every page of this memory is mapped.
bool IsMapped(const void* memory, size_t size_bytes);

constexpr uintptr_t kPageBytes = 4096;

std::string Hex(uint64_t number);

// "cuMemHostRegister_v2", "MemHostRegister" … as the calls are listed; empty: there is none.
std::string_view CallNamed(std::string_view name);

}  // namespace cuda_double
