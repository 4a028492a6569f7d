#include "transfer/request_worker.h"

#include <fcntl.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/alignment.h"
#include "core/crc32.h"

namespace fastpersist {
namespace {

// While requests are in flight and there is room for more, new ones are looked for this often.
constexpr auto kLookInterval = std::chrono::milliseconds(1);
// Smaller requests go to the kernel together; larger ones at once, since the next may have to be copied first.
constexpr uint32_t kBatchedBytes = 64 << 10;

}  // namespace

RequestWorker::RequestWorker(std::unique_ptr<IoPump> pump, DirectIoLimits limits, uint64_t chunk_bytes,
                             uint64_t staging_bytes, int fd, EdgeLock lock, Side side)
    : limits_(std::move(limits)),
      chunk_bytes_(chunk_bytes),
      fd_(fd),
      side_(side),
      pump_(std::move(pump)),
      staging_(staging_bytes),
      lock_(std::move(lock)) {
  pieces_.resize(pump_->queue_depth());
  for (size_t i = pieces_.size(); i > 0; --i) free_pieces_.push_back(i - 1);
  NoteEngine();
}

RequestWorker::~RequestWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_one();
  if (started_) pthread_join(thread_, nullptr);
}

std::string RequestWorker::engine_name() const {
  const std::lock_guard lock(mutex_);
  return engine_name_;
}

std::vector<std::string> RequestWorker::demotions() const {
  const std::lock_guard lock(mutex_);
  return demotions_;
}

void RequestWorker::NoteEngine() {
  const std::lock_guard lock(mutex_);
  engine_name_ = pump_->engine_name();
  demotions_ = pump_->demotions();
}

void RequestWorker::Add(std::shared_ptr<FileRequest> request, std::vector<FilePart> parts) {
  auto job = std::make_shared<Job>();
  job->request = std::move(request);
  job->parts = std::move(parts);
  int refused = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!started_) {
      // The application's signals are for its own threads.
      sigset_t all_signals;
      sigset_t before;
      sigfillset(&all_signals);
      pthread_sigmask(SIG_SETMASK, &all_signals, &before);
      refused = pthread_create(&thread_, nullptr, Main, this);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      started_ = refused == 0;
    }
    if (refused == 0) inbox_.push_back(job);
  }
  if (refused == 0) {
    arrived_.notify_one();
    return;
  }
  Status status = Status::Error(
      StatusCode::kNoMemory,
      "the thread for this file could not be started (pthread_create: " + std::generic_category().message(refused) +
          "); raise the limit of processes (ulimit -u, or pids.max of the container)");
  job->request->JobDone(0, 1, {.status = std::move(status), .part = job->parts.front()});
}

void* RequestWorker::Main(void* self) {
  pthread_setname_np(pthread_self(), "fastpersist-ra");
  static_cast<RequestWorker*>(self)->Run();
  return nullptr;
}

void RequestWorker::Run() {
  std::vector<IoPump::Finished> finished;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (jobs_.empty() && pump_->in_flight() == 0) {
        arrived_.wait(lock, [this] { return !inbox_.empty() || stopping_; });
        if (inbox_.empty()) return;
      } else if (is_locked_out_ && pump_->in_flight() == 0) {
        arrived_.wait_for(lock, kLookInterval);
      }
      jobs_.insert(jobs_.end(), inbox_.begin(), inbox_.end());
      inbox_.clear();
    }
    Status status = broken_;
    if (status.ok()) status = StartPieces();
    if (status.ok() && pump_->in_flight() > 0) {
      finished.clear();
      // What is left to be cut waits for room, so nothing that arrives could be started either; or for the lock.
      const bool looks = jobs_.empty() || is_locked_out_;
      status = pump_->Collect(looks ? kLookInterval : std::chrono::milliseconds::max(), finished);
      for (const IoPump::Finished& request : finished) Finish(request);
    }
    if (!status.ok()) FailEverything(status);
    if (write_count_ == 0 && !next_is_write()) LeaveLock();
  }
}

// Cut pieces off the jobs and give them to the kernel until it has enough, or staging has no room.
Status RequestWorker::StartPieces() {
  bool started = true;
  while (started && !jobs_.empty() && !free_pieces_.empty()) {
    std::shared_ptr<Job> next = jobs_.front();
    if (next_is_write()) {
      bool may_write = false;
      PrepareToWrite(may_write);
      if (!may_write) next = FirstRead();  // which needs no lock
    }
    if (next == nullptr) break;
    FP_RETURN_IF_ERROR(StartPiece(next, started));
  }
  return Status::Ok();
}

