#include "transfer/io_pump.h"

#include <algorithm>
#include <cerrno>

#include "core/alignment.h"
#include "core/wakeup.h"

namespace fastpersist {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);
// If a kernel has lacked resources for this long, waiting longer does not help.
constexpr auto kRefusedLimit = std::chrono::seconds(30);
constexpr auto kRefusedPause = std::chrono::milliseconds(1);

// The errors that mean "this engine cannot do this to this file" and not "the disk is broken". EINVAL: a file system
// takes O_DIRECT but not the request. EPERM: a sandbox.
bool SaysNotSupported(int sys_errno) {
  return sys_errno == EOPNOTSUPP || sys_errno == ENOSYS || sys_errno == EINVAL || sys_errno == EPERM;
}

// A file system in user space (FUSE) always accepts the flag O_DIRECT, but may refuse the requests.
constexpr char kPerhapsNotDirect[] =
    "the file system may take no direct I/O; engine='threads-buffered' goes through the page cache";

DirectIoLimits StrictestOf(const std::vector<PumpFile>& files) {
  DirectIoLimits strictest = DirectIoLimitsOf(files.front().fd);
  for (const PumpFile& file : files) {
    const DirectIoLimits limits = DirectIoLimitsOf(file.fd);
    if (!limits.supported) return limits;
    strictest.memory_alignment_bytes = std::max(strictest.memory_alignment_bytes, limits.memory_alignment_bytes);
    strictest.offset_alignment_bytes = std::max(strictest.offset_alignment_bytes, limits.offset_alignment_bytes);
  }
  return strictest;
}

const char* Name(IoOp op) { return op == IoOp::kRead ? "read of" : "write to"; }

}  // namespace

IoPump::IoPump(std::vector<PumpFile> files, PumpOptions options)
    : files_(std::move(files)),
      options_(std::move(options)),
      limits_(options_.simulation != nullptr ? options_.simulation->limits
              : options_.limits.has_value()  ? *options_.limits
                                             : StrictestOf(files_)) {
  slots_.resize(options_.queue_depth);
  completions_.resize(options_.queue_depth);
  for (size_t i = options_.queue_depth; i > 0; --i) free_slots_.push_back(i - 1);
  last_poll_ = Now();
}

IoPump::~IoPump() = default;

Result<std::unique_ptr<IoPump>> IoPump::Open(std::vector<PumpFile> files, PumpOptions options) {
  FP_CHECK(!files.empty());
  if (options.engines.empty() || options.queue_depth == 0) {
    return Status::Error(StatusCode::kInvalidArgument, "a transfer needs an engine and a queue depth of at least 1");
  }
  std::unique_ptr<IoPump> pump(new IoPump(std::move(files), std::move(options)));
  FP_RETURN_IF_ERROR(pump->UseEngine(0, Status::Ok()));
  return pump;
}

// Returns an engine for which the descriptors' flags are set.
Result<std::unique_ptr<IoEngine>> IoPump::OpenEngine(const std::string& name) const {
  if (options_.simulation != nullptr) return options_.simulation->create_engine(name);
  Result<std::unique_ptr<IoEngine>> engine = CreateEngine({.name = name,
                                                           .queue_depth = options_.queue_depth,
                                                           .thread_count = options_.thread_count,
                                                           .wake_fd = options_.wake_fd,
                                                           .memory = options_.memory});
  if (!engine.ok()) return engine;
  const bool direct = engine.value()->limits().direct;
  if (direct && !limits_.supported) {
    return Status::Error(StatusCode::kUnsupported, name + " on " + files_.front().path + ": " + limits_.why_not);
  }
  for (const PumpFile& file : files_) FP_RETURN_IF_ERROR(SetDirect(file.fd, direct, file.path));
  return engine;
}

// Use the first engine from `index` on that opens.
Status IoPump::UseEngine(size_t index, Status why_left) {
  for (; index < options_.engines.size(); ++index) {
    const std::string& name = options_.engines[index];
    Result<std::unique_ptr<IoEngine>> engine = OpenEngine(name);
    if (engine.ok()) {
      engine_ = std::move(engine).value();
      engine_name_ = name;
      engine_index_ = index;
      return Status::Ok();
    }
    why_left = engine.status();
    demotions_.push_back(name + ": " + why_left.message());
  }
  FP_CHECK(!why_left.ok());
  return why_left;
}

