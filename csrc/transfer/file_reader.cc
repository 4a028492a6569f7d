#include "transfer/file_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/alignment.h"
#include "core/crc32.h"
#include "core/memory.h"
#include "device/pinning.h"

namespace fastpersist {

Result<std::unique_ptr<FileReader>> FileReader::Open(int fd, std::string path, PumpOptions options, BufferPool& pool,
                                                     TransferCallbacks callbacks, Device* ring_device) {
  options.poll = callbacks.poll;
  Result<std::unique_ptr<IoPump>> pump = IoPump::Open(fd, std::move(path), std::move(options));
  if (!pump.ok()) return pump.status();
  const auto poll_while_waiting = [&callbacks] { return callbacks.poll ? callbacks.poll(0) : Status::Ok(); };
  Result<BufferShare> share = BufferShare::Join(pool, poll_while_waiting);
  if (!share.ok()) return share.status();
  return std::unique_ptr<FileReader>(new FileReader(std::move(pump).value(), std::move(share).value(),
                                                    std::move(callbacks), pool.buffer_bytes(), ring_device));
}

FileReader::FileReader(std::unique_ptr<IoPump> pump, BufferShare share, TransferCallbacks callbacks, size_t chunk_bytes,
                       Device* ring_device)
    : pump_(std::move(pump)), share_(std::move(share)), callbacks_(std::move(callbacks)), chunk_bytes_(chunk_bytes) {
  if (ring_device != nullptr) device_ring_.emplace(*ring_device, [this] { return Poll(); }, callbacks_.destinations);
  in_flight_.resize(pump_->queue_depth());
}

FileReader::~FileReader() { Abandon(); }

// For waits on a device.
Status FileReader::Poll() {
  share_.LetOthersJoin();
  return callbacks_.poll ? callbacks_.poll(pump_->done_bytes()) : Status::Ok();
}

// The kernel and devices release the buffers before the share gets them back. If a device holds one after the grace
// time, the quarantine keeps the buffer and the destinations: a device that goes on writes there, and must not hit
// memory that is in use elsewhere by then.
void FileReader::Abandon() {
  pump_->Abandon();
  const Grace grace;
  for (CopiedBuffer& copied : copying_) {
    std::vector<CopyEnd> ends;
    ends.reserve(copied.marks.size() + copied.unmarked.size());
    for (CopyMark& mark : copied.marks) ends.emplace_back(std::make_shared<const CopyMark>(std::move(mark)));
    for (Device* device : copied.unmarked) ends.emplace_back(device->to_device());
    if (grace.WaitFor(ends, [this] { share_.LetOthersJoin(); })) {
      share_.Put(copied.buffer);
      continue;
    }
    is_short_of_buffers_ = true;
    share_.PutInQuarantine(copied.buffer, [landed = Grace::GiveUp(std::move(ends)),
                                           destinations = callbacks_.destinations] { return landed(); });
  }
  copying_.clear();
  for (InFlight& slot : in_flight_) {
    if (slot.buffer != nullptr) share_.Put(slot.buffer);
    slot = {};
  }
}

// How many bytes of an extent, from its start, go straight to its memory. A direct read takes whole pages only: another
// object may use the rest of the first or last page.
uint64_t FileReader::StraightBytes(const ReadExtent& extent, WipedOnFork& wiped) const {
  if (extent.target != ReadExtent::Target::kMemory || extent.size_bytes < kStraightBytes) return 0;
  // Direct I/O may be given up in mid-file, but no direct engine ever replaces a buffered one.
  if (!pump_->direct()) return extent.size_bytes;
  const uint64_t unit_bytes = std::max(pump_->block_bytes(), PageBytes());
  const bool is_aligned =
      extent.offset_bytes % pump_->block_bytes() == 0 && reinterpret_cast<uintptr_t>(extent.address) % unit_bytes == 0;
  if (!extent.fresh || !is_aligned || device_ring_.has_value()) return 0;
  // A small rest is left to the ring, where it shares a request with what comes behind it.
  const uint64_t rest_bytes = extent.size_bytes % chunk_bytes_;
  const uint64_t size_bytes =
      rest_bytes < kStraightBytes ? extent.size_bytes - rest_bytes : AlignDown(extent.size_bytes, unit_bytes);
  return wiped.Add({extent.address, size_bytes}) ? size_bytes : 0;
}

// Chunks of the ring end on multiples of the chunk size in the file. Example with 8 MiB chunks: extents [5 MiB, 20 MiB)
// and [20 MiB + 100, 21 MiB) become [5, 8), [8, 16) and [16, 21) MiB; the last one serves both. An extent that starts
// before the last chunk (inside an earlier extent) gets chunks of its own: those bytes are read twice.
std::vector<FileReader::Chunk> FileReader::Cut(std::span<const ReadExtent> extents, WipedOnFork& wiped) const {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < extents.size(); ++i) {
    uint64_t from = extents[i].offset_bytes;
    const uint64_t extent_end = from + extents[i].size_bytes;
    for (const uint64_t straight_end = from + StraightBytes(extents[i], wiped); from < straight_end;) {
      const uint64_t size_bytes = std::min<uint64_t>(straight_end - from, chunk_bytes_);
      chunks.push_back({from, size_bytes, i, i + 1, extents[i].address + (from - extents[i].offset_bytes)});
      from += size_bytes;
    }
    if (!chunks.empty() && chunks.back().straight == nullptr && from < extent_end) {
      Chunk& last = chunks.back();
      const uint64_t limit = AlignDown(last.offset_bytes, chunk_bytes_) + chunk_bytes_;
      if (from >= last.offset_bytes && from < limit && from <= last.offset_bytes + last.needed_bytes + kGapBytes) {
        last.last_extent = i + 1;
        from = std::min(extent_end, limit);
        last.needed_bytes = std::max(last.needed_bytes, from - last.offset_bytes);
      }
    }
    while (from < extent_end) {
      const uint64_t start = AlignDown(from, pump_->block_bytes());
      from = std::min(extent_end, AlignDown(from, chunk_bytes_) + chunk_bytes_);
      chunks.push_back({start, from - start, i, i + 1, nullptr});
    }
  }
  return chunks;
}

