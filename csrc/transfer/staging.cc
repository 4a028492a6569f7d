#include "transfer/staging.h"

#include <sys/mman.h>

#include <cerrno>

#include "core/alignment.h"
#include "core/check.h"
#include "core/fork.h"
#include "core/memory.h"

namespace fastpersist {

Staging::Staging(size_t capacity_bytes)
    : fork_generation_(ForkGeneration()), capacity_bytes_(AlignUp(capacity_bytes, kUnitBytes)) {}

Staging::~Staging() {
  if (memory_ != nullptr && fork_generation_ == ForkGeneration()) munmap(memory_, capacity_bytes_);
}

Status Staging::Prepare() {
  if (memory_ != nullptr) return Status::Ok();
  memory_ = MapBuffers(capacity_bytes_);
  if (memory_ != nullptr) return Status::Ok();
  return Status::FromErrno(errno, "mapping " + std::to_string(capacity_bytes_) + " bytes", "for staging");
}

std::byte* Staging::Take(size_t size_bytes) {
  FP_CHECK(memory_ != nullptr && size_bytes > 0);
  const size_t taken_bytes = AlignUp(size_bytes, kUnitBytes);
  size_t begin = 0;
  auto next = taken_.begin();
  for (; next != taken_.end() && next->first - begin < taken_bytes; ++next) begin = next->second;
  if (next == taken_.end() && (capacity_bytes_ < begin || capacity_bytes_ - begin < taken_bytes)) return nullptr;
  taken_.emplace_hint(next, begin, begin + taken_bytes);
  return memory_ + begin;
}

void Staging::Put(std::byte* piece) {
  const size_t erased_count = taken_.erase(static_cast<size_t>(piece - memory_));
  FP_CHECK(erased_count == 1);
}

}  // namespace fastpersist
