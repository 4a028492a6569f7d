#include "transfer/capture_ledger.h"

#include <utility>

#include "core/check.h"

namespace fastpersist {
namespace {

size_t IndexOf(SourceKind kind) { return static_cast<size_t>(kind); }

}  // namespace

uint32_t CaptureLedger::Add(uint64_t size_bytes, SourceKind kind) {
  sources_.push_back(
      {.kind = kind, .size_bytes = size_bytes, .claimed_bytes = size_bytes, .copied_from_bytes = size_bytes});
  counts_.remaining_bytes[IndexOf(kind)] += size_bytes;
  total_bytes_ += size_bytes;
  return static_cast<uint32_t>(sources_.size() - 1);
}

void CaptureLedger::Narrow(uint32_t source_index, uint64_t from_bytes, uint64_t until_bytes) {
  Source& source = sources_[source_index];
  FP_CHECK(from_bytes <= until_bytes && until_bytes <= source.size_bytes);
  FP_CHECK(source.taken_bytes == 0 && source.leased_bytes == 0 && source.claimed_bytes == source.copied_from_bytes);
  const uint64_t size_bytes = until_bytes - from_bytes;
  const uint64_t live_bytes = std::clamp(source.claimed_bytes, from_bytes, until_bytes) - from_bytes;
  counts_.remaining_bytes[IndexOf(source.kind)] -= source.claimed_bytes - live_bytes;
  total_bytes_ -= source.size_bytes - size_bytes;
  source.size_bytes = size_bytes;
  source.claimed_bytes = live_bytes;
  source.copied_from_bytes = live_bytes;
}

void CaptureLedger::Claim(uint32_t source_index, uint64_t size_bytes) {
  Source& source = sources_[source_index];
  FP_CHECK(size_bytes <= source.live_bytes() && source.claimed_bytes == source.copied_from_bytes);
  source.claimed_bytes -= size_bytes;
}

void CaptureLedger::CompleteClaim(uint32_t source_index, bool by_capture) {
  Source& source = sources_[source_index];
  const uint64_t size_bytes = std::exchange(source.copied_from_bytes, source.claimed_bytes) - source.claimed_bytes;
  counts_.remaining_bytes[IndexOf(source.kind)] -= size_bytes;
  if (by_capture) counts_.copied_bytes[IndexOf(source.kind)] += size_bytes;
}

void CaptureLedger::Lease(uint32_t source_index, uint64_t size_bytes) {
  Source& source = sources_[source_index];
  FP_CHECK(source.leased_bytes == 0 && !source.is_front_copying());
  FP_CHECK(size_bytes <= (source.is_front_live() ? source.claimed_bytes : source.size_bytes) - source.taken_bytes);
  source.leased_bytes = size_bytes;
}

bool CaptureLedger::EndLease(uint32_t source_index) {
  Source& source = sources_[source_index];
  const bool was_live = source.is_front_live();
  const uint64_t size_bytes = std::exchange(source.leased_bytes, 0);
  source.taken_bytes += size_bytes;
  counts_.taken_bytes += size_bytes;
  if (was_live) counts_.remaining_bytes[IndexOf(source.kind)] -= size_bytes;
  return was_live;
}

}  // namespace fastpersist
