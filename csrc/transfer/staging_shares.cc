#include "transfer/staging_shares.h"

#include <algorithm>
#include <utility>

#include "core/alignment.h"
#include "device/pinning.h"

namespace fastpersist {
namespace {

// One direction of a device may take up to this many times what remains free for all others.
constexpr uint64_t kShareOfRest = 4;

}  // namespace

void StagingShares::PrepareFor(Device& device) {
  staging_.PinWith(PinFor(device));
  staging_.TakeBack();
}

std::byte* StagingShares::TakeForDevice(const RequestJob& job, size_t size_bytes, bool spares_host) {
  const uint64_t of_host_bytes = spares_host ? AlignUp(chunk_bytes_, Staging::kUnitBytes) : 0;
  uint64_t rest_bytes = staging_.capacity_bytes() - of_host_bytes;
  for (const auto& [lane, bytes] : device_bytes_) rest_bytes -= std::min(bytes, rest_bytes);
  uint64_t& own_bytes = device_bytes_[{job.device(), job.request->op()}];
  const uint64_t taken_bytes = AlignUp(size_bytes, Staging::kUnitBytes);
  if (taken_bytes > rest_bytes) return nullptr;
  if (own_bytes > 0 && own_bytes + taken_bytes > kShareOfRest * (rest_bytes - taken_bytes)) return nullptr;
  std::byte* const staged = staging_.Take(size_bytes, of_host_bytes);
  if (staged != nullptr) own_bytes += taken_bytes;
  return staged;
}

bool StagingShares::is_held_up() const {
  return staging_.has_quarantined() &&
         std::all_of(device_bytes_.begin(), device_bytes_.end(), [](const auto& of) { return of.second == 0; });
}

void StagingShares::Account(const RequestPiece& piece) {
  if (piece.job->device() == nullptr) return;
  device_bytes_[{piece.job->device(), piece.job->request->op()}] -= piece.staged_bytes;
}

void StagingShares::Put(const RequestPiece& piece) {
  Account(piece);
  staging_.Put(piece.staged);
}

void StagingShares::PutInQuarantine(const RequestPiece& piece, CopiesComplete complete) {
  Account(piece);
  staging_.PutInQuarantine(piece.staged, std::move(complete));
}

}  // namespace fastpersist