std::shared_ptr<RequestWorker::Job> RequestWorker::FirstRead() const {
  const auto read =
      std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->request->op() == IoOp::kRead; });
  return read == jobs_.end() ? nullptr : *read;
}

// Writes are started with the lock only. If somebody waits for it, those in flight come to their end first.
void RequestWorker::PrepareToWrite(bool& may_write) {
  // What began as direct writes goes through the page cache if no direct engine was left.
  const bool alone = side_ == Side::kAlone || !pump_->direct();
  if (lock_.held() && (is_leaving_ || lock_.alone() != alone || lock_.SomebodyWaits())) {
    is_leaving_ = write_count_ > 0;
    may_write = !is_leaving_;
    if (is_leaving_) return;
    LeaveLock();
  }
  Result<bool> entered = lock_.TryEnter(alone);
  may_write = entered.ok() && entered.value();
  is_locked_out_ = entered.ok() && !entered.value();
  if (!entered.ok()) FailNext(entered.status());
}

// What was written through the page cache is clean again before others write directly. An error of that is kept by the
// kernel for the next sync.
void RequestWorker::LeaveLock() {
  constexpr unsigned kStart = SYNC_FILE_RANGE_WRITE;
  constexpr unsigned kFinish = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  for (const unsigned flags : {kStart, kFinish}) {
    for (const auto& [first, end] : dirty_) {
      sync_file_range(fd_, static_cast<off_t>(first), static_cast<off_t>(end - first), flags);
    }
  }
  dirty_.clear();
  is_leaving_ = false;
  lock_.Leave();
}

// Example, direct, chunks of 1 MiB, blocks of 512: a read of [1000, 2 MiB) is cut into [1000, 1 MiB), for which
// [512, 1 MiB) is read and 488 bytes are skipped, and [1 MiB, 2 MiB).
Status RequestWorker::StartPiece(const std::shared_ptr<Job>& job, bool& started) {
  const FilePart& part = job->parts[job->next_part];
  const bool is_write = job->request->op() == IoOp::kWrite;
  const uint64_t from = part.offset_bytes + job->next_part_bytes;
  const uint64_t until = std::min(part.offset_bytes + part.size_bytes, AlignDown(from, chunk_bytes_) + chunk_bytes_);
  std::byte* const address = part.address + job->next_part_bytes;
  uint64_t start = from;
  uint64_t end = until;
  std::byte* staged = nullptr;
  if (pump_->direct()) {
    start = AlignDown(from, limits_.offset_alignment_bytes);
    end = AlignUp(until, limits_.offset_alignment_bytes);
    const bool is_whole = start == from && end == until;
    FP_CHECK(is_whole || !is_write);
    const uint32_t memory_alignment_bytes = std::max(limits_.memory_alignment_bytes, 1U);
    if (!is_whole || reinterpret_cast<uintptr_t>(address) % memory_alignment_bytes != 0) {
      FP_RETURN_IF_ERROR(staging_.Prepare());
      staged = staging_.Take(end - start);
      if (staged == nullptr) {
        FP_CHECK(pump_->in_flight() > 0);
        started = false;
        return Status::Ok();
      }
      // Around the cache: the device reads it next. The CRC is for nothing, and costs nothing.
      if (is_write) std::ignore = CopyWithCrc32(0, staged, address, until - from);
    }
  }

  const size_t tag = free_pieces_.back();
  free_pieces_.pop_back();
  pieces_[tag] = {.job = job,
                  .part = job->next_part,
                  .from_bytes = job->next_part_bytes,
                  .size_bytes = static_cast<uint32_t>(until - from),
                  .skipped_bytes = static_cast<uint32_t>(from - start),
                  .staged = staged};
  if (is_write) {
    ++write_count_;
    if (lock_.alone()) {
      dirty_.emplace_back(AlignDown(from, Staging::kUnitBytes), AlignUp(until, Staging::kUnitBytes));
    }
  }
  ++job->piece_count;
  job->next_part_bytes += until - from;
  if (job->next_part_bytes == part.size_bytes) {
    ++job->next_part;
    job->next_part_bytes = 0;
  }
  if (job->all_cut()) std::erase(jobs_, job);
  const auto size_bytes = static_cast<uint32_t>(end - start);
  return pump_->Start({.op = job->request->op(),
                       .buffer = staged == nullptr ? address : staged,
                       .size_bytes = size_bytes,
                       .needed_bytes = static_cast<uint32_t>(until - start),
                       .offset_bytes = start,
                       .tag = tag},
                      /*more_follow=*/size_bytes <= kBatchedBytes);
}

