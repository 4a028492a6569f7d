// Computes statistics of floating-point arrays, and the differences of two arrays, each in one pass at memory speed.
// The first use chooses between AVX2 and the architecture's baseline instructions.
//
// Everything here is thread-safe, and neither allocates nor fails. Any alignment is allowed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace fastpersist {

enum class ValueType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// The count is of elements whose bits differ. The largest differences are over elements that are finite in both arrays,
// in single precision (kFloat64: in double), or in double if single overflows. A difference too large for double
// becomes the largest finite double.
struct ValueDifference {
  uint64_t differing_count = 0;
  double max_abs = 0;  // the largest |a - b|
  double max_rel = 0;  // the largest |a - b| / max(|a|, |b|), where that is at least the smallest normal number
  uint64_t nan_count_a = 0;
  uint64_t nan_count_b = 0;
  uint64_t inf_count_a = 0;
  uint64_t inf_count_b = 0;
};

ValueDifference CompareValues(ValueType type, const std::byte* a, const std::byte* b, size_t count);

// NaN and infinities are counted, and left out of all other figures. The sums are in double precision.
struct ValueSummary {
  uint64_t nan_count = 0;
  uint64_t inf_count = 0;
  double min = std::numeric_limits<double>::infinity();  // min and max keep these values if no value is finite
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  double square_sum = 0;
};

ValueSummary SummarizeValues(ValueType type, const std::byte* values, size_t count);

}  // namespace fastpersist
