// Writes pieces to a file through the ring: fills one buffer after the other in file order, computes CRCs while the
// bytes are in the cache, and keeps the engine's queue full. The only place that cuts, coalesces and pads written
// bytes. A small piece costs a memcpy, not an I/O: ten thousand of them share a few chunks.
//
// A file may ask for larger blocks than the seeks of callers, such as 16 KiB where seeks go to multiples of 4 KiB. The
// writer reads the rest of a partly covered block from the file and writes it back unchanged.
//
// A device copies its own pieces. Several chunks fill at once then; when the copies into one are complete, the writer
// settles its CRCs and starts its write. In the same way copy threads (core/copy_threads.h) copy large pieces of memory
// where the disk waits for copies.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/buffer_pool.h"
#include "core/copy_threads.h"
#include "device/device.h"
#include "transfer/device_ring.h"
#include "transfer/io_pump.h"
#include "transfer/snapshot.h"
#include "transfer/transfer_callbacks.h"

namespace fastpersist {

// The pieces to write, in order. The caller keeps memory pieces alive and unchanged until Append has returned.
class PieceList {
 public:
  static constexpr uint32_t kNoCrc = UINT32_MAX;

  void AddBytes(std::string bytes);
  // crc_slot: this piece continues the CRC in that slot; kNoCrc: no CRC.
  void AddMemory(const std::byte* address, uint64_t size_bytes, uint32_t crc_slot);
  // A whole source of a snapshot, wherever its bytes are by then. The caller may change them: the snapshot protects
  // them.
  void AddCaptured(std::shared_ptr<Snapshot> snapshot, uint32_t source, uint64_t size_bytes, uint32_t crc_slot);
  // Bytes in a device's memory. Their copies into the ring are in flight beside each other and beside the writes.
  // Otherwise as AddMemory.
  void AddDevice(Device& device, CudaAddress address, uint64_t size_bytes, uint32_t crc_slot);
  // From the `pull` callback, in pieces of at most one chunk.
  void AddPulled(uint64_t id, uint64_t size_bytes, uint32_t crc_slot);
  // The four little-endian bytes of a slot's CRC at this piece.
  void AddCrc(uint32_t crc_slot);

  uint64_t size_bytes() const { return size_bytes_; }

 private:
  friend class FileWriter;
  enum class Kind : uint8_t { kBytes, kMemory, kDevice, kCaptured, kPulled, kCrc };
  struct Piece {
    Kind kind;
    uint32_t crc_slot;
    uint64_t size_bytes;
    const std::byte* address;
    uint64_t id;  // the id of a pull; the index of a captured source; the address in a device's memory
    Snapshot* snapshot;
    Device* device;
  };

  void Add(Kind kind, uint64_t size_bytes, uint32_t crc_slot, const std::byte* address, uint64_t id);

  std::vector<Piece> pieces_;
  std::deque<std::string> owned_;  // a deque: addresses stay
  std::vector<std::shared_ptr<Snapshot>> snapshots_;
  uint64_t size_bytes_ = 0;
};

// One owner thread at a time. The caller owns the descriptor, and the file's size, sync and name.
class FileWriter {
 public:
  // Every Seek goes to a multiple of this; the writer pads up to one.
  static constexpr uint64_t kBlockBytes = kBlockBytesMin;

  // With a ring device, the pool's buffers are its memory, and no piece may ask for a CRC (kInvalidArgument).
  static Result<std::unique_ptr<FileWriter>> Open(int fd, std::string path, PumpOptions options, BufferPool& pool,
                                                  TransferCallbacks callbacks, Device* ring_device = nullptr);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // Write pieces from the current position on. Returns when the last byte is in the ring, not when it is written. The
  // first error sticks: when it is returned, none of this writer's requests is in flight.
  Status Append(const PieceList& pieces);

  // Continue at another block. The last one is padded with zeros, so nothing may have been written between the old
  // position and the next multiple of kBlockBytes. The rest of larger blocks stays unchanged if no other code writes to
  // those blocks meanwhile.
  Status Seek(uint64_t offset_bytes);

  // Pad the last block and wait for every write. The file may then be longer than position(), by less than one of the
  // blocks that it asks for.
  Status Finish();

  // Wait until the kernel has released every buffer and give them back. Buffers into which a device still copies after
  // the grace time are quarantined. The writer is useless afterwards.
  void Abandon() { (void)Abort(Status::Error(StatusCode::kCancelled, "the writer was closed")); }