Status IoPump::Fail(Status status) {
  if (failed_.ok()) failed_ = std::move(status);
  return failed_;
}

// The error of a request that makes no progress although the kernel reports no error.
Status IoPump::Stopped(const Slot& slot, uint32_t last_done_bytes) const {
  const uint64_t place = slot.request.offset_bytes + slot.done_bytes;
  const std::string asked = std::to_string(slot.request.size_bytes) + " bytes at offset " + std::to_string(place);
  if (slot.request.op == IoOp::kRead) {
    return Status::Error(StatusCode::kEndOfFile,
                         "read of " + asked + " of " + PathOf(slot.request) + ": the file ends before them", place);
  }
  return Status::Error(StatusCode::kIoError,
                       "write of " + asked + " to " + PathOf(slot.request) + ": the kernel wrote " +
                           std::to_string(last_done_bytes) + " bytes and no more",
                       place);
}

void IoPump::Queue(size_t slot_index) {
  Slot& slot = slots_[slot_index];
  const QueueResult result = engine_->Queue({
      .op = slot.request.op,
      .fd = files_[slot.request.file].fd,
      .buffer = slot.request.buffer + slot.done_bytes,
      .size_bytes = slot.request.size_bytes - slot.done_bytes,
      .offset_bytes = slot.request.offset_bytes + slot.done_bytes,
      .tag = slot_index,
  });
  FP_CHECK(result == QueueResult::kQueued);  // slots never outnumber the engine's room
}

Status IoPump::Start(const Request& request, bool more_follow) {
  if (!failed_.ok()) return failed_;
  FP_CHECK(!free_slots_.empty());
  const size_t index = free_slots_.back();
  free_slots_.pop_back();
  slots_[index] = Slot{.request = request, .done_bytes = 0, .attempt_count = 0, .first_refused = {}};
  ++in_flight_count_;
  if (!demote_because_.ok()) {
    waiting_slots_.push_back(index);
    return Status::Ok();
  }
  Queue(index);
  if (more_follow) return Status::Ok();
  Status status = engine_->Submit();
  return status.ok() ? status : Fail(std::move(status));
}

Status IoPump::Poll() {
  if (!options_.poll) return Status::Ok();
  const TimePoint now = Now();
  if (now - last_poll_ < kPollInterval) return Status::Ok();
  last_poll_ = now;
  return options_.poll(done_bytes_);
}

Status IoPump::Collect(std::chrono::milliseconds wait_at_most, std::vector<Finished>& finished, size_t batch_count) {
  // A day means for ever; the limit avoids an overflow.
  const bool has_deadline = wait_at_most < std::chrono::hours(24);
  const TimePoint deadline = has_deadline ? Now() + wait_at_most : TimePoint::max();
  while (failed_.ok() && in_flight_count_ > 0) {
    if (!demote_because_.ok() && engine_->in_flight() == 0) {
      if (Status status = Demote(finished); !status.ok()) return Fail(std::move(status));
      if (!finished.empty()) break;
    }
    if (demote_because_.ok()) {
      std::vector<size_t> again = std::move(waiting_slots_);
      waiting_slots_.clear();
      for (const size_t index : again) Queue(index);
    }
    if (Status status = engine_->Submit(); !status.ok()) return Fail(std::move(status));
    const auto wait = std::min<std::chrono::milliseconds>(kPollInterval, wait_at_most);
    Result<size_t> reaped =
        engine_->Reap(completions_, wait.count() > 0 ? std::min(batch_count, engine_->in_flight()) : 0, wait);
    if (!reaped.ok()) return Fail(reaped.status());
    for (size_t i = 0; i < reaped.value(); ++i) {
      Status status = Complete(completions_[i], finished);
      if (!status.ok()) return Fail(std::move(status));
    }
    if (Status status = Poll(); !status.ok()) return Fail(std::move(status));
    if (!finished.empty() || (has_deadline && Now() >= deadline) || IsReadable(options_.wake_fd)) break;
  }
  return failed_;
}

