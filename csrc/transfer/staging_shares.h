// Who gets how much of a file's staging memory: the host always finds a chunk, so none of its requests waits for a
// device; devices share the rest, and each direction of each leaves something to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "core/memory.h"
#include "core/status.h"
#include "transfer/request_pieces.h"
#include "transfer/staging.h"

namespace fastpersist {

// Not thread-safe: one owner.
class StagingShares {
 public:
  StagingShares(size_t capacity_bytes, uint64_t chunk_bytes, bool reuses)
      : staging_(capacity_bytes, reuses), chunk_bytes_(chunk_bytes) {}

  // kNoMemory when the memory cannot be had. Before the first Take.
  Status Prepare() { return staging_.Prepare(); }
  // Let a device know the memory, and take back what devices have left.
  void PrepareFor(Device& device);
  bool is_pinned() const { return staging_.is_pinned(); }

  // A place for a piece; null: none now.
  std::byte* TakeForHost(size_t size_bytes) { return staging_.Take(size_bytes); }
  // `spares_host`: the host stages, too (direct engines).
  std::byte* TakeForDevice(const RequestJob& job, size_t size_bytes, bool spares_host);
  // No place comes free by itself: all there are belong to devices that do not end their copies.
  bool is_held_up() const;

  // Give back the place of a piece.
  void Put(const RequestPiece& piece);
  // Instead of Put, where the device may still copy there, until `complete` holds.
  void PutInQuarantine(const RequestPiece& piece, CopiesComplete complete);

 private:
  void Account(const RequestPiece& piece);

  Staging staging_;
  const uint64_t chunk_bytes_;
  std::map<std::pair<const Device*, IoOp>, uint64_t> device_bytes_;  // taken, by device and direction
};

}  // namespace fastpersist
