#include "transfer/file_writer.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/alignment.h"
#include "core/crc32.h"
#include "core/memory.h"
#include "core/thread.h"
#include "device/pinning.h"

namespace fastpersist {
namespace {

constexpr int kCopyThreadsMax = 4;  // two gain 1.15 to 1.5 times; more were not measured
constexpr size_t kHandedOverBytesMin = size_t{64}
                                       << 10;  // a few microseconds of copying, about what it takes to wake a thread
constexpr uint32_t kWritesPerCheck = 8;

}  // namespace

void PieceList::AddBytes(std::string bytes) {
  owned_.push_back(std::move(bytes));
  Add(Kind::kBytes, owned_.back().size(), kNoCrc, reinterpret_cast<const std::byte*>(owned_.back().data()), 0);
}

void PieceList::Add(Kind kind, uint64_t size_bytes, uint32_t crc_slot, const std::byte* address, uint64_t id) {
  pieces_.push_back({kind, crc_slot, size_bytes, address, id, nullptr, nullptr});
  size_bytes_ += size_bytes;
}

void PieceList::AddMemory(const std::byte* address, uint64_t size_bytes, uint32_t crc_slot) {
  Add(Kind::kMemory, size_bytes, crc_slot, address, 0);
}

void PieceList::AddDevice(Device& device, CudaAddress address, uint64_t size_bytes, uint32_t crc_slot) {
  Add(Kind::kDevice, size_bytes, crc_slot, nullptr, address);
  pieces_.back().device = &device;
}

void PieceList::AddCaptured(std::shared_ptr<Snapshot> snapshot, uint32_t source, uint64_t size_bytes,
                            uint32_t crc_slot) {
  Add(Kind::kCaptured, size_bytes, crc_slot, nullptr, source);
  pieces_.back().snapshot = snapshot.get();
  if (snapshots_.empty() || snapshots_.back() != snapshot) snapshots_.push_back(std::move(snapshot));
}

void PieceList::AddPulled(uint64_t id, uint64_t size_bytes, uint32_t crc_slot) {
  Add(Kind::kPulled, size_bytes, crc_slot, nullptr, id);
}

void PieceList::AddCrc(uint32_t crc_slot) { Add(Kind::kCrc, sizeof(uint32_t), crc_slot, nullptr, 0); }

Result<std::unique_ptr<FileWriter>> FileWriter::Open(int fd, std::string path, PumpOptions options, BufferPool& pool,
                                                     TransferCallbacks callbacks, Device* ring_device) {
  options.poll = callbacks.poll;
  Result<std::unique_ptr<IoPump>> pump = IoPump::Open(fd, std::move(path), std::move(options));
  if (!pump.ok()) return pump.status();
  const auto poll_while_waiting = [&callbacks] { return callbacks.poll ? callbacks.poll(0) : Status::Ok(); };
  Result<BufferShare> share = BufferShare::Join(pool, poll_while_waiting);
  if (!share.ok()) return share.status();
  return std::unique_ptr<FileWriter>(new FileWriter(fd, std::move(pump).value(), std::move(share).value(),
                                                    std::move(callbacks), pool.buffer_bytes(), ring_device));
}

FileWriter::FileWriter(int fd, std::unique_ptr<IoPump> pump, BufferShare share, TransferCallbacks callbacks,
                       size_t chunk_bytes, Device* ring_device)
    : fd_(fd),
      pump_(std::move(pump)),
      block_bytes_(pump_->block_bytes()),
      share_(std::move(share)),
      callbacks_(std::move(callbacks)),
      chunk_bytes_(chunk_bytes),
      copy_threads_max_(ring_device == nullptr ? static_cast<size_t>(std::min(UsableCpuCount(), kCopyThreadsMax)) : 0) {
  if (ring_device != nullptr) device_ring_.emplace(*ring_device, [this] { return Poll(); }, nullptr);
  in_flight_.resize(pump_->queue_depth());
}

FileWriter::~FileWriter() {
  Abandon();
  if (old_block_ != nullptr) UnmapBuffers(old_block_, block_bytes_);
}

// For waits on a device, or on a snapshot, which may wait for one.
Status FileWriter::Poll() {
  share_.LetOthersJoin();
  return callbacks_.poll ? callbacks_.poll(pump_->done_bytes()) : Status::Ok();
}

// The kernel and devices release the buffers before the share gets them back. If a device holds one after the grace
// time, it is quarantined. The sources may be gone by the time the device goes on, since it only reads them: it may
// read memory that torch's caching allocator has given to another tensor. Memory that the allocator gives back to the
// driver stays mapped until the copies have ended (cuMemFree waits for them; the allocator synchronises before
// cuMemUnmap).
Status FileWriter::Abort(Status status) {
  if (failed_.ok()) failed_ = std::move(status);
  copy_threads_.reset();  // waits for those that copy
  pump_->Abandon();
  for (std::byte*& buffer : in_flight_) {
    if (buffer != nullptr) share_.Put(std::exchange(buffer, nullptr));
  }
  PassOn();
  const Grace grace;
  for (Chunk& chunk : copying_) {
    if (chunk.buffer == nullptr) continue;
    std::vector<CopyEnd> ends;
    ends.reserve(chunk.marks.size() + chunk.devices.size());
    for (CopyMark& mark : chunk.marks) ends.emplace_back(std::make_shared<const CopyMark>(std::move(mark)));
    for (Device* device : chunk.devices) ends.emplace_back(device->to_host());
    if (grace.WaitFor(ends, [this] { share_.LetOthersJoin(); })) {
      share_.Put(chunk.buffer);
    } else {
      share_.PutInQuarantine(chunk.buffer, Grace::GiveUp(std::move(ends)));
    }
  }
  copying_.clear();
  // All buffers are idle: give them back now. After Ctrl-C, a traceback may keep the writer alive, and later transfers
  // would wait for its buffers for ever.
  const BufferShare given_back(std::move(share_));
  return failed_;
}

Status FileWriter::Collect(bool wait) {
  finished_.clear();
  FP_RETURN_IF_ERROR(pump_->Collect(wait ? std::chrono::milliseconds::max() : std::chrono::milliseconds(0), finished_));
  for (const IoPump::Finished& request : finished_) share_.Put(std::exchange(in_flight_[request.tag], nullptr));
  return Status::Ok();
}

Status FileWriter::EnsureBuffer() {
  while (chunk_.buffer == nullptr) {
    chunk_.buffer = share_.Take();
    if (chunk_.buffer != nullptr) break;
    // The pool has none to spare, so one of ours must come back. There is one: we own at least two and are filling
    // none. Write the chunks with complete copies first, so that the disk has work.
    if (!copying_.empty()) {
      const Result<bool> complete = CompleteFirst(/*wait=*/true);
      if (!complete.ok()) return complete.status();
    } else {
      FP_RETURN_IF_ERROR(Collect(/*wait=*/true));
    }
  }
  return Status::Ok();
}

// ----------------------------------------------------------------------------------- blocks written in part

// Read bytes [from, until) of the open chunk, which lie in one block, from the file. Earlier writes to that block are
// in the file by then.
Status FileWriter::ReadOldBytes(size_t from_bytes, size_t until_bytes) {
  FP_RETURN_IF_ERROR(WriteCopying());
  while (pump_->in_flight() > 0) FP_RETURN_IF_ERROR(Collect(/*wait=*/true));
  if (old_block_ == nullptr) old_block_ = MapBuffers(block_bytes_);
  if (old_block_ == nullptr)
    return Status::FromErrno(errno, "mapping " + std::to_string(block_bytes_) + " bytes", "for a block of the file");
  struct stat file = {};
  if (fstat(fd_, &file) != 0) return Status::FromErrno(errno, "fstat of", "the file that is written");
  const uint64_t block_start = AlignDown(chunk_.offset_bytes + from_bytes, block_bytes_);
  const uint64_t file_end = std::max(static_cast<uint64_t>(file.st_size), block_start);
  const uint64_t old_bytes = std::min(file_end - block_start, block_bytes_);
  std::memset(old_block_ + old_bytes, 0, block_bytes_ - old_bytes);
  if (old_bytes > 0) {
    FP_RETURN_IF_ERROR(pump_->Start({.op = IoOp::kRead,
                                     .buffer = old_block_,
                                     .size_bytes = static_cast<uint32_t>(block_bytes_),
                                     .needed_bytes = static_cast<uint32_t>(old_bytes),
                                     .offset_bytes = block_start}));
    for (finished_.clear(); pump_->in_flight() > 0;) FP_RETURN_IF_ERROR(pump_->Collect(finished_));
  }
  const std::byte* const old = old_block_ + (chunk_.offset_bytes + from_bytes - block_start);
  if (!device_ring_.has_value()) {
    std::memcpy(chunk_.buffer + from_bytes, old, until_bytes - from_bytes);
    return Status::Ok();
  }
  FP_RETURN_IF_ERROR(device_ring_->PutHost(chunk_.buffer + from_bytes, old, until_bytes - from_bytes));
  return device_ring_->Wait();
}

// Make the open chunk, which is empty, begin at a block.
Status FileWriter::BeginBlock() {
  const uint64_t start_bytes = AlignDown(chunk_.offset_bytes, block_bytes_);
  const auto before_bytes = static_cast<size_t>(chunk_.offset_bytes - start_bytes);
  if (before_bytes == 0) return Status::Ok();
  chunk_.offset_bytes = start_bytes;
  chunk_.fill_bytes = before_bytes;
  return ReadOldBytes(0, before_bytes);
}

// Make the open chunk end at a block: zeros up to the next place of a seek, then the file's old bytes.
// Example with blocks of 16 KiB, 5,000 bytes in the chunk: [5000, 8192) is zeros, [8192, 16384) stays as it is.
Status FileWriter::EndBlock() {
  const size_t zeros_end = AlignUp(chunk_.fill_bytes, kBlockBytes);
  const size_t block_end = AlignUp(chunk_.fill_bytes, block_bytes_);
  if (device_ring_.has_value()) {
    FP_RETURN_IF_ERROR(device_ring_->PutZeros(chunk_.buffer + chunk_.fill_bytes, zeros_end - chunk_.fill_bytes));
    CopiesInto(device_ring_->device());
  } else {
    std::memset(chunk_.buffer + chunk_.fill_bytes, 0, zeros_end - chunk_.fill_bytes);
  }
  return zeros_end == block_end ? Status::Ok() : ReadOldBytes(zeros_end, block_end);
}

// ----------------------------------------------------------------------------------- full chunks

// The chunk is full, or the last before a seek: hand it to the kernel once its copies are complete.
Status FileWriter::EndChunk() {
  if (chunk_.fill_bytes == 0) return Status::Ok();
  FP_RETURN_IF_ERROR(EndBlock());
  if (copying_.empty() && !chunk_.is_copying()) {
    FP_RETURN_IF_ERROR(StartWrite(chunk_));
    chunk_.offset_bytes += std::exchange(chunk_.fill_bytes, 0);
    return Status::Ok();
  }
  PassOn();
  FP_RETURN_IF_ERROR(MarkCopies(copying_.back()));
  for (Result<bool> complete = true; complete.ok() && complete.value() && !copying_.empty();) {
    complete = CompleteFirst(/*wait=*/false);
    if (!complete.ok()) return complete.status();
  }
  return Status::Ok();
}

// The open chunk is full: open the next one behind it.
void FileWriter::PassOn() {
  const uint64_t next_offset_bytes = position();
  copying_.push_back(std::move(chunk_));
  chunk_ = Chunk();
  chunk_.offset_bytes = next_offset_bytes;
}

// Start to write whole blocks of the chunk: see EndBlock.
Status FileWriter::StartWrite(Chunk& chunk) {
  const size_t padded_bytes = AlignUp(chunk.fill_bytes, block_bytes_);
  FP_RETURN_IF_ERROR(Collect(/*wait=*/false));
  AddCopyThreads();
  while (pump_->in_flight() == pump_->queue_depth()) FP_RETURN_IF_ERROR(Collect(/*wait=*/true));
  const auto free_tag = std::find(in_flight_.begin(), in_flight_.end(), nullptr);
  FP_CHECK(free_tag != in_flight_.end());
  *free_tag = chunk.buffer;
  const IoPump::Request request{.op = IoOp::kWrite,
                                .buffer = std::exchange(chunk.buffer, nullptr),
                                .size_bytes = static_cast<uint32_t>(padded_bytes),
                                .needed_bytes = static_cast<uint32_t>(padded_bytes),
                                .offset_bytes = chunk.offset_bytes,
                                .tag = static_cast<uint64_t>(free_tag - in_flight_.begin())};
  return pump_->Start(request);
}

// Before a write starts: start copy threads if the disk had nothing to do at more than a tenth of the last writes.
// One would only do what this thread does, so there are two at first.
void FileWriter::AddCopyThreads() {
  ++write_count_;
  if (pump_->in_flight() == 0 && pump_->done_bytes() > 0) ++starved_count_;  // the first write finds an idle disk
  if (write_count_ < kWritesPerCheck) return;
  const bool is_starved = starved_count_ * 10 > write_count_;
  write_count_ = starved_count_ = 0;
  if (!is_starved || copy_threads_max_ < 2) return;
  if (copy_threads_ == nullptr) {
    auto threads = std::make_unique<CopyThreads>();
    if (threads->TryAddThread() && threads->TryAddThread()) copy_threads_ = std::move(threads);
  } else if (copy_threads_->thread_count() < copy_threads_max_) {
    copy_threads_->TryAddThread();
  }
}

// Put marks behind the started copies into a chunk, which tell when they are complete.
Status FileWriter::MarkCopies(Chunk& chunk) {
  while (!chunk.devices.empty()) {
    Result<CopyMark> mark = chunk.devices.back()->to_host().Mark();
    if (!mark.ok()) return mark.status();
    chunk.marks.push_back(std::move(mark).value());
    chunk.devices.pop_back();
  }
  return Status::Ok();
}

Status FileWriter::AwaitCopies(Chunk& chunk) {
  for (const CopyMark& mark : chunk.marks) FP_RETURN_IF_ERROR(mark.Wait([this] { return Poll(); }));
  chunk.marks.clear();
  for (const Part& part : chunk.parts) {
    if (part.handed_over != nullptr)
      FP_RETURN_IF_ERROR(copy_threads_->Wait(*part.handed_over, [this] { return Poll(); }));
  }
  chunk.has_handed_over = false;
  return Status::Ok();
}

// Settle the first full chunk and start its write. Returns false if its copies are not complete. REQUIRES: there is
// one.
Result<bool> FileWriter::CompleteFirst(bool wait) {
  Chunk& first = copying_.front();
  if (!wait) {
    for (const CopyMark& mark : first.marks) {
      Result<bool> reached = mark.IsComplete();
      if (!reached.ok() || !reached.value()) return reached;
    }
    for (const Part& part : first.parts) {
      if (part.handed_over != nullptr && !part.handed_over->is_complete.load(std::memory_order_acquire)) return false;
    }
  }
  FP_RETURN_IF_ERROR(AwaitCopies(first));
  SettleCrcs(first);
  FP_RETURN_IF_ERROR(StartWrite(first));
  copying_.pop_front();
  return true;
}

// Wait for the copies into full chunks, and start all of their writes.
Status FileWriter::WriteCopying() {
  while (!copying_.empty()) {
    const Result<bool> complete = CompleteFirst(/*wait=*/true);
    if (!complete.ok()) return complete.status();
  }
  return Status::Ok();
}

// Wait until all copies are complete, those into the open chunk too. Then the CRCs are settled and the sources may go.
Status FileWriter::CompleteCopies() {
  FP_RETURN_IF_ERROR(WriteCopying());
  FP_RETURN_IF_ERROR(MarkCopies(chunk_));
  FP_RETURN_IF_ERROR(AwaitCopies(chunk_));
  SettleCrcs(chunk_);
  return Status::Ok();
}

// ----------------------------------------------------------------------------------- CRCs

// Add the parts of a chunk to the CRCs, in file order. REQUIRES: all copies into it are complete.
void FileWriter::SettleCrcs(Chunk& chunk) {
  for (Part& part : chunk.parts) {
    std::byte* const bytes = chunk.buffer + part.offset_bytes;
    if (part.kind == Part::Kind::kCrcText) {
      const uint32_t crc = this->crc(part.crc_slot);
      for (size_t i = 0; i < part.size_bytes; ++i) {
        bytes[i] = static_cast<std::byte>(crc >> (8 * (part.skip_bytes + i)));
      }
      part.crc_slot = PieceList::kNoCrc;
      part.crc = Crc32(0, bytes, part.size_bytes);
    } else if (part.handed_over != nullptr) {
      part.crc = part.handed_over->crc;
    } else if (part.kind == Part::Kind::kCopying && part.crc_slot != PieceList::kNoCrc) {
      part.crc = Crc32(0, bytes, part.size_bytes);
    }
    Account(part);
  }
  chunk.parts.clear();
}

void FileWriter::Account(const Part& part) {
  if (part.crc_slot != PieceList::kNoCrc) {
    if (part.crc_slot >= crcs_.size()) crcs_.resize(size_t{part.crc_slot} + 1);
    uint32_t& slot_crc = crcs_[part.crc_slot];
    slot_crc = CombineCrc32(slot_crc, part.crc, part.size_bytes);
  }
  Run& run = runs_[part.run];
  run.crc = CombineCrc32(run.crc, part.crc, part.size_bytes);
  run.size_bytes += part.size_bytes;
}

// ----------------------------------------------------------------------------------- pieces

// Returns the next bytes of a captured piece, valid until its snapshot's EndLease(); sets their number in `part`.
Result<Snapshot::Taken> FileWriter::Take(const PieceList::Piece& piece, uint64_t done_bytes, size_t size_limit_bytes,
                                         Part& part) {
  const auto poll = [this] { return Poll(); };
  auto taken = piece.snapshot->Take(static_cast<uint32_t>(piece.id), done_bytes, size_limit_bytes, poll);
  if (taken.ok()) part.size_bytes = taken.value().size_bytes;
  return taken;
}

// Hand a large part over to the copy threads. Returns false if there are none.
bool FileWriter::TryHandOver(const PieceList::Piece& piece, uint64_t done_bytes, Part& part) {
  if (copy_threads_ == nullptr || part.size_bytes < kHandedOverBytesMin) return false;
  part.kind = Part::Kind::kCopying;
  part.handed_over = std::make_shared<CopyThreads::Copy>(chunk_.buffer + part.offset_bytes, piece.address + done_bytes,
                                                         part.size_bytes, piece.crc_slot != PieceList::kNoCrc);
  copy_threads_->Start(part.handed_over);
  chunk_.has_handed_over = true;
  return true;
}

// Copy at most size_limit_bytes of a piece behind the chunk's filled bytes; describe the copied bytes in `part`.
Status FileWriter::CopyPart(const PieceList::Piece& piece, uint64_t done_bytes, size_t size_limit_bytes, Part& part) {
  std::byte* const target = chunk_.buffer + part.offset_bytes;
  const bool with_crc = piece.kind == PieceList::Kind::kBytes || piece.crc_slot != PieceList::kNoCrc;
  part.size_bytes = size_limit_bytes;
  const auto copy = [&](const std::byte* source) {
    if (with_crc) {
      part.crc = CopyWithCrc32(0, target, source, part.size_bytes);
    } else {
      std::memcpy(target, source, part.size_bytes);
    }
  };
  switch (piece.kind) {
    case PieceList::Kind::kMemory:
      if (TryHandOver(piece, done_bytes, part)) break;
      [[fallthrough]];
    case PieceList::Kind::kBytes:
      copy(piece.address + done_bytes);
      break;
    case PieceList::Kind::kDevice:
      return CopyFromDevice(*piece.device, piece.id + done_bytes, part);
    case PieceList::Kind::kCaptured: {
      auto taken = Take(piece, done_bytes, size_limit_bytes, part);
      if (!taken.ok()) return taken.status();
      Status status;
      if (taken.value().device != nullptr) {
        status = CopyFromDevice(*taken.value().device, taken.value().address, part);
      } else {
        copy(taken.value().host_bytes().data());
      }
      piece.snapshot->EndLease();
      return status;
    }
    case PieceList::Kind::kPulled:
      FP_RETURN_IF_ERROR(callbacks_.pull(piece.id, done_bytes, target, size_limit_bytes));
      if (with_crc) part.crc = Crc32(0, target, size_limit_bytes);
      break;
    case PieceList::Kind::kCrc:
      part.kind = Part::Kind::kCrcText;
      part.skip_bytes = static_cast<uint32_t>(done_bytes);
      break;
  }
  return Status::Ok();
}

// Like CopyPart, into a buffer that no thread can read.
Status FileWriter::CopyToDeviceRing(const PieceList::Piece& piece, uint64_t done_bytes, size_t size_limit_bytes,
                                    Part& part) {
  std::byte* const target = chunk_.buffer + part.offset_bytes;
  part.size_bytes = size_limit_bytes;
  part.kind = Part::Kind::kCopying;
  CopiesInto(device_ring_->device());
  if (piece.crc_slot != PieceList::kNoCrc) {
    return Status::Error(StatusCode::kInvalidArgument,
                         "GPUDirect moves bytes that no CPU sees, so there can be no checksums");
  }
  switch (piece.kind) {
    case PieceList::Kind::kBytes:
    case PieceList::Kind::kMemory:
      return device_ring_->PutHost(target, piece.address + done_bytes, part.size_bytes);
    case PieceList::Kind::kDevice:
      return device_ring_->PutDevice(target, *piece.device, piece.id + done_bytes, part.size_bytes);
    case PieceList::Kind::kCaptured: {
      auto taken = Take(piece, done_bytes, size_limit_bytes, part);
      if (!taken.ok()) return taken.status();
      Status status;
      if (Device* const device = taken.value().device; device != nullptr) {
        status = device_ring_->PutDevice(target, *device, taken.value().address, part.size_bytes);
      } else {
        status = device_ring_->PutHost(target, taken.value().host_bytes().data(), part.size_bytes);
        if (status.ok()) status = device_ring_->Wait();  // afterwards the arena may have the memory back
      }
      piece.snapshot->EndLease();
      return status;
    }
    case PieceList::Kind::kPulled: {
      std::byte* const bounce = device_ring_->Bounce(part.size_bytes);
      FP_RETURN_IF_ERROR(callbacks_.pull(piece.id, done_bytes, bounce, part.size_bytes));
      FP_RETURN_IF_ERROR(device_ring_->PutHost(target, bounce, part.size_bytes));
      return device_ring_->Wait();
    }
    case PieceList::Kind::kCrc:
      break;  // has a slot
  }
  return Status::Ok();
}

// Note that a device copies into the open chunk.
void FileWriter::CopiesInto(Device& device) {
  if (std::find(chunk_.devices.begin(), chunk_.devices.end(), &device) == chunk_.devices.end()) {
    chunk_.devices.push_back(&device);
  }
}

Status FileWriter::CopyFromDevice(Device& device, CudaAddress address, Part& part) {
  share_.pool().PinWith(PinFor(device));
  FP_RETURN_IF_ERROR(device.to_host().AwaitRoom(share_.pool().is_pinned(chunk_.buffer), [this] { return Poll(); }));
  part.kind = Part::Kind::kCopying;
  CopiesInto(device);
  return device.to_host().ToHost(chunk_.buffer + part.offset_bytes, address, part.size_bytes);
}

Status FileWriter::Fill(const PieceList::Piece& piece) {
  for (uint64_t done_bytes = 0; done_bytes < piece.size_bytes;) {
    FP_RETURN_IF_ERROR(EnsureBuffer());
    if (chunk_.fill_bytes == 0) FP_RETURN_IF_ERROR(BeginBlock());
    // Chunks end on multiples of the chunk size in the file, so only the first and the last may be partial.
    const size_t capacity_bytes = chunk_bytes_ - static_cast<size_t>(chunk_.offset_bytes & (chunk_bytes_ - 1));
    const auto size_bytes =
        static_cast<size_t>(std::min<uint64_t>(capacity_bytes - chunk_.fill_bytes, piece.size_bytes - done_bytes));
    Part part{.kind = Part::Kind::kThere,
              .handed_over = nullptr,
              .crc_slot = piece.crc_slot,
              .crc = 0,
              .skip_bytes = 0,
              .offset_bytes = chunk_.fill_bytes,
              .size_bytes = 0,
              .run = runs_.size() - 1};
    FP_RETURN_IF_ERROR(device_ring_.has_value() ? CopyToDeviceRing(piece, done_bytes, size_bytes, part)
                                                : CopyPart(piece, done_bytes, size_bytes, part));
    done_bytes += part.size_bytes;
    chunk_.fill_bytes += part.size_bytes;
    chunk_.parts.push_back(part);
    // If no copy is in flight, settle the CRC at once.
    if (copying_.empty() && !chunk_.is_copying()) SettleCrcs(chunk_);
    if (chunk_.fill_bytes == capacity_bytes) FP_RETURN_IF_ERROR(EndChunk());
  }
  every_piece_has_crc_ &=
      piece.crc_slot != PieceList::kNoCrc || (piece.kind == PieceList::Kind::kBytes && !device_ring_.has_value());
  return Status::Ok();
}

std::optional<std::vector<FileWriter::Run>> FileWriter::runs() const {
  return every_piece_has_crc_ ? std::optional(runs_) : std::nullopt;
}

std::optional<uint32_t> FileWriter::CombineRuns(std::vector<Run> runs, uint64_t size_bytes) {
  std::erase_if(runs, [](const Run& run) { return run.size_bytes == 0; });
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.offset_bytes < b.offset_bytes; });
  uint64_t covered_bytes = 0;
  uint32_t crc = 0;
  for (const Run& run : runs) {
    if (run.offset_bytes != covered_bytes) return std::nullopt;
    covered_bytes += run.size_bytes;
    crc = CombineCrc32(crc, run.crc, run.size_bytes);
  }
  return covered_bytes == size_bytes ? std::optional(crc) : std::nullopt;
}

