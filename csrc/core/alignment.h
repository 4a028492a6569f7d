// Rounds to powers of two. All of csrc rounds here, so overflows and off-by-one errors have one place to be tested.
#pragma once

#include <bit>
#include <cstdint>

#include "core/check.h"

namespace fastpersist {

inline uint64_t AlignDown(uint64_t value, uint64_t alignment) {
  FP_CHECK(std::has_single_bit(alignment));
  return value & ~(alignment - 1);
}

// Example: AlignUp(8193, 4096) == 12288, AlignUp(8192, 4096) == 8192. REQUIRES: the result fits 64 bits.
inline uint64_t AlignUp(uint64_t value, uint64_t alignment) { return AlignDown(value + (alignment - 1), alignment); }

inline bool IsAligned(uint64_t value, uint64_t alignment) { return AlignDown(value, alignment) == value; }

}  // namespace fastpersist
