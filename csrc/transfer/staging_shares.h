// Shares out a file's staging memory. The host always finds a chunk, so none of its requests waits for a device.
// Devices share the rest; each direction of each device leaves some to the others.
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

  // Map the memory. kNoMemory if the kernel refuses. Called before the first Take.
  Status Prepare() { return staging_.Prepare(); }
  // Pin the memory for a device, and take back the quarantined places whose copies are complete.
  void PrepareFor(Device& device);
  bool is_pinned() const { return staging_.is_pinned(); }

  // A place for a piece; null: none now.
  std::byte* TakeForHost(size_t size_bytes) { return staging_.Take(size_bytes); }
  // `spares_host`: leave a chunk to the host, which stages too (direct engines).
  std::byte* TakeForDevice(const RequestJob& job, size_t size_bytes, bool spares_host);
  // Whether only the quarantine can free a place: hung devices hold all that are taken.
  bool is_held_up() const;

  // Free the place of a piece.
  void Put(const RequestPiece& piece);
  // Instead of Put, if the device may still copy there until `complete` holds.
  void PutInQuarantine(const RequestPiece& piece, CopiesComplete complete);

 private:
  void Account(const RequestPiece& piece);

  Staging staging_;
  const uint64_t chunk_bytes_;
  std::map<std::pair<const Device*, IoOp>, uint64_t> device_bytes_;  // taken, by device and direction
};

}  // namespace fastpersist
