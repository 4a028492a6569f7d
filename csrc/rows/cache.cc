#include "rows/cache.h"

#include <algorithm>
#include <bit>
#include <string>

#include "core/check.h"
#include "core/fork.h"
#include "core/memory.h"

namespace fastpersist {
namespace {

// benchmarks/rows shows what other values would gain.
constexpr uint32_t kCandidateCount = 16;  // slots that a new row is compared with, next to each other
constexpr uint32_t kCellsPerSlot = 2;
constexpr uint64_t kAgeAfterPerSlot = 4;  // misses until counts are halved
constexpr uint8_t kCountMax = 15;         // the low bits of a cell; its tag is above

constexpr uint32_t kPlacesPerSlot = 2;  // the most places of the directory for each slot

uint16_t TagOf(uint64_t hash) { return static_cast<uint16_t>(hash & 0xfff0); }

// Make room in an empty vector, on huge pages, because look-ups are random.
template <class Value>
void ReserveHuge(std::vector<Value>& values, size_t count) {
  values.reserve(count);
  AdviseHugePages({{reinterpret_cast<std::byte*>(values.data()), count * sizeof(Value)}});
}

}  // namespace

RowCache::RowCache(std::byte* slab, uint64_t slab_bytes, uint32_t row_bytes, uint32_t slot_count, uint64_t row_count)
    : slab_(slab),
      slab_bytes_(slab_bytes),
      row_bytes_(row_bytes),
      slot_count_(slot_count),
      row_count_(row_count),
      fork_generation_(ForkGeneration()),
      cells_(uint64_t{slot_count} * kCellsPerSlot) {
  ReserveHuge(entries_, slot_count);
  const uint64_t place_count = std::min(uint64_t{slot_count} * kPlacesPerSlot, row_count);
  ReserveHuge(directory_, place_count);
  directory_.assign(place_count, kNoSlot);
}

RowCache::~RowCache() {
  if (slab_ != nullptr && fork_generation_ == ForkGeneration()) UnmapBuffers(slab_, slab_bytes_);
}

Result<std::unique_ptr<RowCache>> RowCache::Create(uint64_t cache_bytes, uint32_t row_bytes, uint64_t row_count) {
  constexpr uint64_t kMetadataBytes =
      sizeof(Entry) + (kPlacesPerSlot * sizeof(uint32_t)) + (kCellsPerSlot * sizeof(uint16_t));
  static_assert(kMetadataBytes == 28);
  const uint64_t slot_count =
      std::min({cache_bytes / (row_bytes + kMetadataBytes), row_count, uint64_t{kNoSlot} / kPlacesPerSlot});
  const uint64_t slab_bytes = slot_count * row_bytes;
  std::byte* const slab = slot_count == 0 ? nullptr : MapBuffers(slab_bytes);
  if (slot_count > 0 && slab == nullptr) {
    return Status::Error(StatusCode::kNoMemory, "no memory for a cache of " + std::to_string(cache_bytes) + " bytes");
  }
  return std::unique_ptr<RowCache>(
      new RowCache(slab, slab_bytes, row_bytes, static_cast<uint32_t>(slot_count), row_count));
}

// Later slots move into the hole if their homes are not behind it.
void RowCache::Erase(uint64_t row) {
  if (HasPlaceForEachRow()) {
    directory_[row] = kNoSlot;
    return;
  }
  const size_t count = directory_.size();
  size_t hole = PlaceOf(row);
  for (size_t next = Next(hole); directory_[next] != kNoSlot; next = Next(next)) {
    const size_t from_home = (next + count - HomeOf(entries_[directory_[next]].row)) % count;
    if (from_home < (next + count - hole) % count) continue;
    directory_[hole] = directory_[next];
    hole = next;
  }
  directory_[hole] = kNoSlot;
}

void RowCache::CountHit(uint32_t slot) const {
  const std::atomic_ref<uint8_t> count(entries_[slot].count);
  const uint8_t so_far = count.load(std::memory_order_relaxed);
  if (so_far < kCountMax) count.store(static_cast<uint8_t>(so_far + 1), std::memory_order_relaxed);
}

void RowCache::EndUse(uint32_t slot, uint32_t batch) const {
  const std::atomic_ref<uint32_t> uses(entries_[slot].uses);
  const uint32_t left = uses.load(std::memory_order_relaxed);
  // Two batches that are read at once may undo each other's change; the row then counts as wanted for one window
  // longer.
  if ((left & UseOf(batch)) != 0) uses.store(left & ~UseOf(batch), std::memory_order_relaxed);
}

uint16_t RowCache::BeginHold() {
  // If all numbers have begun since the oldest hold, this hold shares the newest number: the next number is the
  // oldest's.
  if (holds_.empty() || SinceFirst(last_hold_) < UINT16_MAX) ++last_hold_;
  holds_.push_back(last_hold_);
  return last_hold_;
}

void RowCache::Hold(uint32_t slot) const {
  if (HasSlotForEachRow()) return;  // after Clear no row is admitted while a hold lasts
  // No hold begins meanwhile, so all threads write the same number, and none undoes another's write.
  std::atomic_ref(entries_[slot].hold).store(last_hold_, std::memory_order_relaxed);
}

void RowCache::EndHold(uint16_t hold) { holds_.erase(std::ranges::find(holds_, hold)); }

RowCache::Value RowCache::ValueOf(uint32_t uses, uint8_t count) const {
  const int batches_until = std::countr_zero(std::rotr(uses, static_cast<int>((read_batch_ + 1) % kWindow)));
  return {count == kKeptCount, uses == 0 ? 0 : static_cast<int>(kWindow) - batches_until, count};
}

uint16_t& RowCache::CellOf(uint64_t row) { return cells_[PlaceFor(HashOf(row), cells_.size())]; }

uint8_t RowCache::CountMiss(uint64_t row) {
  if (++miss_count_ >= kAgeAfterPerSlot * slot_count_) Age();
  uint16_t& cell = CellOf(row);
  const int so_far = (cell & ~kCountMax) == TagOf(HashOf(row)) ? cell & kCountMax : 0;
  const auto count = static_cast<uint8_t>(std::min<int>(so_far + 1, kCountMax));
  cell = static_cast<uint16_t>(TagOf(HashOf(row)) | count);
  return count;
}

void RowCache::Age() {
  miss_count_ = 0;
  for (const Entry& entry : entries_) {
    if (entry.count != kKeptCount) entry.count = static_cast<uint8_t>(entry.count / 2);
  }
  for (uint16_t& cell : cells_) cell = static_cast<uint16_t>((cell & ~kCountMax) | ((cell & kCountMax) / 2));
}

// The worst of some slots that lie next to each other, so that their entries share cache lines; kNoSlot: all are held.
uint32_t RowCache::WorstOfSome() {
  auto slot = static_cast<uint32_t>(PlaceFor(HashOf(++draw_count_), slot_count_));  // the draws spread evenly
  uint32_t worst = kNoSlot;
  for (uint32_t i = 0; i < kCandidateCount; ++i) {
    const bool is_worse = worst == kNoSlot || ValueOf(entries_[slot]) < ValueOf(entries_[worst]);
    if (is_worse && !IsHeld(entries_[slot].hold)) worst = slot;
    slot = slot + 1 == slot_count_ ? 0 : slot + 1;
  }
  return worst;
}

// The first slot that is neither kept nor held; kNoSlot: there is none.
uint32_t RowCache::FirstToEvict() {
  const auto is_kept = [this](uint32_t slot) { return entries_[slot].count == kKeptCount; };
  while (all_kept_until_ < slot_count_ && is_kept(all_kept_until_)) ++all_kept_until_;
  uint32_t slot = all_kept_until_;
  while (slot < slot_count_ && (is_kept(slot) || IsHeld(entries_[slot].hold))) ++slot;
  return slot < slot_count_ ? slot : kNoSlot;
}

uint32_t RowCache::CountKept() const {
  return static_cast<uint32_t>(
      std::ranges::count_if(entries_, [](const Entry& entry) { return entry.count == kKeptCount; }));
}

RowCache::Admission RowCache::Admit(uint64_t row, uint32_t uses, bool keep) {
  if (slot_count_ == 0 || IsHeld(hold_of_clear_)) return {};
  Admission admission;
  const uint8_t count = keep ? kKeptCount : CountMiss(row);
  auto slot = static_cast<uint32_t>(entries_.size());
  if (slot < slot_count_) {
    entries_.push_back({});
  } else {
    slot = WorstOfSome();
    if (keep && (slot == kNoSlot || entries_[slot].count == kKeptCount)) slot = FirstToEvict();
    if (slot == kNoSlot) return {};
    const Entry& worst = entries_[slot];
    if (ValueOf(uses, count) <= ValueOf(worst)) return {};
    admission.evicted_row = worst.row;
    admission.evicted_uses = worst.uses;
    CellOf(worst.row) = static_cast<uint16_t>(TagOf(worst.row) | worst.count);
    Erase(worst.row);
  }
  directory_[PlaceOf(row)] = slot;
  entries_[slot] = {.row = row, .uses = uses, .count = count, .hold = entries_[slot].hold};
  admission.slot = slab_ + (uint64_t{slot} * row_bytes_);
  return admission;
}

void RowCache::Clear() {
  std::ranges::fill(directory_, kNoSlot);
  entries_.clear();
  all_kept_until_ = 0;
  hold_of_clear_ = last_hold_;
}

}  // namespace fastpersist