Result<std::vector<uint32_t>> FileReader::Read(std::span<const ReadExtent> extents) {
  FP_CHECK(std::is_sorted(extents.begin(), extents.end(),
                          [](const auto& a, const auto& b) { return a.offset_bytes < b.offset_bytes; }));
  const bool wants_crcs = std::any_of(extents.begin(), extents.end(), [](const auto& one) { return one.with_crc; });
  if (is_short_of_buffers_) {
    return Status::Error(StatusCode::kDeviceError, "an earlier read of this reader left its buffers to a device");
  }
  if (device_ring_.has_value() && wants_crcs) {
    return Status::Error(StatusCode::kInvalidArgument,
                         "GPUDirect moves bytes that no CPU sees, so no checksums can be compared");
  }
  crc_parts_.assign(extents.size(), {});
  WipedOnFork wiped;
  const std::vector<Chunk> chunks = Cut(extents, wiped);
  std::vector<std::span<std::byte>> fresh;
  for (const ReadExtent& extent : extents) {
    if (extent.fresh) fresh.emplace_back(extent.address, extent.size_bytes);
  }
  AdviseHugePages(fresh);
  if (!pump_->direct()) fresh.clear();  // its threads fill the memory themselves and clear pages in parallel
  Status status;
  {
    const Prefault prefault(std::move(fresh));
    status = Run(extents, chunks);
  }
  if (!status.ok()) {
    Abandon();
    return status;
  }
  std::vector<uint32_t> crcs(extents.size(), 0);
  for (size_t i = 0; i < extents.size(); ++i) {
    std::vector<CrcPart>& parts = crc_parts_[i];
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.offset_bytes < b.offset_bytes; });
    for (const CrcPart& part : parts) crcs[i] = CombineCrc32(crcs[i], part.crc, part.size_bytes);
  }
  return crcs;
}

