// Rows kept in memory: slots of one slab, a directory from rows to slots, and the policy that decides which rows stay.
//
// The policy. A row that comes from the disk competes with the worst of a few slots, and is not kept if it is not
// better ("bypass"), so a scan empties no cache. A row is better if a request registered ahead will use it, the sooner
// the better; among other rows, if it was used more often. A slot counts its hits. Misses of rows that are not cached
// are counted in a hash table, where each cell belongs to the last row that missed there; an evicted row leaves its
// count in its cell. Counts are halved now and then, so rows once popular lose their rank. benchmarks/rows compares
// this with other policies, and with the optimal one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"

namespace fastpersist {

// The owner locks: any number of threads may call const members at once; calls of other members are exclusive.
class RowCache {
 public:
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  // Requests that are registered ahead are batches, numbered from 1 on. The coming uses of a row are a set of batches,
  // with one bit for each of the next 32.
  static constexpr uint32_t kWindow = 32;
  static uint32_t UseOf(uint32_t batch) { return uint32_t{1} << (batch % kWindow); }

  // `cache_bytes` covers rows and metadata; at most `row_count` rows are cached. kNoMemory if the kernel refuses.
  static Result<std::unique_ptr<RowCache>> Create(uint64_t cache_bytes, uint32_t row_bytes, uint64_t row_count);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  uint32_t slot_count() const { return slot_count_; }
  size_t size() const { return entries_.size(); }
  // If so, no row is ever evicted, and counts, coming uses and holds of single slots do not matter.
  bool HasSlotForEachRow() const { return slot_count_ == row_count_; }
  bool HasEachRow() const { return entries_.size() == row_count_; }

  // Three prefetch steps before a row is copied; each step needs the memory that the previous one has fetched.
  void Prefetch(uint64_t row) const {
    if (!directory_.empty()) __builtin_prefetch(&directory_[HomeOf(row)]);
  }
  void PrefetchEntry(uint64_t row) const {
    if (directory_.empty() || HasSlotForEachRow()) return;
    const uint32_t slot = directory_[HomeOf(row)];
    if (slot != kNoSlot) __builtin_prefetch(&entries_[slot], /*rw=*/1);  // a hit is noted there
  }
  void PrefetchBytes(uint32_t slot) const {
    const std::byte* const bytes = BytesOf(slot);  // the hardware prefetches the rest of a long row
    for (uint32_t at = 0; at < std::min(row_bytes_, kPrefetchedBytes); at += kLineBytes) __builtin_prefetch(bytes + at);
  }
  uint32_t Find(uint64_t row) const { return directory_.empty() ? kNoSlot : directory_[PlaceOf(row)]; }
  const std::byte* BytesOf(uint32_t slot) const { return slab_ + (uint64_t{slot} * row_bytes_); }
  // The memory of all slots, mapped by MapBuffers. The slots in use come first.
  std::span<std::byte> slab() const { return {slab_, slab_bytes_}; }
  // Threads may count at once; a lost count does not matter.
  void CountHit(uint32_t slot) const;

  // Add and end coming uses of a cached row. AddUse is for one caller at a time. EndUse, for rows of a batch that is
  // being read, is for any number of callers.
  void AddUse(uint32_t slot, uint32_t batch) { entries_[slot].uses |= UseOf(batch); }
  void EndUse(uint32_t slot, uint32_t batch) const;
  // Batches up to this one are being read or have been.
  void SetReadBatch(uint32_t batch) { read_batch_ = std::max(read_batch_, batch); }
  // Whether the use by a batch can be noted: 32 batches ahead can.
  bool KnowsBatch(uint32_t batch) const { return batch > read_batch_ && MayKnowBatch(batch); }
  // Whether uses by a batch may have been noted. The uses of a batch that was skipped are still noted; ending them may
  // also end uses of the batch kWindow later.
  bool MayKnowBatch(uint32_t batch) const { return batch <= read_batch_ + kWindow; }
  void Keep(uint32_t slot) { entries_[slot].count = kKeptCount; }
  // How many slots are kept; looks at all of them.
  uint32_t CountKept() const;
  bool IsKept(uint32_t slot) const {
    return std::atomic_ref(entries_[slot].count).load(std::memory_order_relaxed) == kKeptCount;
  }

