#include "transfer/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <memory>
#include <span>
#include <utility>

#include "core/alignment.h"
#include "core/check.h"
#include "core/fork.h"
#include "core/memory.h"
#include "core/pinned_cache.h"
#include "core/quarantine.h"
#include "core/reuse_cache.h"

namespace fastpersist {
namespace {

// A mapping for staging, and its registration with a device.
struct Mapping {
  explicit Mapping(PinnedMemory pinned_memory) : memory(std::move(pinned_memory)) {}
  ~Mapping() { Unmap(std::move(memory)); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  PinnedMemory memory;
};

// The mapping that the last closed file left, if any.
constinit ReuseCache<Mapping, 1> g_last_mapping;

// Take the last file's mapping if it is large enough. A smaller one is unmapped, since this file leaves a larger one.
PinnedMemory TakeLast(size_t size_bytes) {
  const std::unique_ptr<Mapping> last = g_last_mapping.Take([](const Mapping&) { return true; });
  return last != nullptr && last->memory.size_bytes >= size_bytes ? std::exchange(last->memory, {}) : PinnedMemory{};
}

void LeaveForNext(PinnedMemory memory) {
  // Before another file can take it. Only advice; the kernel cannot reclaim pinned pages.
  if (memory.pinned == nullptr) madvise(memory.memory, memory.size_bytes, MADV_FREE);
  g_last_mapping.Put(std::make_unique<Mapping>(std::move(memory)));
}

}  // namespace

Staging::Staging(size_t capacity_bytes, bool reuses)
    : fork_generation_(ForkGeneration()), capacity_bytes_(AlignUp(capacity_bytes, kUnitBytes)), reuses_(reuses) {}

Staging::~Staging() {
  if (memory_ == nullptr || fork_generation_ != ForkGeneration()) return;
  TakeBack();
  PinnedMemory mapping{.memory = memory_, .size_bytes = mapped_bytes_, .pinned = std::move(pinned_)};
  if (reuses_ && !has_quarantined()) {
    LeaveForNext(std::move(mapping));
    return;
  }
  quarantine_.Outlive(std::span(memory_, mapped_bytes_),
                      [ended = std::move(mapping)]() mutable { Unmap(std::move(ended)); });
}

Status Staging::Prepare() {
  if (memory_ != nullptr) return Status::Ok();
  if (PinnedMemory last = reuses_ ? TakeLast(capacity_bytes_) : PinnedMemory{}; last.memory != nullptr) {
    memory_ = last.memory;
    mapped_bytes_ = last.size_bytes;
    pinned_ = std::move(last.pinned);
    was_pinned_ = pinned_ != nullptr;
    touched_bytes_ = was_pinned_ ? mapped_bytes_ : 0;
    return Status::Ok();
  }
  memory_ = MapBuffers(capacity_bytes_);
  mapped_bytes_ = touched_bytes_ = capacity_bytes_;
  if (memory_ != nullptr) return Status::Ok();
  return Status::FromErrno(errno, "mapping " + std::to_string(capacity_bytes_) + " bytes", "for staging");
}

void Staging::PinWith(const Pin& pin) {
  FP_CHECK(memory_ != nullptr);
  if (std::exchange(was_pinned_, true)) return;
  TouchUntil(mapped_bytes_);
  pinned_ = pin(std::span(memory_, mapped_bytes_));
}

std::byte* Staging::Take(size_t size_bytes, size_t from_bytes) {
  FP_CHECK(memory_ != nullptr && size_bytes > 0);
  const size_t taken_bytes = AlignUp(size_bytes, kUnitBytes);
  size_t begin = AlignUp(from_bytes, kUnitBytes);
  auto next = taken_.lower_bound(begin);
  if (next != taken_.begin()) begin = std::max(begin, std::prev(next)->second);
  for (; next != taken_.end() && next->first - begin < taken_bytes; ++next) begin = next->second;
  if (next == taken_.end() && (capacity_bytes_ < begin || capacity_bytes_ - begin < taken_bytes)) return nullptr;
  taken_.emplace_hint(next, begin, begin + taken_bytes);
  TouchUntil(begin + taken_bytes);
  return memory_ + begin;
}

void Staging::TouchUntil(size_t end_bytes) {
  for (; touched_bytes_ < end_bytes; touched_bytes_ += kUnitBytes) {
    *const_cast<volatile std::byte*>(memory_ + touched_bytes_) = std::byte{0};
  }
}

void Staging::Put(std::byte* piece) {
  const size_t erased_count = taken_.erase(static_cast<size_t>(piece - memory_));
  FP_CHECK(erased_count == 1);
}

void Staging::PutInQuarantine(std::byte* piece, CopiesComplete complete) {
  quarantine_.Add(piece, std::move(complete));
}

void Staging::TakeBack() {
  for (std::byte* const piece : quarantine_.TakeComplete()) Put(piece);
}

}  // namespace fastpersist
