// A hash map from 64-bit keys to small values, for the rows of a table: one array, so that a look-up is one cache miss,
// which Prefetch can hide.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/check.h"

namespace fastpersist {

// Open addressing with linear probing; an erased entry is closed up by moving later ones, so there are no tombstones.
// The largest key, kNoKey, cannot be used. Not thread-safe.
template <class Value>
class FlatMap {
 public:
  static constexpr uint64_t kNoKey = UINT64_MAX;
  struct Entry {
    uint64_t key = kNoKey;
    Value value{};
  };

  // Room for `count` entries without growing.
  explicit FlatMap(size_t count = 8) : entries_(EntryCountFor(count)) {}

  size_t size() const { return count_; }

  void Prefetch(uint64_t key) const { __builtin_prefetch(&entries_[HomeOf(key)]); }

  // Returns the value, or null; valid until the next Set or Erase.
  Value* Find(uint64_t key) {
    Entry& entry = entries_[PlaceOf(key)];
    return entry.key == key ? &entry.value : nullptr;
  }
  const Value* Find(uint64_t key) const {
    const Entry& entry = entries_[PlaceOf(key)];
    return entry.key == key ? &entry.value : nullptr;
  }

  void Set(uint64_t key, Value value) {
    FP_CHECK(key != kNoKey);
    Entry* entry = &entries_[PlaceOf(key)];
    if (entry->key == kNoKey) {
      if (2 * (count_ + 1) > entries_.size()) {
        Grow();
        entry = &entries_[PlaceOf(key)];
      }
      ++count_;
    }
    *entry = {key, value};
  }

  void Erase(uint64_t key) {
    size_t hole = PlaceOf(key);
    if (entries_[hole].key != key) return;
    --count_;
    // An entry moves into the hole unless its home lies after the hole.
    for (size_t next = Next(hole); entries_[next].key != kNoKey; next = Next(next)) {
      const size_t home = HomeOf(entries_[next].key);
      if (((next - home) & mask()) < ((next - hole) & mask())) continue;
      entries_[hole] = entries_[next];
      hole = next;
    }
    entries_[hole] = {};
  }

  void Clear() {
    entries_.assign(entries_.size(), {});
    count_ = 0;
  }

 private:
  static size_t EntryCountFor(size_t count) { return std::bit_ceil((2 * count) + 2); }  // at least half are free
  size_t mask() const { return entries_.size() - 1; }
  size_t Next(size_t place) const { return (place + 1) & mask(); }
  // Fibonacci hashing: neighbouring keys spread over the whole array.
  size_t HomeOf(uint64_t key) const {
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15U) >> (64 - std::countr_zero(entries_.size())));
  }
  // Where the key is, or the free entry where it would be.
  size_t PlaceOf(uint64_t key) const {
    size_t place = HomeOf(key);
    while (entries_[place].key != key && entries_[place].key != kNoKey) place = Next(place);
    return place;
  }
  void Grow() {
    std::vector<Entry> old(2 * entries_.size());
    std::swap(old, entries_);
    for (const Entry& entry : old) {
      if (entry.key != kNoKey) entries_[PlaceOf(entry.key)] = entry;
    }
  }

  std::vector<Entry> entries_;
  size_t count_ = 0;
};

}  // namespace fastpersist