Status FileWriter::Append(const PieceList& pieces) {
  if (!failed_.ok()) return failed_;
  for (const PieceList::Piece& piece : pieces.pieces_) {
    Status status = Fill(piece);
    if (!status.ok()) return Abort(std::move(status));
  }
  Status status = CompleteCopies();
  return status.ok() ? status : Abort(std::move(status));
}

Status FileWriter::Seek(uint64_t offset_bytes) {
  if (!failed_.ok()) return failed_;
  if (!IsAligned(offset_bytes, kBlockBytes)) {
    return Status::Error(StatusCode::kInvalidArgument, "seek to " + std::to_string(offset_bytes) +
                                                           ", which is no multiple of " + std::to_string(kBlockBytes));
  }
  Status status = EndChunk();
  if (!status.ok()) return Abort(std::move(status));
  chunk_.offset_bytes = offset_bytes;
  runs_.push_back({.offset_bytes = offset_bytes, .size_bytes = 0, .crc = 0});
  return Status::Ok();
}

Status FileWriter::Finish() {
  if (!failed_.ok()) return failed_;
  Status status = EndChunk();
  if (status.ok()) status = CompleteCopies();
  while (status.ok() && pump_->in_flight() > 0) status = Collect(/*wait=*/true);
  if (!status.ok()) return Abort(std::move(status));
  if (chunk_.buffer != nullptr) share_.Put(std::exchange(chunk_.buffer, nullptr));
  share_.Rest();  // the next call may be long in coming
  return Status::Ok();
}

}  // namespace fastpersist
