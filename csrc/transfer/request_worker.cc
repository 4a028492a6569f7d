#include "transfer/request_worker.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/alignment.h"
#include "core/crc32.h"
#include "core/quarantine.h"
#include "core/thread.h"
#include "device/pinning.h"

namespace fastpersist {
namespace {

// What cannot be waited for beside requests in flight, the lock and devices, is looked at this often.
constexpr auto kLookInterval = std::chrono::milliseconds(1);
// Smaller requests go to the kernel together; larger ones at once, since the next may have to be copied first.
constexpr uint32_t kBatchedBytes = 64 << 10;
// Whole pages between partial ones are read on their own if they are as many: to copy fewer costs less than a request.
constexpr uint64_t kSplitBytes = 64 << 10;
// While only devices have something to do, they are looked at this often: a copy of a chunk takes 100 µs and more.
constexpr auto kPauseMin = std::chrono::microseconds(20);
constexpr auto kPauseMax = std::chrono::microseconds(500);
// A device gets so many times what is left for others then.
constexpr uint64_t kShareOfRest = 4;

}  // namespace

RequestWorker::RequestWorker(std::unique_ptr<Wakeup> wakeup, std::unique_ptr<IoPump> pump, DirectIoLimits limits,
                             uint64_t chunk_bytes, uint64_t staging_bytes, EdgeLock lock, Side side)
    : limits_(std::move(limits)),
      chunk_bytes_(chunk_bytes),
      memory_unit_bytes_(
          std::max<uint64_t>(static_cast<uint64_t>(sysconf(_SC_PAGESIZE)), limits_.memory_alignment_bytes)),
      side_(side),
      wakeup_(std::move(wakeup)),
      pump_(std::move(pump)),
      staging_(staging_bytes, /*keeps=*/side == Side::kShared),
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

void RequestWorker::GiveUpOnDevices() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_one();
}

std::string RequestWorker::engine_name() const {
  const std::lock_guard lock(mutex_);
  return engine_name_;
}

std::vector<std::string> RequestWorker::demotions() const {
  const std::lock_guard lock(mutex_);
  return demotions_;
}

Status RequestWorker::written_back() const {
  const std::lock_guard lock(mutex_);
  return written_back_;
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
      refused = StartThread(thread_, "fastpersist-ra", [this] { Run(); });
      started_ = refused == 0;
    }
    if (refused == 0) {
      if (inbox_.empty()) wakeup_->Signal();
      inbox_.push_back(job);
    }
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

void RequestWorker::Run() {
  std::vector<IoPump::Finished> finished;
  auto pause = kPauseMin;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (jobs_.empty() && pump_->in_flight() == 0 && !has_more_work()) {
        arrived_.wait(lock, [this] { return !inbox_.empty() || stopping_; });
        if (inbox_.empty()) return;
      } else if (is_locked_out_ && pump_->in_flight() == 0) {
        arrived_.wait_for(lock, kLookInterval);
      } else if (has_more_work() && pump_->in_flight() == 0 && inbox_.empty() && !has_moved_) {
        arrived_.wait_for(lock, pause);
        pause = std::min(2 * pause, kPauseMax);
      }
      if (!inbox_.empty()) wakeup_->Clear();
      for (std::shared_ptr<Job>& job : inbox_) {
        (job->device() == nullptr ? jobs_ : device_jobs_).push_back(std::move(job));
      }
      inbox_.clear();
      is_closing_ = closing_ || stopping_;
    }
    if (std::exchange(has_moved_, false)) pause = kPauseMin;
    if (has_more_work()) LookAtCopies();
    Status status = broken_;
    if (status.ok()) {
      status = StartAll();
    } else {
      copies_.Start(staging_.is_pinned());  // what waits for room: of reads that have all they asked for, and of writes
    }
    if (status.ok() && pump_->in_flight() > 0) {
      finished.clear();
      const bool looks = is_locked_out_ || has_more_work();
      status = pump_->Collect(looks ? kLookInterval : std::chrono::milliseconds::max(), finished);
      for (const IoPump::Finished& request : finished) Finish(request);
    }
    if (!status.ok()) FailEverything(status);
    if (write_count_ == 0 && !next_is_write() && ready_writes_.empty()) LeaveLock();
  }
}