Status FileReader::Run(std::span<const ReadExtent> extents, std::span<const Chunk> chunks) {
  std::vector<IoPump::Finished> finished;
  size_t next = 0;
  while (next < chunks.size() || pump_->in_flight() > 0 || !copying_.empty()) {
    // With no read in flight, devices copy out of the missing buffers.
    for (bool wait = pump_->in_flight() == 0; !copying_.empty(); wait = false) {
      Result<bool> complete = CompleteFirst(wait);
      if (!complete.ok()) return complete.status();
      if (!complete.value()) break;
    }
    FP_RETURN_IF_ERROR(StartChunks(chunks, next));
    if (pump_->in_flight() == 0) continue;
    finished.clear();
    FP_RETURN_IF_ERROR(pump_->Collect(finished));
    for (const IoPump::Finished& request : finished) {
      FP_RETURN_IF_ERROR(Finish(extents, chunks, request.tag));
      // Requests come back together, and many are copied: the disk must not wait until all of these copies are made.
      FP_RETURN_IF_ERROR(StartChunks(chunks, next));
    }
  }
  return Status::Ok();
}

// Start chunks from `next` on, until the queue or the ring is full.
Status FileReader::StartChunks(std::span<const Chunk> chunks, size_t& next) {
  while (next < chunks.size() && pump_->in_flight() < pump_->queue_depth()) {
    const auto slot = std::find_if(in_flight_.begin(), in_flight_.end(), [](const auto& one) { return !one.used; });
    if (slot == in_flight_.end()) break;  // requests that came back are still to be copied
    const Chunk& chunk = chunks[next];
    std::byte* const buffer = chunk.straight == nullptr ? share_.Take() : nullptr;
    if (chunk.straight == nullptr && buffer == nullptr) break;  // all of ours are in use
    *slot = {.used = true, .buffer = buffer, .chunk = next++};
    const uint64_t size_bytes =
        buffer == nullptr ? chunk.needed_bytes : AlignUp(chunk.needed_bytes, pump_->block_bytes());
    FP_RETURN_IF_ERROR(pump_->Start({.op = IoOp::kRead,
                                     .buffer = buffer == nullptr ? chunk.straight : buffer,
                                     .size_bytes = static_cast<uint32_t>(size_bytes),
                                     .needed_bytes = static_cast<uint32_t>(chunk.needed_bytes),
                                     .offset_bytes = chunk.offset_bytes,
                                     .tag = static_cast<uint64_t>(slot - in_flight_.begin())}));
  }
  return Status::Ok();
}

// Like Deliver, from a buffer that no thread can read.
Status FileReader::DeliverFromDeviceRing(const ReadExtent& extent, uint64_t offset_in_extent, const std::byte* source,
                                         uint64_t size_bytes) {
  switch (extent.target) {
    case ReadExtent::Target::kDevice:
      CopiesOut(*extent.device);
      CopiesOut(device_ring_->device());
      return device_ring_->TakeDevice(*extent.device, extent.device_address + offset_in_extent, source, size_bytes);
    case ReadExtent::Target::kMemory:
      return device_ring_->TakeHost(extent.address + offset_in_extent, source, size_bytes);
    case ReadExtent::Target::kPush: {
      std::byte* const bounce = device_ring_->Bounce(size_bytes);
      FP_RETURN_IF_ERROR(device_ring_->TakeHost(bounce, source, size_bytes));
      return callbacks_.push(extent.id, offset_in_extent, bounce, size_bytes);
    }
    case ReadExtent::Target::kNone:
      return Status::Ok();
  }
  return Status::Ok();
}

// Note that a device copies out of the buffer being delivered.
void FileReader::CopiesOut(Device& device) {
  if (std::find(devices_.begin(), devices_.end(), &device) == devices_.end()) devices_.push_back(&device);
}

