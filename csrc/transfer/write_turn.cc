#include "transfer/write_turn.h"

#include <utility>

#include "core/alignment.h"
#include "core/check.h"
#include "core/memory.h"

namespace fastpersist {

Result<bool> WriteTurn::TryEnter(bool alone) {
  if (lock_.held() && (is_leaving_ || lock_.alone() != alone || lock_.SomebodyWaits())) {
    is_leaving_ = has_writes();
    if (is_leaving_) return false;
    Leave();
  }
  Result<bool> entered = lock_.TryEnter(alone);
  is_locked_out_ = entered.ok() && !entered.value();
  return entered;
}

void WriteTurn::Begin(uint64_t from_bytes, uint64_t until_bytes) {
  ++write_count_;
  if (!lock_.alone()) return;
  const uint64_t page_bytes = PageBytes();
  dirty_.emplace_back(AlignDown(from_bytes, page_bytes), AlignUp(until_bytes, page_bytes));
}

void WriteTurn::End() {
  FP_CHECK(write_count_ > 0);
  --write_count_;
}

void WriteTurn::Leave() {
  FP_CHECK(!has_writes());
  Status status = lock_.WriteBack(dirty_);
  if (!status.ok() && write_back_error_.ok()) write_back_error_ = std::move(status);
  dirty_.clear();
  is_leaving_ = false;
  lock_.Leave();
}

}  // namespace fastpersist
