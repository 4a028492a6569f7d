#include "transfer/staging.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <tuple>

#include "core/alignment.h"
#include "core/check.h"
#include "core/fork.h"
#include "core/memory.h"

namespace fastpersist {
namespace {

struct Mapping {
  std::byte* memory;
  size_t size_bytes;
  uint64_t fork_generation;  // of the process that has it
};

// What the last file has left, if anything. An exchanged pointer and no lock: a fork may come at any time.
std::atomic<Mapping*> kept{nullptr};

// The mapping that was kept if it is large enough; it is kept no longer.
std::unique_ptr<Mapping> TakeKept(size_t size_bytes) {
  std::unique_ptr<Mapping> mapping(kept.exchange(nullptr));
  if (mapping == nullptr || mapping->fork_generation != ForkGeneration()) return nullptr;
  if (mapping->size_bytes >= size_bytes) return mapping;
  munmap(mapping->memory, mapping->size_bytes);
  return nullptr;
}

void KeepOrUnmap(std::unique_ptr<Mapping> mapping) {
  // Before others can have it.
  madvise(mapping->memory, mapping->size_bytes, MADV_FREE);  // only advice
  Mapping* expected = nullptr;
  if (kept.compare_exchange_strong(expected, mapping.get())) {
    std::ignore = mapping.release();
  } else {
    munmap(mapping->memory, mapping->size_bytes);
  }
}

}  // namespace

Staging::Staging(size_t capacity_bytes)
    : fork_generation_(ForkGeneration()), capacity_bytes_(AlignUp(capacity_bytes, kUnitBytes)) {}

Staging::~Staging() {
  if (memory_ == nullptr || fork_generation_ != ForkGeneration()) return;
  KeepOrUnmap(std::make_unique<Mapping>(
      Mapping{.memory = memory_, .size_bytes = mapped_bytes_, .fork_generation = fork_generation_}));
}

Status Staging::Prepare() {
  if (memory_ != nullptr) return Status::Ok();
  if (const std::unique_ptr<Mapping> mapping = TakeKept(capacity_bytes_); mapping != nullptr) {
    memory_ = mapping->memory;
    mapped_bytes_ = mapping->size_bytes;
    return Status::Ok();
  }
  memory_ = MapBuffers(capacity_bytes_);
  mapped_bytes_ = capacity_bytes_;
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
