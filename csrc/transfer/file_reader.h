// Reads extents of a file through the ring to memory, devices or callbacks. It reads aligned chunks with the engine's
// queue full and copies the extents out of each chunk as it arrives, whatever their alignment, with the CRC computed in
// the same pass. Close extents share a chunk; the bytes between them are read and dropped.
//
// A device copies its own extents while the next chunks are read; Read returns when all copies are complete.
//
// Large extents go straight to their memory if they can: with a buffered engine, whose bytes the kernel copies anyway,
// all of them; with a direct one the whole pages of fresh memory, where memory and file are aligned alike. Then no copy
// takes processor time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/buffer_pool.h"
#include "core/memory.h"
#include "device/device.h"
#include "transfer/device_ring.h"
#include "transfer/io_pump.h"
#include "transfer/transfer_callbacks.h"

namespace fastpersist {

struct ReadExtent {
  enum class Target : uint8_t {
    kMemory,  // to `address`
    kDevice,  // to `device_address` in the memory of `device`
    kPush,    // through the `push` callback as `id`
    kNone,    // nowhere: only the CRC is wanted
  };
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
  Target target = Target::kNone;
  std::byte* address = nullptr;
  Device* device = nullptr;
  CudaAddress device_address = 0;
  uint64_t id = 0;
  bool with_crc = false;
  // kMemory: no code has touched this memory yet or touches it before Read returns, so its pages may be prepared ahead,
  // and a forked child needs none of them.
  bool fresh = false;
};

// One owner thread at a time.
class FileReader {
 public:
  // Reading a gap up to this long costs less than another request (256 KiB is about 0.1 ms of a 2.5 GB/s disk).
  static constexpr uint64_t kGapBytes = 256 << 10;
  // Smaller extents share a chunk: that saves more requests than the second copy costs.
  static constexpr uint64_t kStraightBytes = 256 << 10;

  // With a ring device, the pool's buffers are its memory, and no extent may ask for a CRC (kInvalidArgument).
  static Result<std::unique_ptr<FileReader>> Open(int fd, std::string path, PumpOptions options, BufferPool& pool,
                                                  TransferCallbacks callbacks, Device* ring_device = nullptr);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Read all extents and return their CRCs (0 without with_crc). After an error, targets may be partly filled, and none
  // of this reader's requests is in flight. Devices copy after the work that their to_device() streams were made to
  // follow: see CopyStream::FollowCaller. REQUIRES: sorted by offset; extents may overlap.
  Result<std::vector<uint32_t>> Read(std::span<const ReadExtent> extents);

  const IoPump& pump() const { return *pump_; }

 private:
  // A request: `needed_bytes` of the file, with the bytes of extents [first, last). It fills a ring buffer from an
  // aligned offset on, or, with `straight`, memory of its one extent.
  struct Chunk {
    uint64_t offset_bytes;
    uint64_t needed_bytes;
    size_t first_extent;
    size_t last_extent;
    std::byte* straight;
  };
  struct InFlight {
    bool used = false;
    std::byte* buffer = nullptr;  // a buffer of the ring; null for a straight chunk
    size_t chunk = 0;             // index into the chunks of the running Read
  };
  struct CrcPart {
    uint64_t offset_bytes;  // the offset in the extent
    uint64_t size_bytes;
    uint32_t crc;
  };

  FileReader(std::unique_ptr<IoPump> pump, BufferShare share, TransferCallbacks callbacks, size_t chunk_bytes,
             Device* ring_device);

  uint64_t StraightBytes(const ReadExtent& extent, WipedOnFork& wiped) const;
  std::vector<Chunk> Cut(std::span<const ReadExtent> extents, WipedOnFork& wiped) const;
  Status Run(std::span<const ReadExtent> extents, std::span<const Chunk> chunks);
  Status StartChunks(std::span<const Chunk> chunks, size_t& next);
  Status Deliver(std::span<const ReadExtent> extents, const Chunk& chunk, const std::byte* buffer);
  Status DeliverFromDeviceRing(const ReadExtent& extent, uint64_t offset_in_extent, const std::byte* source,
                               uint64_t size_bytes);
  void CopiesOut(Device& device);
  Status Finish(std::span<const ReadExtent> extents, std::span<const Chunk> chunks, size_t tag);
  Result<bool> CompleteFirst(bool wait);
  Status Poll();
  void Abandon();

  // Devices copy out of this buffer; it stays theirs until all marks are reached.
  struct CopiedBuffer {
    std::byte* buffer;
    std::vector<CopyMark> marks;
    std::vector<Device*> unmarked;  // copies without a mark: an error; Abandon waits for them otherwise
  };

  std::unique_ptr<IoPump> pump_;
  BufferShare share_;
  const TransferCallbacks callbacks_;
  const size_t chunk_bytes_;
  std::optional<DeviceRing> device_ring_;  // none: the buffers are host memory
  std::vector<InFlight> in_flight_;        // by tag
  bool is_short_of_buffers_ = false;
  std::deque<CopiedBuffer> copying_;             // in the order in which the copies were started
  std::vector<Device*> devices_;                 // devices that copy out of the buffer being delivered
  std::vector<std::vector<CrcPart>> crc_parts_;  // by extent, in the order the chunks came
};

}  // namespace fastpersist
