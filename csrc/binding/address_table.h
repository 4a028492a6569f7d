// Numbers by address, of objects or of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fastpersist {

// The slots hold four bytes each, so that those of a hundred thousand addresses stay in the processor's caches.
class AddressTable {
 public:
  AddressTable() : slots_(1024) {}

  // Returns the number of an address, or null.
  const uint32_t* Find(uintptr_t address) const {
    const uint32_t entry = slots_[IndexOf(slots_, address)];
    return entry == 0 ? nullptr : &entries_[entry - 1].number;
  }

  // Returns the number of an address; gives it one if it has none. The second is whether it had none.
  std::pair<uint32_t, bool> FindOrAdd(uintptr_t address, uint32_t number) {
    size_t index = IndexOf(slots_, address);
    if (slots_[index] != 0) return {entries_[slots_[index] - 1].number, false};
    entries_.push_back({address, number});
    slots_[index] = uint32_t(entries_.size());
    if (2 * entries_.size() > slots_.size()) Grow();
    return {number, true};
  }

  template <class Visit>
  void ForEachAddress(Visit visit) const {
    for (const Entry& entry : entries_) visit(entry.address);
  }

 private:
  struct Entry {
    uintptr_t address;
    uint32_t number;
  };

  size_t IndexOf(const std::vector<uint32_t>& slots, uintptr_t address) const {
    const size_t mask = slots.size() - 1;
    size_t index = (address >> 4) * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (slots[index] != 0 && entries_[slots[index] - 1].address != address) index = (index + 1) & mask;
    return index;
  }

  void Grow() {
    std::vector<uint32_t> larger(4 * slots_.size());
    for (size_t i = 0; i < entries_.size(); i++) larger[IndexOf(larger, entries_[i].address)] = uint32_t(i + 1);
    slots_ = std::move(larger);
  }

  std::vector<Entry> entries_;   // in the order in which they came
  std::vector<uint32_t> slots_;  // one more than the index of an entry, or 0; a power of two, at most half of them used
};

}  // namespace fastpersist