  // A hold keeps the bytes of slots unchanged for readers without the owner's lock: rows are evicted only from other
  // slots. Any number of threads may hold slots at once.
  uint16_t BeginHold();
  void Hold(uint32_t slot) const;  // until all holds that have begun so far have ended
  void EndHold(uint16_t hold);

  struct Admission {
    std::byte* slot = nullptr;  // for the row's bytes; null: others are better
    uint64_t evicted_row = 0;
    uint32_t evicted_uses = 0;  // the coming uses of that row; 0 if none is known, or no row was evicted
  };
  // Find a slot for a row that is not cached and has these coming uses; the caller fills the slot. `keep`: the row may
  // evict any row that is not kept.
  Admission Admit(uint64_t row, uint32_t uses, bool keep);
  // Forget all rows.
  void Clear();

 private:
  struct Entry {
    uint64_t row = 0;
    mutable uint32_t uses = 0;  // uses to come
    mutable uint8_t count = 0;  // earlier uses
    mutable uint16_t hold = 0;  // the newest hold of the slot
  };
  static constexpr uint8_t kKeptCount = 255;
  static constexpr uint32_t kLineBytes = 64;
  static constexpr uint32_t kPrefetchedBytes = 512;
  struct Value {
    bool is_kept;
    int nearness;  // how near the next use is; 0: none is known
    uint8_t count;
    auto operator<=>(const Value&) const = default;
  };
  RowCache(std::byte* slab, uint64_t slab_bytes, uint32_t row_bytes, uint32_t slot_count, uint64_t row_count);

  // The directory has an entry for each row of the table if this takes no more memory than a hash table with linear
  // probing, at most half full and without tombstones. Otherwise it is such a hash table.
  bool HasPlaceForEachRow() const { return directory_.size() == row_count_; }
  size_t HomeOf(uint64_t row) const { return HasPlaceForEachRow() ? row : PlaceFor(HashOf(row), directory_.size()); }
  // Where the slot of a row is, or the free place where it would be.
  size_t PlaceOf(uint64_t row) const {
    size_t place = HomeOf(row);
    if (HasPlaceForEachRow()) return place;
    while (directory_[place] != kNoSlot && entries_[directory_[place]].row != row) place = Next(place);
    return place;
  }
  static uint64_t HashOf(uint64_t row) { return row * 0x9E3779B97F4A7C15U; }
  // Spread over `count` places by the high bits.
  static size_t PlaceFor(uint64_t hash, size_t count) {
    return static_cast<size_t>((static_cast<unsigned __int128>(hash) * count) >> 64);
  }
  size_t Next(size_t place) const { return place + 1 == directory_.size() ? 0 : place + 1; }
  void Erase(uint64_t row);

  Value ValueOf(uint32_t uses, uint8_t count) const;
  Value ValueOf(const Entry& entry) const { return ValueOf(entry.uses, entry.count); }
  uint32_t WorstOfSome();
  uint32_t FirstToEvict();
  // Whether slots with this hold number are held. An entry stores only its newest hold, so it stays held until all
  // earlier holds of the cache have ended, too.
  bool IsHeld(uint16_t hold) const { return !holds_.empty() && SinceFirst(hold) <= SinceFirst(last_hold_); }
  uint16_t SinceFirst(uint16_t hold) const { return static_cast<uint16_t>(hold - holds_.front()); }
  uint16_t& CellOf(uint64_t row);
  uint8_t CountMiss(uint64_t row);
  void Age();

  std::byte* const slab_;
  const uint64_t slab_bytes_;
  const uint32_t row_bytes_;
  const uint32_t slot_count_;
  const uint64_t row_count_;  // rows of the table
  const uint64_t fork_generation_;
  std::vector<uint32_t> directory_;  // slots
  std::vector<Entry> entries_;       // one for each slot in use; these are the first slots
  std::vector<uint16_t> cells_;      // the tag and the count of the last row that missed there
  uint64_t miss_count_ = 0;          // since counts were halved
  uint32_t all_kept_until_ = 0;      // the slots before it are kept
  uint32_t read_batch_ = 0;
  uint64_t draw_count_ = 0;
  std::vector<uint16_t> holds_;  // that have not ended, oldest first; numbers begin again after the last
  uint16_t last_hold_ = 0;
  uint16_t hold_of_clear_ = 0;  // the last hold before Clear, which forgets which slots were held
};

}  // namespace fastpersist
