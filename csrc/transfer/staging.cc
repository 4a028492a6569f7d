#include "transfer/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <memory>
#include <span>
#include <tuple>
#include <utility>

#include "core/alignment.h"
#include "core/check.h"
#include "core/fork.h"
#include "core/limbo.h"
#include "core/memory.h"

namespace fastpersist {
namespace {

struct Mapping {
  std::byte* memory;
  size_t size_bytes;
  uint64_t fork_generation;  // of the process that has it
  std::shared_ptr<void> pinned;
};

// What the last file has left, if anything. An exchanged pointer and no lock: a fork may come at any time.
std::atomic<Mapping*> kept{nullptr};

void Unmap(Mapping& mapping) {
  mapping.pinned.reset();  // the device forgets it before it is gone
  UnmapBuffers(mapping.memory, mapping.size_bytes);
}

// The mapping that was kept if it is large enough; it is kept no longer.
std::unique_ptr<Mapping> TakeKept(size_t size_bytes) {
  std::unique_ptr<Mapping> mapping(kept.exchange(nullptr));
  if (mapping == nullptr || mapping->fork_generation != ForkGeneration()) return nullptr;
  if (mapping->size_bytes >= size_bytes) return mapping;
  Unmap(*mapping);
  return nullptr;
}

void KeepOrUnmap(std::unique_ptr<Mapping> mapping) {
  // Before others can have it. Only advice; and the kernel cannot take what a device knows.
  if (mapping->pinned == nullptr) madvise(mapping->memory, mapping->size_bytes, MADV_FREE);
  Mapping* expected = nullptr;
  if (kept.compare_exchange_strong(expected, mapping.get())) {
    std::ignore = mapping.release();
  } else {
    Unmap(*mapping);
  }
}

}  // namespace

Staging::Staging(size_t capacity_bytes, bool keeps)
    : fork_generation_(ForkGeneration()), capacity_bytes_(AlignUp(capacity_bytes, kUnitBytes)), keeps_(keeps) {}

Staging::~Staging() {
  if (memory_ == nullptr || fork_generation_ != ForkGeneration()) return;
  TakeBack();
  auto mapping = std::make_unique<Mapping>(Mapping{.memory = memory_,
                                                   .size_bytes = mapped_bytes_,
                                                   .fork_generation = fork_generation_,
                                                   .pinned = std::move(pinned_)});
  if (stranded_.empty()) {
    if (keeps_) {
      KeepOrUnmap(std::move(mapping));
    } else {
      Unmap(*mapping);
    }
    return;
  }
  std::vector<Landed> landed;
  landed.reserve(stranded_.size());
  for (Stranded& stranded : stranded_) landed.push_back(std::move(stranded.landed));
  LeaveInLimbo(std::move(landed), [shared = std::shared_ptr<Mapping>(std::move(mapping))] { Unmap(*shared); });
}

Status Staging::Prepare() {
  if (memory_ != nullptr) return Status::Ok();
  if (const std::unique_ptr<Mapping> mapping = keeps_ ? TakeKept(capacity_bytes_) : nullptr; mapping != nullptr) {
    memory_ = mapping->memory;
    mapped_bytes_ = mapping->size_bytes;
    pinned_ = std::move(mapping->pinned);
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

void Staging::Strand(std::byte* piece, Landed landed) {
  stranded_.push_back({.piece = piece, .landed = std::move(landed)});
}

void Staging::TakeBack() {
  std::erase_if(stranded_, [this](const Stranded& stranded) {
    if (!stranded.landed()) return false;
    Put(stranded.piece);
    return true;
  });
}

}  // namespace fastpersist
