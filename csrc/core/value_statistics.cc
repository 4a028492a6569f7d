// Values are processed in blocks. If every value, or difference, of a block is finite, the block is processed with
// vector instructions. A block with NaN, infinities or an overflow, and the rest at the end, are processed one value at
// a time.
//
// Numbers without their sign are compared as integers: the order is the same, and infinities and NaN come last.
#include "core/value_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// It is about passing vectors between functions, and all of these are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

#define FP_INLINE __attribute__((always_inline)) inline

namespace fastpersist {
namespace {

constexpr size_t kBlockCount = 1024;  // fewer than the 32,767 that a lane of 16 bits can count
constexpr size_t kVectorBytes = 32;   // vectors of AVX2; the compiler makes poor code for longer ones

template <class Number, size_t lanes>
struct VectorOf {
  using Type __attribute__((vector_size(lanes * sizeof(Number)))) = Number;
};
template <class Number, size_t lanes>
using Vector = VectorOf<Number, lanes>::Type;

// The types of values: `Bits` is what is stored, `Real` what is calculated with, and `RealBits` an integer of its size.

struct Float32 {
  using Bits = int32_t;
  using Real = float;
  using RealBits = int32_t;
  template <size_t lanes>
  FP_INLINE static Vector<RealBits, lanes> Widened(const Vector<Bits, lanes>& bits) {
    return bits;
  }
};

struct Float64 {
  using Bits = int64_t;
  using Real = double;
  using RealBits = int64_t;
  template <size_t lanes>
  FP_INLINE static Vector<RealBits, lanes> Widened(const Vector<Bits, lanes>& bits) {
    return bits;
  }
};

struct BFloat16 {
  using Bits = int16_t;
  using Real = float;
  using RealBits = int32_t;
  template <size_t lanes>
  FP_INLINE static Vector<RealBits, lanes> Widened(const Vector<Bits, lanes>& bits) {
    return __builtin_convertvector(bits, Vector<RealBits, lanes>) << 16;
  }
};

struct Float16 {
  using Bits = int16_t;
  using Real = float;
  using RealBits = int32_t;
  // The exponent's bias is 15, and 127 in a float. A subnormal's leading one is implied and taken off again.
  template <size_t lanes>
  FP_INLINE static Vector<RealBits, lanes> Widened(const Vector<Bits, lanes>& bits) {
    constexpr RealBits kBias = (127 - 15) << 23;
    constexpr RealBits kExponent = 0x7C00 << 13;
    constexpr RealBits kSmallestNormal = kBias + (1 << 23);
    using Integers = Vector<RealBits, lanes>;
    using Reals = Vector<Real, lanes>;
    const Integers wide = __builtin_convertvector(bits, Integers);
    const Integers magnitude = (wide & 0x7FFF) << 13;
    const Integers exponent = magnitude & kExponent;
    const Integers finite = exponent == kExponent ? magnitude + 2 * kBias : magnitude + kBias;
    const Reals implied = __builtin_bit_cast(Reals, Integers{} + kSmallestNormal);
    const Reals subnormal = __builtin_bit_cast(Reals, magnitude + kSmallestNormal) - implied;
    return (exponent == 0 ? __builtin_bit_cast(Integers, subnormal) : finite) | (wide & 0x8000) << 16;
  }
};

template <class Format, size_t lanes>
struct Lanes {
  using Stored = Vector<typename Format::Bits, lanes>;
  using Reals = Vector<typename Format::Real, lanes>;
  using Integers = Vector<typename Format::RealBits, lanes>;
  static constexpr size_t kCount = lanes;

