#include "transfer/file_writer.h"

#include <algorithm>
#include <cstring>

#include "core/alignment.h"
#include "core/crc32.h"

namespace fastpersist {

void PieceList::AddBytes(std::string bytes) {
  owned_.push_back(std::move(bytes));
  AddMemory(reinterpret_cast<const std::byte*>(owned_.back().data()), owned_.back().size(), kNoCrc);
}

void PieceList::AddMemory(const std::byte* address, uint64_t size_bytes, uint32_t crc_slot) {
  pieces_.push_back({Kind::kMemory, crc_slot, size_bytes, address, 0});
  size_bytes_ += size_bytes;
}

void PieceList::AddPulled(uint64_t id, uint64_t size_bytes, uint32_t crc_slot) {
  pieces_.push_back({Kind::kPulled, crc_slot, size_bytes, nullptr, id});
  size_bytes_ += size_bytes;
}

void PieceList::AddCrc(uint32_t crc_slot) {
  pieces_.push_back({Kind::kCrc, crc_slot, sizeof(uint32_t), nullptr, 0});
  size_bytes_ += sizeof(uint32_t);
}

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
  finished_tags_.clear();
  FP_RETURN_IF_ERROR(pump_->Collect(wait, finished_tags_));
  for (const uint64_t tag : finished_tags_) share_.Put(std::exchange(in_flight_[tag], nullptr));
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

Status FileWriter::Fill(const PieceList::Piece& piece) {
  std::byte crc_bytes[sizeof(uint32_t)];
  const std::byte* source = piece.address;
  if (piece.kind == PieceList::Kind::kCrc) {
    for (size_t i = 0; i < sizeof(crc_bytes); ++i) {
      crc_bytes[i] = static_cast<std::byte>(crc(piece.crc_slot) >> (8 * i));
    }
    source = crc_bytes;
  }
  const bool with_crc = piece.kind != PieceList::Kind::kCrc && piece.crc_slot != PieceList::kNoCrc;
  if (with_crc && piece.crc_slot >= crcs_.size()) crcs_.resize(size_t{piece.crc_slot} + 1);

  for (uint64_t done_bytes = 0; done_bytes < piece.size_bytes;) {
    FP_RETURN_IF_ERROR(EnsureBuffer());
    // Chunks end on multiples of the chunk size in the file, so every one but the first and the last is a full one.
    const size_t capacity_bytes = chunk_bytes_ - static_cast<size_t>(chunk_offset_ & (chunk_bytes_ - 1));
    const size_t size_bytes =
        static_cast<size_t>(std::min<uint64_t>(capacity_bytes - fill_bytes_, piece.size_bytes - done_bytes));
    std::byte* target = buffer_ + fill_bytes_;
    if (piece.kind == PieceList::Kind::kPulled) {
      FP_RETURN_IF_ERROR(hooks_.pull(piece.id, done_bytes, target, size_bytes));
      if (with_crc) crcs_[piece.crc_slot] = Crc32(crcs_[piece.crc_slot], target, size_bytes);
    } else if (with_crc) {
      crcs_[piece.crc_slot] = CopyWithCrc32(crcs_[piece.crc_slot], target, source + done_bytes, size_bytes);
    } else {
      std::memcpy(target, source + done_bytes, size_bytes);
    }
    done_bytes += size_bytes;
    fill_bytes_ += size_bytes;
    if (fill_bytes_ == capacity_bytes) FP_RETURN_IF_ERROR(StartChunk());
  }
  return Status::Ok();
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
