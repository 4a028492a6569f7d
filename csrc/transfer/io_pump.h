// Finishes every request. Between the transfers (file_writer, file_reader), which think in chunks, and the engines,
// which only report, the pump is the one place that resumes short requests, repeats EINTR and EAGAIN, replaces an
// engine that turns out not to be supported, and turns what is left into an error with operation, path and offset.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/status.h"
#include "engine/engine.h"
#include "transfer/clock.h"

namespace fastpersist {

struct PumpOptions {
  // Best first. One name: that engine and no other. Several: when one cannot be created or answers "not supported" in
  // the middle of a file, the next takes over and what failed is done again.
  std::vector<std::string> engines;
  uint32_t queue_depth = 8;
  uint32_t thread_count = 0;
  // The owner's. While it is readable, no Collect waits.
  int wake_fd = -1;
  // Asked about every 50 ms with the bytes done so far; its error stops the transfer. May be empty.
  std::function<Status(uint64_t done_bytes)> poll;
  // A failed request is reported with its tag, and the others go on. Otherwise the first failure is the transfer's.
  bool outlives_failures = false;
  // Writes that a direct engine has left over, and that could only go through the page cache now, are given back. For
  // files where that needs a lock. Otherwise the pump does them by itself.
  bool gives_writes_back = false;
  // Null: the steady clock.
  TransferClock* clock = nullptr;
  // For simulations: engines of theirs, and the limits of the direct ones, in place of CreateEngine and of the file's;
  // the descriptor is not touched then.
  struct Simulation {
    std::function<Result<std::unique_ptr<IoEngine>>(const std::string& name)> create_engine;
    DirectIoLimits limits;
  };
  const Simulation* simulation = nullptr;
};

// One owner thread at a time.
class IoPump {
 public:
  // `fd` stays the caller's; its O_DIRECT flag is set and cleared as the engine in use needs it.
  static Result<std::unique_ptr<IoPump>> Open(int fd, std::string path, PumpOptions options);
  ~IoPump();
  IoPump(const IoPump&) = delete;
  IoPump& operator=(const IoPump&) = delete;

  struct Request {
    IoOp op = IoOp::kRead;
    std::byte* buffer = nullptr;
    uint32_t size_bytes = 0;
    // A read is finished when this much has come (the file may end inside an aligned request); a write always needs
    // all of size_bytes.
    uint32_t needed_bytes = 0;
    uint64_t offset_bytes = 0;
    uint64_t tag = 0;
  };

  struct Finished {
    uint64_t tag = 0;
    Status status;             // not ok only if the pump outlives failures
    uint32_t done_bytes = 0;   // of a failed request: those that were done before, from its start
    bool start_again = false;  // the pump gives it back: nothing of it counts
  };

  // Give a request to the kernel; with more_follow it may wait for the next call.
  // REQUIRES: in_flight() < queue_depth().
  Status Start(const Request& request, bool more_follow = false);

  // Add the requests that are finished. Waits until there is one, nothing is in flight, or the time is over.
  // What stops all requests (the engine, the poll; the first failure, unless the pump outlives those) is returned here
  // and by every later call.
  Status Collect(std::chrono::milliseconds wait_at_most, std::vector<Finished>& finished);
  Status Collect(std::vector<Finished>& finished) { return Collect(std::chrono::milliseconds::max(), finished); }

  // Wait until the kernel has let go of every buffer, whatever becomes of the requests. The pump is of no use after.
  void Abandon() noexcept;

  size_t in_flight() const { return in_flight_count_; }
  uint32_t queue_depth() const { return options_.queue_depth; }
  const std::string& engine_name() const { return engine_name_; }
  // What requests have to be multiples of, offset and length, so that a direct engine takes them.
  uint64_t block_bytes() const { return direct() ? BlockBytesOf(limits_) : kBlockBytesMin; }
  bool direct() const { return engine_ != nullptr && engine_->limits().direct; }
  uint64_t done_bytes() const { return done_bytes_; }
  // Why each engine of the list that is not in use any more was left, one sentence each.
  const std::vector<std::string>& demotions() const { return demotions_; }

 private:
  struct Slot {
    Request request;
    uint32_t done_bytes = 0;
    uint32_t attempt_count = 0;
    TimePoint first_refused;
  };

  IoPump(int fd, std::string path, PumpOptions options);

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

  const int fd_;
  const std::string path_;
  const PumpOptions options_;
  DirectIoLimits limits_;
  std::unique_ptr<IoEngine> engine_;  // null after Abandon() and when no engine of the list is left
  std::string engine_name_;
  size_t engine_index_ = 0;
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
  std::vector<size_t> waiting_slots_;  // given back by the kernel with EAGAIN, or left over by a demoted engine
  std::vector<IoCompletion> completions_;
  std::vector<std::string> demotions_;
  Status demote_because_;  // not ok: the engine is being drained to be replaced
  Status failed_;
  size_t in_flight_count_ = 0;
  uint64_t done_bytes_ = 0;
  TimePoint last_poll_;
};

}  // namespace fastpersist