  FP_INLINE static Stored Load(const std::byte* values, size_t index) {
    Stored bits;
    std::memcpy(&bits, values + index * sizeof(typename Format::Bits), sizeof bits);
    return bits;
  }
  FP_INLINE static Reals Widened(const Stored& bits) {
    return __builtin_bit_cast(Reals, Format::template Widened<lanes>(bits));
  }
  FP_INLINE static Integers Magnitude(const Reals& values) {
    return __builtin_bit_cast(Integers, values) & std::numeric_limits<typename Format::RealBits>::max();
  }
  FP_INLINE static Integers Larger(const Integers& a, const Integers& b) { return a > b ? a : b; }
  // The largest of numbers that are given as their magnitudes; NaN if one is.
  FP_INLINE static Format::Real Largest(const Integers& magnitudes) {
    auto largest = magnitudes[0];
    for (size_t lane = 1; lane < lanes; ++lane) largest = std::max(largest, magnitudes[lane]);
    return __builtin_bit_cast(typename Format::Real, largest);
  }
};

template <class Format>
FP_INLINE Format::Real ValueAt(const std::byte* values, size_t index) {
  using One = Lanes<Format, 1>;
  return One::Widened(One::Load(values, index))[0];
}

// --- Two arrays ------------------------------------------------------------------------------------------------------

template <class Format>
using CompareLanes = Lanes<Format, kVectorBytes / sizeof(typename Format::Real)>;

template <class Format>
FP_INLINE void CompareOne(const std::byte* a, const std::byte* b, size_t index, ValueDifference& found) {
  using Real = Format::Real;
  using One = Lanes<Format, 1>;
  if (One::Load(a, index)[0] == One::Load(b, index)[0]) return;
  const Real x = ValueAt<Format>(a, index);
  const Real y = ValueAt<Format>(b, index);
  ++found.differing_count;
  found.nan_count_a += std::isnan(x) ? 1 : 0;
  found.nan_count_b += std::isnan(y) ? 1 : 0;
  found.inf_count_a += std::isinf(x) ? 1 : 0;
  found.inf_count_b += std::isinf(y) ? 1 : 0;
  if (!std::isfinite(x) || !std::isfinite(y)) return;
  const Real gap = std::abs(x - y);
  const Real scale = std::max({std::abs(x), std::abs(y), std::numeric_limits<Real>::min()});
  if (std::isfinite(gap)) {
    found.max_abs = std::max(found.max_abs, double{gap});
    found.max_rel = std::max(found.max_rel, double{gap / scale});
  } else {
    const double half = std::abs(double{x} / 2 - double{y} / 2);
    found.max_abs = std::max(found.max_abs, std::min(half * 2, std::numeric_limits<double>::max()));
    found.max_rel = std::max(found.max_rel, half / (double{scale} / 2));
  }
}

// REQUIRES: count <= kBlockCount, whole lanes. Returns whether all differences are finite; if not, nothing was noted.
template <class Format>
FP_INLINE bool CompareBlock(const std::byte* a, const std::byte* b, size_t count, ValueDifference& found) {
  using Many = CompareLanes<Format>;
  using Reals = Many::Reals;
  using Integers = Many::Integers;
  const auto smallest = __builtin_bit_cast(Integers, Reals{} + std::numeric_limits<typename Format::Real>::min());
  typename Many::Stored differing{};  // minus the count
  Integers largest_gap{};
  Integers largest_ratio{};
  for (size_t index = 0; index < count; index += Many::kCount) {
    const auto stored_a = Many::Load(a, index);
    const auto stored_b = Many::Load(b, index);
    differing += stored_a != stored_b;
    const auto x = Many::Widened(stored_a);
    const auto y = Many::Widened(stored_b);
    const auto gap = Many::Magnitude(x - y);
    const auto scale = Many::Larger(Many::Larger(Many::Magnitude(x), Many::Magnitude(y)), smallest);
    const Reals ratio = __builtin_bit_cast(Reals, gap) / __builtin_bit_cast(Reals, scale);
    largest_gap = Many::Larger(largest_gap, gap);
    largest_ratio = Many::Larger(largest_ratio, __builtin_bit_cast(Integers, ratio));
  }
  if (!std::isfinite(Many::Largest(largest_gap))) return false;
  for (size_t lane = 0; lane < Many::kCount; ++lane) found.differing_count -= uint64_t(int64_t{differing[lane]});
  found.max_abs = std::max(found.max_abs, double{Many::Largest(largest_gap)});
  found.max_rel = std::max(found.max_rel, double{Many::Largest(largest_ratio)});
  return true;
}

template <class Format>
FP_INLINE ValueDifference Compare(const std::byte* a, const std::byte* b, size_t count) {
  ValueDifference found;
  constexpr size_t kLanes = CompareLanes<Format>::kCount;
  size_t done = 0;
  while (count - done >= kLanes) {
    const size_t block = std::min(kBlockCount, (count - done) / kLanes * kLanes);
    const size_t from = done * sizeof(typename Format::Bits);
    const bool finite = CompareBlock<Format>(a + from, b + from, block, found);
    for (size_t end = done + block; done < end; ++done) {
      if (!finite) CompareOne<Format>(a, b, done, found);
    }
  }
  for (; done < count; ++done) CompareOne<Format>(a, b, done, found);
  return found;
}

// --- One array -------------------------------------------------------------------------------------------------------

template <class Format>
using SummaryLanes = Lanes<Format, kVectorBytes / sizeof(double)>;

template <class Format>
FP_INLINE void SummarizeOne(const std::byte* values, size_t index, ValueSummary& found) {
  const double value{ValueAt<Format>(values, index)};
  if (std::isnan(value)) {
    ++found.nan_count;
  } else if (std::isinf(value)) {
    ++found.inf_count;
  } else {
    found.min = std::min(found.min, value);
    found.max = std::max(found.max, value);
    found.sum += value;
    found.square_sum += value * value;
  }
}

// REQUIRES: as of CompareBlock. Returns whether all values are finite; if not, nothing was noted.
template <class Format>
FP_INLINE bool SummarizeBlock(const std::byte* values, size_t count, ValueSummary& found) {
  using Many = SummaryLanes<Format>;
  using Doubles = Vector<double, Many::kCount>;
  auto low = typename Many::Reals{} + std::numeric_limits<typename Format::Real>::infinity();
  auto high = -low;
  typename Many::Integers largest{};
  Doubles sum{};
  Doubles square_sum{};
  for (size_t index = 0; index < count; index += Many::kCount) {
    const auto value = Many::Widened(Many::Load(values, index));
    const Doubles wide = __builtin_convertvector(value, Doubles);
    largest = Many::Larger(largest, Many::Magnitude(value));
    low = value < low ? value : low;
    high = value > high ? value : high;
    sum += wide;
    square_sum += wide * wide;
  }
  if (!std::isfinite(Many::Largest(largest))) return false;
  for (size_t lane = 0; lane < Many::kCount; ++lane) {
    found.min = std::min(found.min, double{low[lane]});
    found.max = std::max(found.max, double{high[lane]});
    found.sum += sum[lane];
    found.square_sum += square_sum[lane];
  }
  return true;
}

template <class Format>
FP_INLINE ValueSummary Summarize(const std::byte* values, size_t count) {
  ValueSummary found;
  constexpr size_t kLanes = SummaryLanes<Format>::kCount;
  size_t done = 0;
  while (count - done >= kLanes) {
    const size_t block = std::min(kBlockCount, (count - done) / kLanes * kLanes);
    const bool finite = SummarizeBlock<Format>(values + done * sizeof(typename Format::Bits), block, found);
    for (size_t end = done + block; done < end; ++done) {
      if (!finite) SummarizeOne<Format>(values, done, found);
    }
  }
  for (; done < count; ++done) SummarizeOne<Format>(values, done, found);
  return found;
}

// --- For this CPU ----------------------------------------------------------------------------------------------------

template <class Format>
ValueDifference ComparePortable(const std::byte* a, const std::byte* b, size_t count) {
  return Compare<Format>(a, b, count);
}

template <class Format>
ValueSummary SummarizePortable(const std::byte* values, size_t count) {
  return Summarize<Format>(values, count);
}

#if defined(__x86_64__)

template <class Format>
__attribute__((target("avx2"))) ValueDifference CompareAvx2(const std::byte* a, const std::byte* b, size_t count) {
  return Compare<Format>(a, b, count);
}

template <class Format>
__attribute__((target("avx2"))) ValueSummary SummarizeAvx2(const std::byte* values, size_t count) {
  return Summarize<Format>(values, count);
}

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}

#else

template <class Format>
constexpr auto CompareAvx2 = ComparePortable<Format>;
template <class Format>
constexpr auto SummarizeAvx2 = SummarizePortable<Format>;
constexpr bool HasAvx2() { return false; }

#endif

template <class Use>
auto WithFormat(ValueType type, Use use) {
  switch (type) {
    case ValueType::kFloat16:
      return use(Float16{});
    case ValueType::kBFloat16:
      return use(BFloat16{});
    case ValueType::kFloat32:
      return use(Float32{});
    case ValueType::kFloat64:
      break;
  }
  return use(Float64{});
}

}  // namespace

ValueDifference CompareValues(ValueType type, const std::byte* a, const std::byte* b, size_t count) {
  return WithFormat(type, [&]<class Format>(Format) {
    return HasAvx2() ? CompareAvx2<Format>(a, b, count) : ComparePortable<Format>(a, b, count);
  });
}

ValueSummary SummarizeValues(ValueType type, const std::byte* values, size_t count) {
  return WithFormat(type, [&]<class Format>(Format) {
    return HasAvx2() ? SummarizeAvx2<Format>(values, count) : SummarizePortable<Format>(values, count);
  });
}

}  // namespace fastpersist
