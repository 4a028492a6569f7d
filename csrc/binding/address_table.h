// A hash table that numbers addresses of objects or memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fastpersist {

// Addresses arrive roughly in the order of their allocation, so near addresses get near slots, which are in the cache
// already or are prefetched. If two runs of near addresses collide in a slot, their next slots are far apart, so two
// dense runs do not make a long search.
class AddressTable {
 public:
  // Makes room for so many addresses; more may come.
  void Expect(size_t count) {
    entries_.reserve(count);
    if (2 * count > slots_.size()) GrowTo(std::bit_ceil(2 * count));
  }

  // Returns the number of an address, or null.
  const uint32_t* Find(uintptr_t address) const {
    const Slot slot = slots_[IndexOf(slots_, address)];
    return slot.entry == 0 ? nullptr : &entries_[slot.entry - 1].number;
  }

  // Returns the number of an address, and whether it is new: then the address gets this number.
  std::pair<uint32_t, bool> FindOrAdd(uintptr_t address, uint32_t number) {
    Slot& slot = slots_[IndexOf(slots_, address)];
    if (slot.entry != 0) return {entries_[slot.entry - 1].number, false};
    entries_.push_back({address, number});
    slot = {uint32_t(entries_.size()), TagOf(address)};
    if (2 * entries_.size() > slots_.size()) GrowTo(4 * slots_.size());
    return {number, true};
  }

  size_t count() const { return entries_.size(); }

  template <class Visit>
  void ForEachAddress(Visit visit) const {
    for (const Entry& entry : entries_) visit(entry.address);
  }

 private:
  struct Entry {
    uintptr_t address;
    uint32_t number;
  };

  struct Slot {
    uint32_t entry;  // one more than its index; 0: none
    uint32_t tag;    // a tag of its address: entries of other addresses are not read
  };

  static constexpr size_t kLineSlots = 8;  // in a line of the processor's caches

  static uint64_t Mixed(uintptr_t address) { return address * 0x9E3779B97F4A7C15u; }
  static uint32_t TagOf(uintptr_t address) { return uint32_t(Mixed(address) >> 32); }

  // Returns the slot of an address, or the empty one that it would get.
  size_t IndexOf(const std::vector<Slot>& slots, uintptr_t address) const {
    constexpr uintptr_t kNear = 0xFFFC0;  // torch aligns its memory to 64 bytes
    const size_t mask = slots.size() - 1;
    const uint32_t tag = TagOf(address);
    size_t index = ((Mixed(address & ~kNear) >> 32) + ((address & kNear) >> 6)) & mask;
    while (true) {
      for (size_t i = 0; i < kLineSlots; i++) {
        const Slot& slot = slots[index];
        if (slot.entry == 0 || (slot.tag == tag && entries_[slot.entry - 1].address == address)) return index;
        index = (index & ~(kLineSlots - 1)) | ((index + 1) & (kLineSlots - 1));
      }
      index = (index + kLineSlots * (tag | 1)) & mask;  // odd, so it reaches all lines
    }
  }

  void GrowTo(size_t slot_count) {
    std::vector<Slot> larger(slot_count);
    for (size_t i = 0; i < entries_.size(); i++) {
      const uintptr_t address = entries_[i].address;
      larger[IndexOf(larger, address)] = {uint32_t(i + 1), TagOf(address)};
    }
    slots_ = std::move(larger);
  }

  std::vector<Entry> entries_;                         // in the order in which they came
  std::vector<Slot> slots_ = std::vector<Slot>(1024);  // a power of two, at most half of them used
};

}  // namespace fastpersist
