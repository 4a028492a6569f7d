#include "transfer/request_flow.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

#include "core/crc32.h"
#include "core/quarantine.h"

namespace fastpersist {
namespace {

// The interval for polling the lock and devices, which the thread cannot await together with requests.
constexpr auto kLookInterval = std::chrono::milliseconds(1);
// Smaller requests enter the kernel together; larger ones at once, since the next piece may need a copy first.
constexpr uint32_t kBatchedBytes = 64 << 10;
// The shortest interval while only devices work: they take 100 µs or more for a chunk.
constexpr auto kPauseMin = std::chrono::microseconds(20);
constexpr auto kPauseMax = std::chrono::microseconds(500);

}  // namespace

RequestFlow::RequestFlow(std::unique_ptr<IoPump> pump, DirectIoLimits limits, uint64_t chunk_bytes,
                         uint64_t staging_bytes, EdgeLock lock, WriteSide side)
    : cutter_(std::move(limits), chunk_bytes),
      side_(side),
      pump_(std::move(pump)),
      staging_(staging_bytes, chunk_bytes, /*reuses=*/side == WriteSide::kShared),
      turn_(std::move(lock)),
      pause_(kPauseMin),
      engine_name_(pump_->engine_name()),
      demotions_(pump_->demotions()) {
  pieces_.resize(pump_->queue_depth());
  for (size_t i = pieces_.size(); i > 0; --i) free_tags_.push_back(i - 1);
}

std::string RequestFlow::engine_name() const {
  const std::lock_guard lock(noted_mutex_);
  return engine_name_;
}

std::vector<std::string> RequestFlow::demotions() const {
  const std::lock_guard lock(noted_mutex_);
  return demotions_;
}

Status RequestFlow::write_back_error() const {
  const std::lock_guard lock(noted_mutex_);
  return write_back_error_;
}

// Note the engine's name, which a demotion changes. Only this thread writes it, so it reads without the mutex.
void RequestFlow::NoteEngine() {
  if (demotions_.size() == pump_->demotions().size()) return;
  const std::lock_guard lock(noted_mutex_);
  engine_name_ = pump_->engine_name();
  demotions_ = pump_->demotions();
}

std::chrono::microseconds RequestFlow::NextWait() {
  if (pump_->in_flight() > 0) return {};
  if (host_jobs_.empty() && !has_more_work()) return kForever;
  if (turn_.is_locked_out()) return kLookInterval;
  if (!has_more_work() || has_moved_) return {};
  return std::exchange(pause_, std::min(2 * pause_, kPauseMax));
}

void RequestFlow::Step(Jobs& arrived, bool closing) {
  for (std::shared_ptr<Job>& job : arrived) {
    (job->device() == nullptr ? host_jobs_ : device_jobs_).push_back(std::move(job));
  }
  arrived.clear();
  if (std::exchange(has_moved_, false)) pause_ = kPauseMin;
  if (has_more_work()) CompleteCopies(closing);
  Status status = broken_;
  if (status.ok()) {
    status = StartAll();
  } else {
    copies_.Start(staging_.is_pinned());  // copies that waited for room, of reads and writes
  }
  if (status.ok() && pump_->in_flight() > 0) {
    finished_.clear();
    const bool looks = turn_.is_locked_out() || has_more_work();
    status = pump_->Collect(looks ? kLookInterval : std::chrono::milliseconds::max(), finished_);
    for (const IoPump::Finished& request : finished_) {
      CompleteRequest(request);
      // Requests come back together, and many are copied: the disk must not wait until all of these copies are made.
      if (status.ok()) status = StartAll();
    }
  }
  if (!status.ok()) FailEverything(status);
  if (!turn_.has_writes() && !next_is_write() && ready_writes_.empty()) LeaveLock();
}

void RequestFlow::LeaveLock() {
  turn_.Leave();
  if (turn_.write_back_error().ok() || !write_back_error_.ok()) return;
  const std::lock_guard lock(noted_mutex_);
  write_back_error_ = turn_.write_back_error();
}

// ---------------------------------------------------------------------------------------------- starting

// Host and devices take turns at going first, so that neither takes all slots of the pump.
Status RequestFlow::StartAll() {
  if (!has_more_work()) return StartHostPieces();
  is_devices_turn_ = !is_devices_turn_;
  if (!is_devices_turn_) FP_RETURN_IF_ERROR(StartHostPieces());
  FP_RETURN_IF_ERROR(StartReadyWrites());
  FP_RETURN_IF_ERROR(StartDevicePieces());
  copies_.Start(staging_.is_pinned());
  return is_devices_turn_ ? StartHostPieces() : Status::Ok();
}

// Give pieces to the kernel until the pump is full or staging has no room.
Status RequestFlow::StartHostPieces() {
  bool started = true;
  while (started && !host_jobs_.empty() && !free_tags_.empty()) {
    std::shared_ptr<Job> next = host_jobs_.front();
    if (next_is_write()) {
      Result<bool> may_write = MayWrite();
      if (!may_write.ok()) FailNext(may_write.status());
      if (!may_write.ok() || !may_write.value()) next = FirstRead();  // reads need no lock
    }
    if (next == nullptr) break;
    FP_RETURN_IF_ERROR(StartHostPiece(next, started));
  }
  return Status::Ok();
}

std::shared_ptr<RequestJob> RequestFlow::FirstRead() const {
  const auto read =
      std::find_if(host_jobs_.begin(), host_jobs_.end(), [](const auto& job) { return !job->is_write(); });
  return read == host_jobs_.end() ? nullptr : *read;
}

// Direct writes become buffered ones after the last direct engine was left.
Result<bool> RequestFlow::MayWrite() { return turn_.TryEnter(side_ == WriteSide::kAlone || !pump_->direct()); }

Status RequestFlow::StartHostPiece(const std::shared_ptr<Job>& job, bool& started) {
  const PieceRange range = cutter_.Next(*job, pump_->direct());
  std::byte* const address = job->parts[job->next_part].address + job->next_part_bytes;
  std::byte* staged = nullptr;
  if (pump_->direct() && !cutter_.GoesStraight(range, address, job->request->op())) {
    FP_RETURN_IF_ERROR(staging_.Prepare());
    staged = staging_.TakeForHost(range.asked_bytes());
    if (staged == nullptr) {
      FP_CHECK(free_tags_.size() < pieces_.size());  // a request will free its place
      started = false;
      return Status::Ok();
    }
    // Bypass the cache, since the device reads these bytes next. The CRC is unused and free.
    if (job->is_write()) std::ignore = CopyWithCrc32(0, staged, address, range.size_bytes());
  }
  Piece piece = RequestCutter::CutOff(job, range, staged);
  if (job->all_cut()) std::erase(host_jobs_, job);
  return StartRequest(std::move(piece), range, staged == nullptr ? address : staged);
}

Status RequestFlow::StartReadyWrites() {
  while (!ready_writes_.empty() && !free_tags_.empty()) {
    const bool is_given_up = ready_writes_.front().job->given_up();
    Result<bool> may_write = is_given_up ? Result<bool>(true) : MayWrite();
    if (may_write.ok() && !may_write.value()) break;
    Piece piece = std::move(ready_writes_.front());
    ready_writes_.pop_front();
    has_moved_ = true;
    if (!may_write.ok()) Fail(piece.job, piece.part, piece.from_bytes, may_write.status());
    if (piece.job->given_up()) {
      CompletePiece(piece);
      continue;
    }
    const uint64_t from = piece.job->parts[piece.part].offset_bytes + piece.from_bytes;
    const uint64_t until = from + piece.size_bytes;
    std::byte* const buffer = piece.staged == nullptr ? piece.address() : piece.staged;
    FP_RETURN_IF_ERROR(StartRequest(
        std::move(piece), {.start_bytes = from, .from_bytes = from, .until_bytes = until, .end_bytes = until}, buffer));
  }
  return Status::Ok();
}

// The first job of each device and direction comes first. Jobs without room let the others pass.
Status RequestFlow::StartDevicePieces() {
  if (device_jobs_.empty()) return Status::Ok();
  FP_RETURN_IF_ERROR(staging_.Prepare());
  staging_.PrepareFor(*device_jobs_.front()->device());
  std::vector<std::pair<const Device*, IoOp>> full;
  for (const std::shared_ptr<Job>& job : device_jobs_) {
    const std::pair<const Device*, IoOp> lane(job->device(), job->request->op());
    bool started = std::find(full.begin(), full.end(), lane) == full.end();
    while (started && !job->all_cut()) FP_RETURN_IF_ERROR(StartDevicePiece(job, started));
    if (!started) full.push_back(lane);
  }
  std::erase_if(device_jobs_, [](const std::shared_ptr<Job>& job) { return job->all_cut(); });
  return Status::Ok();
}

Status RequestFlow::StartDevicePiece(const std::shared_ptr<Job>& job, bool& started) {
  started = false;
  if (!job->is_write() && free_tags_.empty()) return Status::Ok();
  const PieceRange range = cutter_.Next(*job, pump_->direct());
  std::byte* const staged = staging_.TakeForDevice(*job, range.asked_bytes(), /*spares_host=*/pump_->direct());
  if (staged == nullptr) {
    if (!staging_.is_held_up()) return Status::Ok();
    Fail(job, job->next_part, job->next_part_bytes,
         Status::Error(StatusCode::kDeviceError,
                       "all staging buffers of the file wait for copies that a device does not complete: "
                       "the stream they follow stands still; open the file anew"));
    CompleteJobIfLast(job);
    return Status::Ok();
  }
  started = true;
  has_moved_ = true;
  Piece piece = RequestCutter::CutOff(job, range, staged);
  if (!job->is_write()) return StartRequest(std::move(piece), range, staged);
  copies_.Add(std::move(piece));
  return Status::Ok();
}

// Start the kernel's part of a piece. REQUIRES: a slot of the pump is free; a write has the lock.
Status RequestFlow::StartRequest(Piece piece, const PieceRange& range, std::byte* buffer) {
  const size_t tag = free_tags_.back();
  free_tags_.pop_back();
  const IoOp op = piece.job->request->op();
  if (op == IoOp::kWrite) turn_.Begin(range.from_bytes, range.until_bytes);
  pieces_[tag] = std::move(piece);
  const auto size_bytes = static_cast<uint32_t>(range.asked_bytes());
  return pump_->Start({.op = op,
                       .buffer = buffer,
                       .size_bytes = size_bytes,
                       .needed_bytes = static_cast<uint32_t>(range.until_bytes - range.start_bytes),
                       .offset_bytes = range.start_bytes,
                       .tag = tag},
                      /*more_follow=*/size_bytes <= kBatchedBytes);
}

// ---------------------------------------------------------------------------------------------- completing

void RequestFlow::CompleteRequest(const IoPump::Finished& finished) {
  Piece piece = std::exchange(pieces_[finished.tag], {});
  free_tags_.push_back(finished.tag);
  const std::shared_ptr<Job>& job = piece.job;
  if (job->is_write()) turn_.End();
  if (finished.start_again) {
    ready_writes_.push_back(std::move(piece));
    return;
  }
  const bool is_end = finished.status.code() == StatusCode::kEndOfFile;
  const uint32_t behind_skipped_bytes = finished.done_bytes - std::min(finished.done_bytes, piece.skipped_bytes);
  uint32_t done_bytes = finished.status.ok() ? piece.size_bytes : 0;
  if (is_end) done_bytes = std::min(behind_skipped_bytes, piece.size_bytes);  // the bytes before the end were read
  if (!finished.status.ok()) Fail(job, piece.part, piece.from_bytes + behind_skipped_bytes, finished.status);
  if (job->device() != nullptr) {
    CompleteDeviceRequest(std::move(piece), done_bytes);
    return;
  }
  if (piece.staged != nullptr && !job->is_write() && done_bytes > 0) {
    std::memcpy(piece.address(), piece.staged + piece.skipped_bytes, done_bytes);
  }
  job->done_bytes += done_bytes;
  CompletePiece(piece);
}

// A read goes on to the device; a write is complete.
void RequestFlow::CompleteDeviceRequest(Piece piece, uint32_t done_bytes) {
  has_moved_ = true;
  if (!piece.job->is_write() && done_bytes > 0 && !piece.job->given_up()) {
    piece.size_bytes = done_bytes;
    copies_.Add(std::move(piece));
    return;
  }
  if (piece.job->is_write()) piece.job->done_bytes += done_bytes;
  CompletePiece(piece);
}

void RequestFlow::CompleteCopies(bool closing) {
  ended_.clear();
  copies_.Look(closing, ended_);
  for (DeviceCopies::Ended& ended : ended_) {
    has_moved_ = true;
    const Piece& piece = ended.piece;
    if (!ended.status.ok()) Fail(piece.job, piece.part, piece.from_bytes, ended.status);
    if (ended.late) {
      ReleaseWhenComplete({ended.late}, [memory = piece.job->request->memory()] {});
      staging_.PutInQuarantine(piece, std::move(ended.late));
      --piece.job->piece_count;
      CompleteJobIfLast(piece.job);
    } else if (piece.job->is_write() && ended.status.ok()) {
      ready_writes_.push_back(std::move(ended.piece));
    } else {
      if (ended.status.ok()) piece.job->done_bytes += piece.size_bytes;
      CompletePiece(piece);
    }
  }
  ended_.clear();
}

void RequestFlow::CompletePiece(const Piece& piece) {
  if (piece.staged != nullptr) staging_.Put(piece);
  --piece.job->piece_count;
  CompleteJobIfLast(piece.job);
}

void RequestFlow::CompleteJobIfLast(const std::shared_ptr<Job>& job) {
  if (!job->all_cut() || job->piece_count > 0) return;
  NoteEngine();
  job->request->CompleteJob(job->done_bytes, job->failed_count, std::move(job->first_failure));
}

// Record a failure and cut no more of the job; its pieces in flight come to their end.
void RequestFlow::Fail(const std::shared_ptr<Job>& job, size_t part_number, uint64_t place_bytes,
                       const Status& status) {
  job->Note({.status = status, .part = job->parts[part_number], .done_bytes = place_bytes});
  if (!job->all_cut()) std::erase(host_jobs_, job);
  job->next_part = job->parts.size();
}

// Fail the next job to be started; the others may go on.
void RequestFlow::FailNext(const Status& status) {
  const std::shared_ptr<Job> job = host_jobs_.front();
  Fail(job, job->next_part, job->next_part_bytes, status);
  CompleteJobIfLast(job);
}

// The pump is broken: fail all requests, and those that arrive later.
void RequestFlow::FailEverything(const Status& status) {
  broken_ = status;
  pump_->Abandon();
  std::vector<std::shared_ptr<Job>> failed(host_jobs_.begin(), host_jobs_.end());
  host_jobs_.clear();
  std::copy_if(device_jobs_.begin(), device_jobs_.end(), std::back_inserter(failed),
               [](const std::shared_ptr<Job>& job) { return !job->all_cut(); });
  device_jobs_.clear();
  const auto drop = [this, &failed](const Piece& piece) {
    if (piece.staged != nullptr) staging_.Put(piece);
    --piece.job->piece_count;
    if (std::find(failed.begin(), failed.end(), piece.job) == failed.end()) failed.push_back(piece.job);
  };
  for (size_t tag = 0; tag < pieces_.size(); ++tag) {
    const Piece piece = std::exchange(pieces_[tag], {});
    if (piece.job == nullptr) continue;
    free_tags_.push_back(tag);
    if (piece.job->is_write()) turn_.End();
    drop(piece);
  }
  for (const Piece& piece : ready_writes_) drop(piece);
  ready_writes_.clear();
  for (const std::shared_ptr<Job>& job : failed) {
    job->next_part = job->parts.size();
    job->Note({.status = status, .part = job->parts.front(), .done_bytes = 0});
    CompleteJobIfLast(job);  // unless a device still copies
  }
}

}  // namespace fastpersist