// Host and devices are first in turns, so that neither has all slots of the pump.
Status RequestWorker::StartAll() {
  if (!has_more_work()) return StartPieces();
  is_devices_turn_ = !is_devices_turn_;
  if (!is_devices_turn_) FP_RETURN_IF_ERROR(StartPieces());
  FP_RETURN_IF_ERROR(StartReadyWrites());
  FP_RETURN_IF_ERROR(StartDevicePieces());
  copies_.Start(staging_.is_pinned());
  return is_devices_turn_ ? StartPieces() : Status::Ok();
}

// Cut pieces off the jobs and give them to the kernel until it has enough, or staging has no room.
Status RequestWorker::StartPieces() {
  bool started = true;
  while (started && !jobs_.empty() && !free_pieces_.empty()) {
    std::shared_ptr<Job> next = jobs_.front();
    if (next_is_write()) {
      Result<bool> may_write = MayWrite();
      if (!may_write.ok()) FailNext(may_write.status());
      if (!may_write.ok() || !may_write.value()) next = FirstRead();  // which needs no lock
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
Result<bool> RequestWorker::MayWrite() {
  // What began as direct writes goes through the page cache if no direct engine was left.
  const bool alone = side_ == Side::kAlone || !pump_->direct();
  if (lock_.held() && (is_leaving_ || lock_.alone() != alone || lock_.SomebodyWaits())) {
    is_leaving_ = write_count_ > 0;
    if (is_leaving_) return false;
    LeaveLock();
  }
  Result<bool> entered = lock_.TryEnter(alone);
  is_locked_out_ = entered.ok() && !entered.value();
  return entered;
}

// What was written through the page cache is clean again before others write directly. The requests that wrote it are
// done already, so an error of that is for who makes it durable.
void RequestWorker::LeaveLock() {
  Status written_back = lock_.WriteBack(dirty_);
  if (!written_back.ok()) {
    const std::lock_guard lock(mutex_);
    if (written_back_.ok()) written_back_ = std::move(written_back);
  }
  dirty_.clear();
  is_leaving_ = false;
  lock_.Leave();
}

// Example, direct, chunks of 1 MiB, blocks of 512: a read of [1000, 2 MiB) is cut into [1000, 1 MiB), for which
// [512, 1 MiB) is read and 488 bytes are skipped, and [1 MiB, 2 MiB).
RequestWorker::Range RequestWorker::NextRange(const Job& job) const {
  const FilePart& part = job.parts[job.next_part];
  const uint64_t from = part.offset_bytes + job.next_part_bytes;
  const uint64_t end = part.offset_bytes + part.size_bytes;
  uint64_t until = std::min(end, AlignDown(from, chunk_bytes_) + chunk_bytes_);
  if (pump_->direct() && !job.is_write() && job.device() == nullptr) {
    until = EndOfNextRead(from, end, reinterpret_cast<uintptr_t>(part.address) + job.next_part_bytes);
  }
  Range range{.start_bytes = from, .from_bytes = from, .until_bytes = until, .end_bytes = until};
  if (pump_->direct()) {
    range.start_bytes = AlignDown(from, limits_.offset_alignment_bytes);
    range.end_bytes = AlignUp(until, limits_.offset_alignment_bytes);
    FP_CHECK(range.is_whole() || !job.is_write());
  }
  return range;
}

// Where to end a direct read of [from, end) to an address, so that as much as possible goes straight. Example, chunks
// of 1 MiB, blocks of 512, pages of 4096: a read of [0, 2 MiB) to an address 512 bytes behind a page has its first
// whole page at 3584. It is cut into [0, 3584), which is staged, [3584, 1 MiB - 512), which is not, as many again, and
// the last 512 bytes. An address 100 bytes behind a page has no page that begins on a block: chunks as for any other
// read.
uint64_t RequestWorker::EndOfNextRead(uint64_t from, uint64_t end, uint64_t address) const {
  const uint64_t block_bytes = limits_.offset_alignment_bytes;
  const uint64_t unit_bytes = std::max(memory_unit_bytes_, block_bytes);
  const uint64_t skipped_bytes =
      std::max(AlignUp(from, block_bytes) - from, AlignUp(address, memory_unit_bytes_) - address);
  uint64_t first = from + skipped_bytes;
  const bool can_go_straight = first % block_bytes == 0 && (address + skipped_bytes) % memory_unit_bytes_ == 0;
  // Chunks end where units do.
  const uint64_t shift_bytes = can_go_straight ? AlignUp(first, unit_bytes) - first : 0;
  const uint64_t until = std::min(end, AlignDown(from + shift_bytes, chunk_bytes_) + chunk_bytes_ - shift_bytes);
  if (!can_go_straight || until < first + kSplitBytes) return until;
  if (first > from) return first;
  return first + AlignDown(until - first, unit_bytes);
}

// To memory: whole pages (random_access.h).
bool RequestWorker::GoesStraight(const Range& range, const std::byte* address, IoOp op) const {
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (op == IoOp::kWrite) return range.is_whole() && place % std::max(limits_.memory_alignment_bytes, 1U) == 0;
  return range.is_whole() && (place | range.size_bytes()) % memory_unit_bytes_ == 0;
}

RequestWorker::Piece RequestWorker::CutOff(const std::shared_ptr<Job>& job, const Range& range, std::byte* staged) {
  const uint64_t size_bytes = range.size_bytes();
  Piece piece{.job = job,
              .part = job->next_part,
              .from_bytes = job->next_part_bytes,
              .size_bytes = static_cast<uint32_t>(size_bytes),
              .skipped_bytes = static_cast<uint32_t>(range.from_bytes - range.start_bytes),
              .staged_bytes = static_cast<uint32_t>(AlignUp(range.end_bytes - range.start_bytes, Staging::kUnitBytes)),
              .staged = staged};
  ++job->piece_count;
  job->next_part_bytes += size_bytes;
  if (job->next_part_bytes == job->parts[job->next_part].size_bytes) {
    ++job->next_part;
    job->next_part_bytes = 0;
  }
  return piece;
}

// REQUIRES: a slot of the pump is free; a write has the lock.
Status RequestWorker::StartRequest(Piece piece, const Range& range, std::byte* buffer) {
  const size_t tag = free_pieces_.back();
  free_pieces_.pop_back();
  const IoOp op = piece.job->request->op();
  if (op == IoOp::kWrite) {
    ++write_count_;
    if (lock_.alone()) {
      dirty_.emplace_back(AlignDown(range.from_bytes, Staging::kUnitBytes),
                          AlignUp(range.until_bytes, Staging::kUnitBytes));
    }
  }
  pieces_[tag] = std::move(piece);
  const auto size_bytes = static_cast<uint32_t>(range.end_bytes - range.start_bytes);
  return pump_->Start({.op = op,
                       .buffer = buffer,
                       .size_bytes = size_bytes,
                       .needed_bytes = static_cast<uint32_t>(range.until_bytes - range.start_bytes),
                       .offset_bytes = range.start_bytes,
                       .tag = tag},
                      /*more_follow=*/size_bytes <= kBatchedBytes);
}

Status RequestWorker::StartPiece(const std::shared_ptr<Job>& job, bool& started) {
  const Range range = NextRange(*job);
  std::byte* const address = job->parts[job->next_part].address + job->next_part_bytes;
  std::byte* staged = nullptr;
  if (pump_->direct() && !GoesStraight(range, address, job->request->op())) {
    FP_RETURN_IF_ERROR(staging_.Prepare());
    staged = staging_.Take(range.end_bytes - range.start_bytes);
    if (staged == nullptr) {
      FP_CHECK(pump_->in_flight() > 0);
      started = false;
      return Status::Ok();
    }
    // Around the cache: the device reads it next. The CRC is for nothing, and costs nothing.
    if (job->is_write()) std::ignore = CopyWithCrc32(0, staged, address, range.size_bytes());
  }
  Piece piece = CutOff(job, range, staged);
  if (job->all_cut()) std::erase(jobs_, job);
  return StartRequest(std::move(piece), range, staged == nullptr ? address : staged);
}

Status RequestWorker::StartReadyWrites() {
  while (!ready_writes_.empty() && !free_pieces_.empty()) {
    const bool is_given_up = ready_writes_.front().job->given_up();
    Result<bool> may_write = is_given_up ? Result<bool>(true) : MayWrite();
    if (may_write.ok() && !may_write.value()) break;
    Piece piece = std::move(ready_writes_.front());
    ready_writes_.pop_front();
    has_moved_ = true;
    if (!may_write.ok()) Fail(piece.job, piece.part, piece.from_bytes, may_write.status());
    if (piece.job->given_up()) {
      LetGo(piece);
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

void RequestWorker::Finish(const IoPump::Finished& finished) {
  Piece piece = std::exchange(pieces_[finished.tag], {});
  free_pieces_.push_back(finished.tag);
  const std::shared_ptr<Job> job = piece.job;
  const bool is_of_device = job->device() != nullptr;
  if (job->is_write()) --write_count_;
  if (finished.start_again) {
    ready_writes_.push_back(std::move(piece));
    return;
  }
  const bool is_end = finished.status.code() == StatusCode::kEndOfFile;
  const uint32_t behind_skipped_bytes = finished.done_bytes - std::min(finished.done_bytes, piece.skipped_bytes);
  uint32_t done_bytes = finished.status.ok() ? piece.size_bytes : 0;
  if (is_end) done_bytes = std::min(behind_skipped_bytes, piece.size_bytes);  // what is there is read
  if (!finished.status.ok()) Fail(job, piece.part, piece.from_bytes + behind_skipped_bytes, finished.status);
  if (is_of_device) {
    FinishOfDevice(std::move(piece), done_bytes);
    return;
  }
  if (piece.staged != nullptr) {
    if (!job->is_write() && done_bytes > 0) {
      std::memcpy(piece.address(), piece.staged + piece.skipped_bytes, done_bytes);
    }
    staging_.Put(piece.staged);
  }
  job->done_bytes += done_bytes;
  --job->piece_count;
  FinishIfDone(job);
}

// Nothing more of this job is started; what is under way comes to its end.
void RequestWorker::Fail(const std::shared_ptr<Job>& job, size_t part_number, uint64_t place_bytes,
                         const Status& status) {
  job->Note({.status = status, .part = job->parts[part_number], .done_bytes = place_bytes});
  if (!job->all_cut()) std::erase(jobs_, job);
  job->next_part = job->parts.size();
}

void RequestWorker::FinishIfDone(const std::shared_ptr<Job>& job) {
  if (!job->all_cut() || job->piece_count > 0) return;
  NoteEngine();
  job->request->JobDone(job->done_bytes, job->failed_count, std::move(job->first_failure));
}

// What has to be started next cannot be. The others may still.
void RequestWorker::FailNext(const Status& status) {
  const std::shared_ptr<Job> job = jobs_.front();
  Fail(job, job->next_part, job->next_part_bytes, status);
  FinishIfDone(job);
}

// The pump is broken: nothing that was asked for, or will be, can be done.
void RequestWorker::FailEverything(const Status& status) {
  broken_ = status;
  pump_->Abandon();
  std::vector<std::shared_ptr<Job>> failed(jobs_.begin(), jobs_.end());
  jobs_.clear();
  std::copy_if(device_jobs_.begin(), device_jobs_.end(), std::back_inserter(failed),
               [](const std::shared_ptr<Job>& job) { return !job->all_cut(); });
  device_jobs_.clear();
  const auto drop = [this, &failed](const Piece& piece) {
    if (piece.staged != nullptr) PutStaged(piece);
    --piece.job->piece_count;
    if (std::find(failed.begin(), failed.end(), piece.job) == failed.end()) failed.push_back(piece.job);
  };
  for (size_t tag = 0; tag < pieces_.size(); ++tag) {
    const Piece piece = std::exchange(pieces_[tag], {});
    if (piece.job == nullptr) continue;
    free_pieces_.push_back(tag);
    if (piece.job->is_write()) --write_count_;
    drop(piece);
  }
  for (const Piece& piece : ready_writes_) drop(piece);
  ready_writes_.clear();
  for (const std::shared_ptr<Job>& job : failed) {
    job->next_part = job->parts.size();
    job->Note({.status = status, .part = job->parts.front(), .done_bytes = 0});
    FinishIfDone(job);  // unless a device still copies
  }
}

// ---------------------------------------------------------------------------------------------- devices

// Of each device and direction the first job comes first. What has no room lets the others pass.
Status RequestWorker::StartDevicePieces() {
  if (device_jobs_.empty()) return Status::Ok();
  FP_RETURN_IF_ERROR(staging_.Prepare());
  staging_.PinWith(PinFor(*device_jobs_.front()->device()));
  staging_.TakeBack();
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

Status RequestWorker::StartDevicePiece(const std::shared_ptr<Job>& job, bool& started) {
  started = false;
  if (!job->is_write() && free_pieces_.empty()) return Status::Ok();
  const Range range = NextRange(*job);
  std::byte* const staged = TakeForDevices(*job, range.end_bytes - range.start_bytes);
  if (staged == nullptr) {
    const bool is_held_up = staging_.has_quarantined() && std::all_of(staged_bytes_.begin(), staged_bytes_.end(),
                                                                      [](const auto& of) { return of.second == 0; });
    if (!is_held_up) return Status::Ok();
    Fail(job, job->next_part, job->next_part_bytes,
         Status::Error(StatusCode::kDeviceError,
                       "all buffers of the file for copies wait for a device that does not end those it was given: "
                       "the stream they follow stands still; open the file anew"));
    FinishIfDone(job);
    return Status::Ok();
  }
  started = true;
  has_moved_ = true;
  Piece piece = CutOff(job, range, staged);
  if (!job->is_write()) return StartRequest(std::move(piece), range, staged);
  copies_.Add(std::move(piece));
  return Status::Ok();
}

// A place in staging for a piece of a device. The host can always have a chunk, so none of its requests waits for a
// device; and a device with one direction leaves something to all others, as long as there are not too many.
std::byte* RequestWorker::TakeForDevices(const Job& job, uint64_t size_bytes) {
  const uint64_t of_host_bytes = pump_->direct() ? AlignUp(chunk_bytes_, Staging::kUnitBytes) : 0;
  uint64_t rest_bytes = staging_.capacity_bytes() - of_host_bytes;
  for (const auto& [lane, bytes] : staged_bytes_) rest_bytes -= std::min(bytes, rest_bytes);
  uint64_t& own_bytes = staged_bytes_[{job.device(), job.request->op()}];
  const uint64_t taken_bytes = AlignUp(size_bytes, Staging::kUnitBytes);
  if (taken_bytes > rest_bytes) return nullptr;
  if (own_bytes > 0 && own_bytes + taken_bytes > kShareOfRest * (rest_bytes - taken_bytes)) return nullptr;
  std::byte* const staged = staging_.Take(size_bytes, of_host_bytes);
  if (staged != nullptr) own_bytes += taken_bytes;
  return staged;
}

// What was read goes on to the device; what was written has come to its end.
void RequestWorker::FinishOfDevice(Piece piece, uint32_t done_bytes) {
  has_moved_ = true;
  if (!piece.job->is_write() && done_bytes > 0 && !piece.job->given_up()) {
    piece.size_bytes = done_bytes;
    copies_.Add(std::move(piece));
    return;
  }
  if (piece.job->is_write()) piece.job->done_bytes += done_bytes;
  LetGo(piece);
}

void RequestWorker::LookAtCopies() {
  ended_.clear();
  copies_.Look(is_closing_, ended_);
  for (DeviceCopies::Ended& ended : ended_) {
    has_moved_ = true;
    const Piece& piece = ended.piece;
    if (!ended.status.ok()) Fail(piece.job, piece.part, piece.from_bytes, ended.status);
    if (ended.late) {
      ReleaseWhenComplete({ended.late}, [memory = piece.job->request->memory()] {});
      PutStaged(piece, std::move(ended.late));
      --piece.job->piece_count;
      FinishIfDone(piece.job);
    } else if (piece.job->is_write() && ended.status.ok()) {
      ready_writes_.push_back(std::move(ended.piece));
    } else {
      if (ended.status.ok()) piece.job->done_bytes += piece.size_bytes;
      LetGo(piece);
    }
  }
  ended_.clear();
}

void RequestWorker::LetGo(const Piece& piece) {
  if (piece.staged != nullptr) PutStaged(piece);
  --piece.job->piece_count;
  FinishIfDone(piece.job);
}

// `late`, if not empty: the device may still copy until it holds.
void RequestWorker::PutStaged(const Piece& piece, CopiesComplete late) {
  if (piece.job->device() != nullptr) {
    staged_bytes_[{piece.job->device(), piece.job->request->op()}] -= piece.staged_bytes;
  }
  if (late) {
    staging_.PutInQuarantine(piece.staged, std::move(late));
  } else {
    staging_.Put(piece.staged);
  }
}

}  // namespace fastpersist