// Report a request as finished, with success or an error.
Status IoPump::Give(size_t slot_index, Status status, std::vector<Finished>& finished) {
  const Slot& slot = slots_[slot_index];
  if (!status.ok() && !options_.outlives_failures) return status;
  finished.push_back({.tag = slot.request.tag, .status = std::move(status), .done_bytes = slot.done_bytes});
  free_slots_.push_back(slot_index);
  --in_flight_count_;
  return Status::Ok();
}

Status IoPump::Complete(const IoCompletion& completion, std::vector<Finished>& finished) {
  const auto index = static_cast<size_t>(completion.tag);
  Slot& slot = slots_[index];
  const Request& request = slot.request;
  const uint64_t place = request.offset_bytes + slot.done_bytes;

  // ECANCELED: the kernel dropped the unstarted request because the submitting thread ended.
  if (completion.sys_errno == EINTR || completion.sys_errno == EAGAIN || completion.sys_errno == ECANCELED) {
    const TimePoint now = Now();
    if (slot.attempt_count++ == 0) slot.first_refused = now;
    if (now - slot.first_refused > kRefusedLimit) {
      return Give(index, Status::FromErrno(completion.sys_errno, Name(request.op), PathOf(request), place), finished);
    }
    if (slot.attempt_count > 1) Sleep(options_.clock, kRefusedPause);
    waiting_slots_.push_back(index);
    return Status::Ok();
  }
  if (completion.sys_errno != 0) {
    const bool another = engine_index_ + 1 < options_.engines.size();
    const bool not_supported = SaysNotSupported(completion.sys_errno);
    std::string detail = engine_->last_failure();
    if (detail.empty() && direct() && not_supported && !another) detail = kPerhapsNotDirect;
    Status status = Status::FromErrno(completion.sys_errno, Name(request.op), PathOf(request), place, detail);
    if (!not_supported || !another) return Give(index, std::move(status), finished);
    if (demote_because_.ok()) demote_because_ = std::move(status);
    waiting_slots_.push_back(index);
    return Status::Ok();
  }

  slot.attempt_count = 0;
  const uint32_t needed_bytes = request.op == IoOp::kWrite ? request.size_bytes : request.needed_bytes;
  const uint32_t total_bytes = slot.done_bytes + completion.done_bytes;
  if (total_bytes >= needed_bytes) {
    done_bytes_ += needed_bytes;
    slot.done_bytes = needed_bytes;
    return Give(index, Status::Ok(), finished);
  }
  // Short. Direct I/O resumes on an aligned place only: 8 KiB asked, 5,000 bytes done, alignment 512 → resume at 4,608.
  const uint32_t resume_bytes = engine_->limits().direct
                                    ? static_cast<uint32_t>(AlignDown(total_bytes, limits_.offset_alignment_bytes))
                                    : total_bytes;
  if (resume_bytes <= slot.done_bytes) {
    Status stopped = Stopped(slot, completion.done_bytes);
    slot.done_bytes = total_bytes;
    return Give(index, std::move(stopped), finished);
  }
  slot.done_bytes = resume_bytes;
  waiting_slots_.push_back(index);
  return Status::Ok();
}

// Replace the engine. REQUIRES: nothing is in flight in the old one.
Status IoPump::Demote(std::vector<Finished>& finished) {
  const bool was_direct = direct();
  demotions_.push_back(engine_name_ + ": " + demote_because_.message());
  Status why_left = std::move(demote_because_);
  demote_because_ = Status::Ok();
  engine_.reset();
  FP_RETURN_IF_ERROR(UseEngine(engine_index_ + 1, std::move(why_left)));
  if (!options_.gives_writes_back || !was_direct || direct()) return Status::Ok();
  std::erase_if(waiting_slots_, [&](size_t index) {
    const Request& request = slots_[index].request;
    if (request.op != IoOp::kWrite) return false;
    finished.push_back({.tag = request.tag, .status = {}, .done_bytes = 0, .start_again = true});
    free_slots_.push_back(index);
    --in_flight_count_;
    return true;
  });
  return Status::Ok();
}

void IoPump::Abandon() noexcept {
  if (failed_.ok())
    failed_ = Status::Error(StatusCode::kCancelled, "the transfer of " + files_.front().path + " was abandoned");
  engine_.reset();  // blocks until the kernel has released all buffers
  in_flight_count_ = 0;
}

}  // namespace fastpersist