void RequestWorker::Finish(const IoPump::Finished& finished) {
  const Piece piece = std::exchange(pieces_[finished.tag], {});
  free_pieces_.push_back(finished.tag);
  Job& job = *piece.job;
  const FilePart& part = job.parts[piece.part];
  --job.piece_count;
  if (job.request->op() == IoOp::kWrite) --write_count_;
  const bool is_end = finished.status.code() == StatusCode::kEndOfFile;
  const uint32_t behind_skipped_bytes = finished.done_bytes - std::min(finished.done_bytes, piece.skipped_bytes);
  uint32_t done_bytes = finished.status.ok() ? piece.size_bytes : 0;
  if (is_end) done_bytes = std::min(behind_skipped_bytes, piece.size_bytes);  // what is there is read
  if (piece.staged != nullptr && job.request->op() == IoOp::kRead && done_bytes > 0) {
    std::memcpy(part.address + piece.from_bytes, piece.staged + piece.skipped_bytes, done_bytes);
  }
  job.done_bytes += done_bytes;
  if (!finished.status.ok()) {
    const uint64_t place_bytes = piece.from_bytes + behind_skipped_bytes;
    FileRequest::Failure& first = job.first_failure;
    // Pieces come back in any order, and behind the end of the file each of them meets it.
    const bool is_earlier_end = is_end && first.status.code() == StatusCode::kEndOfFile &&
                                first.part.offset_bytes == part.offset_bytes && first.part.address == part.address &&
                                place_bytes < first.done_bytes;
    if (job.failed_count++ == 0 || is_earlier_end) {
      first = {.status = finished.status, .part = part, .done_bytes = place_bytes};
    }
    // Nothing more of this job is started; what is in flight comes to its end.
    if (!job.all_cut()) std::erase(jobs_, piece.job);
    job.next_part = job.parts.size();
  }
  if (piece.staged != nullptr) staging_.Put(piece.staged);
  FinishIfDone(piece.job);
}

void RequestWorker::FinishIfDone(const std::shared_ptr<Job>& job) {
  if (!job->all_cut() || job->piece_count > 0) return;
  NoteEngine();
  job->request->JobDone(job->done_bytes, job->failed_count, std::move(job->first_failure));
}

// What has to be started next cannot be. The others may still.
void RequestWorker::FailNext(const Status& status) {
  const std::shared_ptr<Job> job = jobs_.front();
  jobs_.pop_front();
  const FilePart& part = job->parts[job->next_part];
  if (job->failed_count++ == 0)
    job->first_failure = {.status = status, .part = part, .done_bytes = job->next_part_bytes};
  job->next_part = job->parts.size();
  FinishIfDone(job);
}

// The pump is broken: nothing that was asked for, or will be, can be done.
void RequestWorker::FailEverything(const Status& status) {
  broken_ = status;
  pump_->Abandon();
  std::vector<std::shared_ptr<Job>> failed(jobs_.begin(), jobs_.end());
  jobs_.clear();
  for (size_t tag = 0; tag < pieces_.size(); ++tag) {
    Piece piece = std::exchange(pieces_[tag], {});
    if (piece.job == nullptr) continue;
    if (piece.staged != nullptr) staging_.Put(piece.staged);
    free_pieces_.push_back(tag);
    --piece.job->piece_count;
    if (piece.job->request->op() == IoOp::kWrite) --write_count_;
    if (std::find(failed.begin(), failed.end(), piece.job) == failed.end()) failed.push_back(piece.job);
  }
  for (const std::shared_ptr<Job>& job : failed) {
    job->next_part = job->parts.size();
    if (job->failed_count++ == 0) job->first_failure = {.status = status, .part = job->parts.front(), .done_bytes = 0};
    FinishIfDone(job);
  }
}

}  // namespace fastpersist
