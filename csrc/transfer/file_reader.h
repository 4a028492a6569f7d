// Bytes from a file to where they belong, through the ring: reads aligned chunks with the engine's queue full, and
// copies what was asked for out of each as it comes, whatever the alignment of file and memory, with the CRC computed
// in the same pass. Extents that lie close together share a chunk; what lies between them is read and dropped.
//
// With a buffered engine, whose bytes the kernel copies anyway, large extents go straight to their memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/buffer_pool.h"
#include "transfer/hooks.h"
#include "transfer/io_pump.h"

namespace fastpersist {

struct ReadExtent {
  enum class Target : uint8_t {
    kMemory,  // to `address`
    kPush,    // through the `push` hook as `id`
    kNone,    // nowhere: only the CRC is wanted
  };
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
  Target target = Target::kNone;
  std::byte* address = nullptr;
  uint64_t id = 0;
  bool with_crc = false;
  bool fresh = false;  // kMemory: nothing has touched this memory yet, so its pages may be prepared ahead
};

// One owner thread at a time.
class FileReader {
 public:
  static constexpr uint64_t kBlockBytes = 4096;
  // Reading over a gap up to this long is cheaper than another request (256 KiB is about 0.1 ms of a 2.5 GB/s disk).
  static constexpr uint64_t kGapBytes = 256 << 10;
  // Smaller extents are worth more together in one chunk than a request and no second copy each.
  static constexpr uint64_t kStraightBytes = 256 << 10;

  static Result<std::unique_ptr<FileReader>> Open(int fd, std::string path, PumpOptions options, BufferPool& pool,
                                                  TransferHooks hooks);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Read all extents; returns their CRCs (0 where none was asked for). REQUIRES: sorted by offset. They may overlap.
  // After an error, targets may be partly filled, and nothing of ours is in flight any more.
  Result<std::vector<uint32_t>> Read(std::span<const ReadExtent> extents);

  const IoPump& pump() const { return *pump_; }

 private:
  // A request: `needed_bytes` of the file, with the bytes of extents [first, last). Into a buffer of the ring, from an
  // aligned offset on; or, with `straight`, to where its one extent wants it.
  struct Chunk {
    uint64_t offset_bytes;
    uint64_t needed_bytes;
    size_t first_extent;
    size_t last_extent;
    std::byte* straight;
  };
  struct InFlight {
    bool used = false;
    std::byte* buffer = nullptr;  // of the ring; null for a straight chunk
    size_t chunk = 0;             // index into the chunks of the running Read
  };
  struct CrcPart {
    uint64_t offset_bytes;  // in the extent
    uint64_t size_bytes;
    uint32_t crc;
  };

  FileReader(std::unique_ptr<IoPump> pump, BufferShare share, TransferHooks hooks, size_t chunk_bytes);

  std::vector<Chunk> Cut(std::span<const ReadExtent> extents) const;
  Status Run(std::span<const ReadExtent> extents, std::span<const Chunk> chunks);
  Status Deliver(std::span<const ReadExtent> extents, const Chunk& chunk, const std::byte* buffer);
  Status Finish(std::span<const ReadExtent> extents, std::span<const Chunk> chunks, size_t tag);
  void Abandon();

  std::unique_ptr<IoPump> pump_;
  BufferShare share_;
  const TransferHooks hooks_;
  const size_t chunk_bytes_;
  std::vector<InFlight> in_flight_;              // by tag
  std::vector<std::vector<CrcPart>> crc_parts_;  // by extent, in the order the chunks came
};

}  // namespace fastpersist
