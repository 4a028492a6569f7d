// Compares and summarizes arrays of every length around the sizes of vectors and blocks, at every alignment, flush
// against the end of their allocation: under the sanitizers, this finds reads beyond it. What the figures are beyond
// that, tests/unit/contents/ compares with torch.
#include "core/value_statistics.h"

#include <limits>

#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kCounts[] = {0, 1, 3, 4, 7, 8, 9, 31, 1023, 1024, 1025, 2051};

// `count` values of `bits`, at an address that is `shift` bytes behind an aligned one.
class Array {
 public:
  template <class Bits>
  Array(Bits bits, size_t count, size_t shift) : shift_(shift), bytes_(shift + count * sizeof(Bits)) {
    for (size_t index = 0; index < count; ++index) Set(index, bits);
  }
  template <class Bits>
  void Set(size_t index, Bits bits) {
    std::memcpy(bytes_.data() + shift_ + index * sizeof bits, &bits, sizeof bits);
  }
  const std::byte* data() const { return bytes_.data() + shift_; }

 private:
  size_t shift_;
  Bytes bytes_;
};

// `one`, `two` and `nan` are bits of these values.
template <class Bits>
void TypeOfEveryLength(ValueType type, Bits one, Bits two, Bits nan) {
  for (const size_t count : kCounts) {
    for (size_t shift = 0; shift < 9; ++shift) {
      Array a(one, count, shift);
      Array b(one, count, 8 - shift);
      EXPECT(CompareValues(type, a.data(), b.data(), count).differing_count == 0);
      if (count == 0) continue;
      b.Set(count - 1, two);
      const ValueDifference last = CompareValues(type, a.data(), b.data(), count);
      EXPECT(last.differing_count == 1 && last.max_abs == 1 && last.max_rel == 0.5);
      const ValueSummary summary = SummarizeValues(type, b.data(), count);
      EXPECT(summary.sum == double(count + 1) && summary.square_sum == double(count + 3) && summary.max == 2);
      EXPECT(summary.min == (count > 1 ? 1 : 2));
      a.Set(0, nan);
      const ValueDifference first = CompareValues(type, a.data(), b.data(), count);
      EXPECT(first.differing_count == (count > 1 ? 2 : 1) && first.nan_count_a == 1 && first.nan_count_b == 0);
      EXPECT(SummarizeValues(type, a.data(), count).nan_count == 1);
    }
  }
}

void TypesOfEveryLength() {
  TypeOfEveryLength<uint16_t>(ValueType::kFloat16, 0x3C00, 0x4000, 0xFE00);
  TypeOfEveryLength<uint16_t>(ValueType::kBFloat16, 0x3F80, 0x4000, 0x7F81);
  TypeOfEveryLength<float>(ValueType::kFloat32, 1, 2, std::numeric_limits<float>::quiet_NaN());
  TypeOfEveryLength<double>(ValueType::kFloat64, 1, 2, std::numeric_limits<double>::quiet_NaN());
}

void Overflow() {
  const float large = std::numeric_limits<float>::max();
  const ValueDifference singles =
      CompareValues(ValueType::kFloat32, Array(large, 9, 0).data(), Array(-large, 9, 0).data(), 9);
  EXPECT(singles.max_abs == 2 * double{large} && singles.max_rel == 2);
  const double larger = std::numeric_limits<double>::max();
  const ValueDifference doubles =
      CompareValues(ValueType::kFloat64, Array(larger, 9, 0).data(), Array(-larger, 9, 0).data(), 9);
  EXPECT(doubles.max_abs == larger && doubles.max_rel == 2);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv, {TEST(TypesOfEveryLength), TEST(Overflow)});
}
