// The one interface to the kernel: an engine queues requests, submits them, and reaps completions. It never splits,
// retries, pads or resumes a request: transfer/io_pump does that for all engines.
//
// How to add an engine: docs/explanation/engines.md.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace fastpersist {

enum class IoOp : uint8_t { kRead, kWrite };

// The memory stays valid and untouched until the request's completion has been reaped.
struct IoRequest {
  IoOp op = IoOp::kRead;
  int fd = -1;
  std::byte* buffer = nullptr;
  uint32_t size_bytes = 0;  // > 0; for a direct engine buffer, size and offset keep the file's direct I/O alignment
  uint64_t offset_bytes = 0;
  uint64_t tag = 0;  // returned in the completion; the engine does not use it
};

// sys_errno == 0: done_bytes were moved; fewer than requested is short, not an error; a read of 0 is the end of file.
// sys_errno  > 0: the request failed, and none of its bytes count as moved.
struct IoCompletion {
  uint64_t tag = 0;
  uint32_t done_bytes = 0;
  int sys_errno = 0;
};

enum class QueueResult : uint8_t { kQueued, kFull };

struct EngineLimits {
  uint32_t queue_depth = 0;  // requests queued or in flight at once
  bool direct = false;       // the file's descriptor must have O_DIRECT set (direct) or clear (buffered)
};

// One owner thread at a time: no method may be called from two threads at once. A thread that hands an engine over with
// requests in flight must outlive them: the kernel cancels some kinds when the thread that submitted them ends.
class IoEngine {
 public:
  IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;
  // Blocks until the kernel has released all buffers, and frees all descriptors, threads and mappings. Does nothing in
  // a forked child (core/fork.h), since they are the parent's.
  virtual ~IoEngine() = default;

  virtual std::string_view name() const = 0;  // as in CreateEngine
  virtual const EngineLimits& limits() const = 0;

  // Take one request. Never blocks, never enters the kernel. kFull: queue_depth requests are queued or in flight.
  virtual QueueResult Queue(const IoRequest& request) = 0;

  // Give all queued requests to the kernel. A request that the kernel refuses becomes a completion with its errno.
  // Requests that the kernel cannot take now (EAGAIN, EBUSY, partial io_submit) stay queued, and the next Submit or
  // Reap tries them again. An error means that the engine is broken: queued requests were not started.
  virtual Status Submit() = 0;

  // Wait until min_count completions are there or the timeout is over, and write them to `out`. Returns how many; fewer
  // than min_count only after the timeout, if fewer are in flight, or while the owner's wake_fd is readable. EINTR is
  // no error here.
  // REQUIRES: min_count <= out.size().
  virtual Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) = 0;

  // Requests that are queued, in the kernel, or completed and not reaped.
  virtual size_t in_flight() const = 0;

  // The error of the last failed request as a library between engine and kernel reported it, if no errno expresses it,
  // such as "CU_FILE_IO_DISABLED (5034)"; else empty.
  virtual std::string last_failure() const { return {}; }
};

struct EngineOptions {
  // "uring", "libaio", "threads" (direct), each also with "-buffered"; "cufile" (direct, and for memory of a CUDA
  // device: device/cufile.h); "null" (moves nothing, but reports success);
  // in test builds also "fault:<engine>", which wraps another and applies the FaultPlan (engine/fault_engine.h).
  std::string name;
  uint32_t queue_depth = 8;   // 1 … 4096
  uint32_t thread_count = 0;  // threads and cufile only; 0: min(queue_depth, 16)
  // Reap does not wait while this descriptor is readable. Its owner is the caller. Not for cufile.
  int wake_fd = -1;
  // If not empty: the buffers of all requests lie in this memory, and it stays mapped as long as the engine lives.
  // uring pins it once instead of at each request, if the kernel and the limit of locked memory permit.
  std::span<std::byte> memory = {};  // NOLINT(readability-redundant-member-init): gcc warns without it
};

// Every name that CreateEngine knows, without "fault:", best first.
std::vector<std::string> EngineNames();

// kInvalidArgument for an unknown name; kUnsupported, with the reason, if this kernel or sandbox refuses the engine.
Result<std::unique_ptr<IoEngine>> CreateEngine(const EngineOptions& options);

}  // namespace fastpersist