  uint64_t position() const { return chunk_.offset_bytes + chunk_.fill_bytes; }
  uint32_t crc(uint32_t slot) const { return slot < crcs_.size() ? crcs_[slot] : 0; }
  struct Run {  // bytes written without a Seek between them
    uint64_t offset_bytes;
    uint64_t size_bytes;
    uint32_t crc;
  };
  // The runs in the order written, one for every Seek. None if a piece had no CRC.
  std::optional<std::vector<Run>> runs() const;
  // Combine the CRCs of runs into that of the file's first size_bytes. None unless the runs cover these bytes exactly
  // once.
  static std::optional<uint32_t> CombineRuns(std::vector<Run> runs, uint64_t size_bytes);
  const IoPump& pump() const { return *pump_; }
  size_t copy_thread_count() const { return copy_threads_ == nullptr ? 0 : copy_threads_->thread_count(); }

 private:
  FileWriter(int fd, std::unique_ptr<IoPump> pump, BufferShare share, TransferCallbacks callbacks, size_t chunk_bytes,
             Device* ring_device);

  // A range of a chunk whose CRC is not settled yet: a device's copy into it, or into a range before it, is not
  // complete.
  struct Part {
    enum class Kind : uint8_t { kThere, kCopying, kCrcText };
    Kind kind;
    std::shared_ptr<CopyThreads::Copy> handed_over;  // kCopying: by a copy thread; null: by a device
    uint32_t crc_slot;
    uint32_t crc;         // kThere: of the bytes, if it is wanted
    uint32_t skip_bytes;  // kCrcText: how many of the slot's four bytes lie in the chunk before
    size_t offset_bytes;  // the offset in the chunk
    size_t size_bytes;
    size_t run;
  };
  struct Chunk {
    std::byte* buffer = nullptr;
    uint64_t offset_bytes = 0;
    size_t fill_bytes = 0;
    std::vector<Part> parts;
    std::vector<Device*> devices;  // that copy into it
    std::vector<CopyMark> marks;   // behind their copies, once the chunk is full
    bool has_handed_over = false;  // copy threads copy into it

    bool is_copying() const { return !devices.empty() || has_handed_over; }
  };

  Status EnsureBuffer();
  Status BeginBlock();
  Status EndBlock();
  Status ReadOldBytes(size_t from_bytes, size_t until_bytes);
  Status EndChunk();
  void PassOn();
  void AddCopyThreads();
  bool TryHandOver(const PieceList::Piece& piece, uint64_t done_bytes, Part& part);
  Status StartWrite(Chunk& chunk);
  Status MarkCopies(Chunk& chunk);
  Status AwaitCopies(Chunk& chunk);
  Result<bool> CompleteFirst(bool wait);
  Status WriteCopying();
  Status CompleteCopies();
  void SettleCrcs(Chunk& chunk);
  void Account(const Part& part);
  Status Collect(bool wait);
  Status Fill(const PieceList::Piece& piece);
  Result<Snapshot::Taken> Take(const PieceList::Piece& piece, uint64_t done_bytes, size_t size_limit_bytes, Part& part);
  Status CopyPart(const PieceList::Piece& piece, uint64_t done_bytes, size_t size_limit_bytes, Part& part);
  Status CopyToDeviceRing(const PieceList::Piece& piece, uint64_t done_bytes, size_t size_limit_bytes, Part& part);
  void CopiesInto(Device& device);
  Status CopyFromDevice(Device& device, CudaAddress address, Part& part);
  Status Poll();
  Status Abort(Status status);

  const int fd_;
  std::unique_ptr<IoPump> pump_;
  const uint64_t block_bytes_;      // the size that the file asks for, at least kBlockBytes
  std::byte* old_block_ = nullptr;  // a block as the file holds it; mapped at the first read
  BufferShare share_;
  const TransferCallbacks callbacks_;
  const size_t chunk_bytes_;
  std::optional<DeviceRing> device_ring_;  // none: the buffers are host memory
  const size_t copy_threads_max_;
  std::unique_ptr<CopyThreads> copy_threads_;  // null: the disk has not waited for copies
  uint32_t write_count_ = 0;                   // writes since this was last looked at
  uint32_t starved_count_ = 0;                 // how many of these writes had nothing else in flight
  std::vector<uint32_t> crcs_;
  std::vector<Run> runs_{{.offset_bytes = 0, .size_bytes = 0, .crc = 0}};
  bool every_piece_has_crc_ = true;
  std::vector<std::byte*> in_flight_;  // by tag; null: that tag is free
  std::vector<IoPump::Finished> finished_;
  Chunk chunk_;                // the one being filled
  std::deque<Chunk> copying_;  // full chunks with incomplete copies, in file order, which is the order of their writes
  Status failed_;
};

}  // namespace fastpersist
