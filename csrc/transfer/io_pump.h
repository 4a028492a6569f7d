// Finishes every request. It sits between the transfers (file_writer, file_reader), which think in chunks, and the
// engines, which only report completions. It resumes short requests, repeats EINTR and EAGAIN, replaces an engine that
// proves unsupported, and turns every other failure into an error with operation, path and offset.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/file.h"
#include "core/status.h"
#include "engine/engine.h"
#include "transfer/clock.h"

namespace fastpersist {

struct PumpOptions {
  // Best first. One name: that engine and no other. Several: if one cannot be created, or answers "not supported" in
  // the middle of a file, the next takes over and repeats the refused requests.
  std::vector<std::string> engines;
  uint32_t queue_depth = 8;
  uint32_t thread_count = 0;
  // Collect does not wait while this descriptor is readable. Its owner is the caller.
  int wake_fd = -1;
  // Called about every 50 ms with the bytes done so far; its error stops the transfer. May be empty.
  std::function<Status(uint64_t done_bytes)> poll;
  // True: a failed request is reported with its tag, and the others go on. False: the first failure ends the transfer.
  bool outlives_failures = false;
  // True: if a direct engine is replaced, the pump returns its unfinished writes, since writes through the page cache
  // need a lock for this file. False: the pump does them itself.
  bool gives_writes_back = false;
  // The limits that another pump has found for these files. Asking again would set and clear O_DIRECT under that pump,
  // and its unaligned reads and writes would fail.
  std::optional<DirectIoLimits> limits = std::nullopt;
  // As in EngineOptions.
  std::span<std::byte> memory = {};  // NOLINT(readability-redundant-member-init): gcc warns without it
  // Null: the steady clock.
  TransferClock* clock = nullptr;
  // For simulations: these engines and limits replace CreateEngine and the limits of the file. The descriptor is not
  // touched then.
  struct Simulation {
    std::function<Result<std::unique_ptr<IoEngine>>(const std::string& name)> create_engine;
    DirectIoLimits limits;
  };
  const Simulation* simulation = nullptr;
};

struct PumpFile {
  int fd = -1;
  std::string path;
};

// One owner thread at a time.
class IoPump {
 public:
  // The caller owns the descriptors; the pump sets and clears their O_DIRECT flags as the engine needs it. Of several
  // files, the strictest limits hold for all. REQUIRES: at least one file.
  static Result<std::unique_ptr<IoPump>> Open(std::vector<PumpFile> files, PumpOptions options);
  static Result<std::unique_ptr<IoPump>> Open(int fd, std::string path, PumpOptions options) {
    return Open({{fd, std::move(path)}}, std::move(options));
  }
  ~IoPump();
  IoPump(const IoPump&) = delete;
  IoPump& operator=(const IoPump&) = delete;

  struct Request {
    IoOp op = IoOp::kRead;
    std::byte* buffer = nullptr;
    uint32_t size_bytes = 0;
    // A read is finished when it has this many bytes (the file may end inside an aligned request); a write needs all of
    // size_bytes.
    uint32_t needed_bytes = 0;
    uint64_t offset_bytes = 0;
    uint64_t tag = 0;
    uint32_t file = 0;  // which of the pump's files
  };

  struct Finished {
    uint64_t tag = 0;
    Status status;             // not ok only if the pump outlives failures
    uint32_t done_bytes = 0;   // for a failed request: the bytes done before the failure, from its start
    bool start_again = false;  // the pump gives it back, and none of it is done
  };

  // Give a request to the kernel; with more_follow it may wait for the next call.
  // REQUIRES: in_flight() < queue_depth().
  Status Start(const Request& request, bool more_follow = false);

  // Wait until a request is finished, nothing is in flight, or the time is over; add all finished requests to
  // `finished`. Returns the error that stops all requests (of the engine, of the poll, or the first failure unless the
  // pump outlives those), and so does every later call. `batch_count`: wait for so many completions at a time, if as
  // many are in flight, since each wait costs a context switch.
  Status Collect(std::chrono::milliseconds wait_at_most, std::vector<Finished>& finished, size_t batch_count = 1);
  Status Collect(std::vector<Finished>& finished) { return Collect(std::chrono::milliseconds::max(), finished); }

  // Wait until the kernel has released every buffer, whether the requests succeed or not. The pump is unusable
  // afterwards.
  void Abandon() noexcept;

  size_t in_flight() const { return in_flight_count_; }
  uint32_t queue_depth() const { return options_.queue_depth; }
  const std::string& engine_name() const { return engine_name_; }
  // A direct engine takes offsets and lengths that are multiples of this.
  uint64_t block_bytes() const { return direct() ? BlockBytesOf(limits_) : kBlockBytesMin; }
  // The same without a lower limit: the block size that the device itself needs; 1 through the page cache.
  uint32_t device_block_bytes() const { return direct() ? limits_.offset_alignment_bytes : 1; }
  bool direct() const { return engine_ != nullptr && engine_->limits().direct; }
  // Of all files together.
  const DirectIoLimits& limits() const { return limits_; }
  uint64_t done_bytes() const { return done_bytes_; }
  // Why the pump has abandoned each earlier engine of the list, one sentence each.
  const std::vector<std::string>& demotions() const { return demotions_; }

 private:
  struct Slot {
    Request request;
    uint32_t done_bytes = 0;
    uint32_t attempt_count = 0;
    TimePoint first_refused;
  };

  IoPump(std::vector<PumpFile> files, PumpOptions options);

  TimePoint Now() const { return fastpersist::Now(options_.clock); }
  Result<std::unique_ptr<IoEngine>> OpenEngine(const std::string& name) const;
  Status UseEngine(size_t index, Status why_left);
  Status Demote(std::vector<Finished>& finished);
  void Queue(size_t slot_index);
  Status Complete(const IoCompletion& completion, std::vector<Finished>& finished);
  Status Give(size_t slot_index, Status status, std::vector<Finished>& finished);
  Status Poll();
  Status Fail(Status status);
  Status Stopped(const Slot& slot, uint32_t last_done_bytes) const;

  const std::string& PathOf(const Request& request) const { return files_[request.file].path; }

  const std::vector<PumpFile> files_;
  const PumpOptions options_;
  DirectIoLimits limits_;
  std::unique_ptr<IoEngine> engine_;  // null after Abandon() and when no engine of the list is left
  std::string engine_name_;
  size_t engine_index_ = 0;
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
  std::vector<size_t> waiting_slots_;  // the kernel answered EAGAIN, or a demoted engine left them over
  std::vector<IoCompletion> completions_;
  std::vector<std::string> demotions_;
  Status demote_because_;  // not ok: the engine is being drained to be replaced
  Status failed_;
  size_t in_flight_count_ = 0;
  uint64_t done_bytes_ = 0;
  TimePoint last_poll_;
};

}  // namespace fastpersist
