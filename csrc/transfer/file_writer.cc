#include "transfer/file_writer.h"

#include <algorithm>
#include <cstring>

#include "core/alignment.h"
#include "core/crc32.h"

namespace fastpersist {

void PieceList::AddBytes(std::string bytes) {
  owned_.push_back(std::move(bytes));
  Add(Kind::kBytes, owned_.back().size(), kNoCrc, reinterpret_cast<const std::byte*>(owned_.back().data()), 0);
}

void PieceList::Add(Kind kind, uint64_t size_bytes, uint32_t crc_slot, const std::byte* address, uint64_t id) {
  pieces_.push_back({kind, crc_slot, size_bytes, address, id, nullptr});
  size_bytes_ += size_bytes;
}

void PieceList::AddMemory(const std::byte* address, uint64_t size_bytes, uint32_t crc_slot) {
  Add(Kind::kMemory, size_bytes, crc_slot, address, 0);
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
                                                     TransferHooks hooks) {
  options.poll = hooks.poll;
  Result<std::unique_ptr<IoPump>> pump = IoPump::Open(fd, std::move(path), std::move(options));
  if (!pump.ok()) return pump.status();
  const auto poll_while_waiting = [&hooks] { return hooks.poll ? hooks.poll(0) : Status::Ok(); };
  Result<BufferShare> share = BufferShare::Join(pool, poll_while_waiting);
  if (!share.ok()) return share.status();
  return std::unique_ptr<FileWriter>(
      new FileWriter(std::move(pump).value(), std::move(share).value(), std::move(hooks), pool.buffer_bytes()));
}

FileWriter::FileWriter(std::unique_ptr<IoPump> pump, BufferShare share, TransferHooks hooks, size_t chunk_bytes)
    : pump_(std::move(pump)), share_(std::move(share)), hooks_(std::move(hooks)), chunk_bytes_(chunk_bytes) {
  in_flight_.resize(pump_->queue_depth());
}

FileWriter::~FileWriter() { Abandon(); }

// The kernel lets go of the buffers first; only then do they go back to the share.
Status FileWriter::Abort(Status status) {
  if (failed_.ok()) failed_ = std::move(status);
  pump_->Abandon();
  for (std::byte*& buffer : in_flight_) {
    if (buffer != nullptr) share_.Put(std::exchange(buffer, nullptr));
  }
  if (buffer_ != nullptr) share_.Put(std::exchange(buffer_, nullptr));
  return failed_;
}

Status FileWriter::Collect(bool wait) {
  finished_.clear();
  FP_RETURN_IF_ERROR(pump_->Collect(wait ? std::chrono::milliseconds::max() : std::chrono::milliseconds(0), finished_));
  for (const IoPump::Finished& request : finished_) share_.Put(std::exchange(in_flight_[request.tag], nullptr));
  return Status::Ok();
}

Status FileWriter::EnsureBuffer() {
  while (buffer_ == nullptr) {
    buffer_ = share_.Take();
    if (buffer_ != nullptr) break;
    // None is idle and the pool has none to spare: one of ours must come back. There is one, since we own at least
    // two and are filling none.
    FP_RETURN_IF_ERROR(Collect(/*wait=*/true));
  }
  return Status::Ok();
}

// Hand the chunk over, padded with zeros to a whole block.
Status FileWriter::StartChunk() {
  if (fill_bytes_ == 0) return Status::Ok();
  const size_t padded_bytes = AlignUp(fill_bytes_, kBlockBytes);
  std::memset(buffer_ + fill_bytes_, 0, padded_bytes - fill_bytes_);
  while (pump_->in_flight() == pump_->queue_depth()) FP_RETURN_IF_ERROR(Collect(/*wait=*/true));
  const auto free_tag = std::find(in_flight_.begin(), in_flight_.end(), nullptr);
  FP_CHECK(free_tag != in_flight_.end());
  *free_tag = buffer_;
  const IoPump::Request request{.op = IoOp::kWrite,
                                .buffer = std::exchange(buffer_, nullptr),
                                .size_bytes = static_cast<uint32_t>(padded_bytes),
                                .needed_bytes = static_cast<uint32_t>(padded_bytes),
                                .offset_bytes = chunk_offset_,
                                .tag = static_cast<uint64_t>(free_tag - in_flight_.begin())};
  chunk_offset_ += fill_bytes_;
  fill_bytes_ = 0;
  FP_RETURN_IF_ERROR(pump_->Start(request));
  return Collect(/*wait=*/false);
}

// Copy at most size_bytes of a piece to where the chunk is filled up to, and continue `crc` with them. Sets size_bytes
// to what was copied.
Status FileWriter::CopyPart(const PieceList::Piece& piece, uint64_t done_bytes, size_t& size_bytes, uint32_t& crc) {
  std::byte* const target = buffer_ + fill_bytes_;
  const bool with_crc = piece.kind == PieceList::Kind::kBytes || piece.crc_slot != PieceList::kNoCrc;
  const auto copy = [&](const std::byte* source) {
    if (with_crc) {
      crc = CopyWithCrc32(crc, target, source, size_bytes);
    } else {
      std::memcpy(target, source, size_bytes);
    }
  };
  switch (piece.kind) {
    case PieceList::Kind::kBytes:
    case PieceList::Kind::kMemory:
      copy(piece.address + done_bytes);
      break;
    case PieceList::Kind::kCaptured: {
      const auto poll = [this] { return hooks_.poll ? hooks_.poll(pump_->done_bytes()) : Status::Ok(); };
      auto taken = piece.snapshot->Take(static_cast<uint32_t>(piece.id), done_bytes, size_bytes, poll);
      if (!taken.ok()) return taken.status();
      size_bytes = taken.value().size();
      copy(taken.value().data());
      piece.snapshot->Done();
      break;
    }
    case PieceList::Kind::kPulled:
      FP_RETURN_IF_ERROR(hooks_.pull(piece.id, done_bytes, target, size_bytes));
      if (with_crc) crc = Crc32(crc, target, size_bytes);
      break;
    case PieceList::Kind::kCrc: {
      std::byte crc_bytes[sizeof(uint32_t)];
      for (size_t i = 0; i < sizeof(crc_bytes); ++i) {
        crc_bytes[i] = static_cast<std::byte>(this->crc(piece.crc_slot) >> (8 * i));
      }
      copy(crc_bytes + done_bytes);
      break;
    }
  }
  return Status::Ok();
}

Status FileWriter::Fill(const PieceList::Piece& piece) {
  const bool in_slot = piece.kind != PieceList::Kind::kCrc && piece.crc_slot != PieceList::kNoCrc;
  Run& run = runs_.back();
  // The CRC of a piece in a slot is wanted by itself; others just go on with the file's.
  uint32_t crc = in_slot ? 0 : run.crc;
  for (uint64_t done_bytes = 0; done_bytes < piece.size_bytes;) {
    FP_RETURN_IF_ERROR(EnsureBuffer());
    // Chunks end on multiples of the chunk size in the file, so every one but the first and the last is a full one.
    const size_t capacity_bytes = chunk_bytes_ - static_cast<size_t>(chunk_offset_ & (chunk_bytes_ - 1));
    auto size_bytes =
        static_cast<size_t>(std::min<uint64_t>(capacity_bytes - fill_bytes_, piece.size_bytes - done_bytes));
    FP_RETURN_IF_ERROR(CopyPart(piece, done_bytes, size_bytes, crc));
    done_bytes += size_bytes;
    fill_bytes_ += size_bytes;
    if (fill_bytes_ == capacity_bytes) FP_RETURN_IF_ERROR(StartChunk());
  }

  if (in_slot) {
    if (piece.crc_slot >= crcs_.size()) crcs_.resize(size_t{piece.crc_slot} + 1);
    uint32_t& slot_crc = crcs_[piece.crc_slot];
    slot_crc = CombineCrc32(slot_crc, crc, piece.size_bytes);
    crc = CombineCrc32(run.crc, crc, piece.size_bytes);
  }
  run.crc = crc;
  every_piece_has_crc_ &= in_slot || piece.kind == PieceList::Kind::kBytes || piece.kind == PieceList::Kind::kCrc;
  run.size_bytes += piece.size_bytes;
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
  return Status::Ok();
}

Status FileWriter::Seek(uint64_t offset_bytes) {
  if (!failed_.ok()) return failed_;
  if (!IsAligned(offset_bytes, kBlockBytes)) {
    return Status::Error(StatusCode::kInvalidArgument, "seek to " + std::to_string(offset_bytes) +
                                                           ", which is no multiple of " + std::to_string(kBlockBytes));
  }
  Status status = StartChunk();
  if (!status.ok()) return Abort(std::move(status));
  chunk_offset_ = offset_bytes;
  runs_.push_back({.offset_bytes = offset_bytes, .size_bytes = 0, .crc = 0});
  return Status::Ok();
}

Status FileWriter::Finish() {
  if (!failed_.ok()) return failed_;
  Status status = StartChunk();
  while (status.ok() && pump_->in_flight() > 0) status = Collect(/*wait=*/true);
  if (!status.ok()) return Abort(std::move(status));
  if (buffer_ != nullptr) share_.Put(std::exchange(buffer_, nullptr));
  return Status::Ok();
}

}  // namespace fastpersist