// Take back the first buffer out of which devices copy. Returns false if they still do. REQUIRES: there is one.
Result<bool> FileReader::CompleteFirst(bool wait) {
  const CopiedBuffer& first = copying_.front();
  for (const CopyMark& mark : first.marks) {
    if (wait) {
      FP_RETURN_IF_ERROR(mark.Wait([this] { return Poll(); }));
      continue;
    }
    Result<bool> reached = mark.IsComplete();
    if (!reached.ok() || !reached.value()) return reached;
  }
  share_.Put(first.buffer);
  copying_.pop_front();
  return true;
}

Status FileReader::Finish(std::span<const ReadExtent> extents, std::span<const Chunk> chunks, size_t tag) {
  const InFlight slot = std::exchange(in_flight_[tag], {});
  const Chunk& chunk = chunks[slot.chunk];
  if (slot.buffer != nullptr) {
    devices_.clear();
    Status status = Deliver(extents, chunk, slot.buffer);
    if (devices_.empty()) {
      share_.Put(slot.buffer);
      return status;
    }
    copying_.push_back({.buffer = slot.buffer, .marks = {}, .unmarked = {}});
    for (Device* device : devices_) {
      Result<CopyMark> mark = device->to_device().Mark();
      if (mark.ok()) {
        copying_.back().marks.push_back(std::move(mark).value());
      } else {
        copying_.back().unmarked.push_back(device);
        if (status.ok()) status = mark.status();
      }
    }
    return status;
  }
  const ReadExtent& extent = extents[chunk.first_extent];
  if (extent.with_crc) {
    crc_parts_[chunk.first_extent].push_back(
        {chunk.offset_bytes - extent.offset_bytes, chunk.needed_bytes, Crc32(0, chunk.straight, chunk.needed_bytes)});
  }
  return Status::Ok();
}

Status FileReader::Deliver(std::span<const ReadExtent> extents, const Chunk& chunk, const std::byte* buffer) {
  const uint64_t chunk_end = chunk.offset_bytes + chunk.needed_bytes;
  for (size_t i = chunk.first_extent; i < chunk.last_extent; ++i) {
    const ReadExtent& extent = extents[i];
    const uint64_t from = std::max(extent.offset_bytes, chunk.offset_bytes);
    const uint64_t until = std::min(extent.offset_bytes + extent.size_bytes, chunk_end);
    if (from >= until) continue;
    const std::byte* source = buffer + (from - chunk.offset_bytes);
    const uint64_t offset_in_extent = from - extent.offset_bytes;
    const uint64_t size_bytes = until - from;
    if (device_ring_.has_value()) {
      FP_RETURN_IF_ERROR(DeliverFromDeviceRing(extent, offset_in_extent, source, size_bytes));
      continue;
    }
    uint32_t crc = 0;
    if (extent.target == ReadExtent::Target::kMemory) {
      if (extent.with_crc) {
        crc = CopyWithCrc32(0, extent.address + offset_in_extent, source, size_bytes);
      } else {
        std::memcpy(extent.address + offset_in_extent, source, size_bytes);
      }
    } else {
      if (extent.with_crc) crc = Crc32(0, source, size_bytes);
      if (extent.target == ReadExtent::Target::kDevice) {
        share_.pool().PinWith(PinFor(*extent.device));
        const bool is_pinned = share_.pool().is_pinned(buffer);
        FP_RETURN_IF_ERROR(extent.device->to_device().AwaitRoom(is_pinned, [this] { return Poll(); }));
        CopiesOut(*extent.device);
        FP_RETURN_IF_ERROR(
            extent.device->to_device().ToDevice(extent.device_address + offset_in_extent, source, size_bytes));
      }
      if (extent.target == ReadExtent::Target::kPush) {
        FP_RETURN_IF_ERROR(callbacks_.push(extent.id, offset_in_extent, source, size_bytes));
      }
    }
    if (extent.with_crc) crc_parts_[i].push_back({offset_in_extent, size_bytes, crc});
  }
  return Status::Ok();
}

}  // namespace fastpersist
