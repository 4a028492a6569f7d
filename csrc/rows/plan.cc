#include "rows/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "core/alignment.h"
#include "core/check.h"

namespace fastpersist {
namespace {

constexpr int kDigitBits = 11;
constexpr size_t kDigitCount = size_t{1} << kDigitBits;
constexpr size_t kFewWants = 256;  // std::sort is faster for fewer

size_t DigitOf(uint64_t position, int shift) { return (position >> shift) & (kDigitCount - 1); }

}  // namespace

// A radix sort, least digit first: 300,000 wants of 8 million rows take three passes.
void SortByPosition(std::vector<RowWant>& wants) {
  const auto by_position = [](const RowWant& a, const RowWant& b) { return a.position < b.position; };
  if (wants.size() < kFewWants) {
    std::ranges::sort(wants, by_position);
    return;
  }
  uint64_t all_bits = 0;
  bool is_sorted = true;
  for (size_t i = 0; i < wants.size(); ++i) {
    all_bits |= wants[i].position;
    is_sorted = is_sorted && (i == 0 || wants[i - 1].position <= wants[i].position);
  }
  if (is_sorted) return;
  std::vector<RowWant> other(wants.size());
  for (int shift = 0; shift < static_cast<int>(std::bit_width(all_bits)); shift += kDigitBits) {
    std::array<size_t, kDigitCount> starts{};
    for (const RowWant& want : wants) ++starts[DigitOf(want.position, shift)];
    size_t start = 0;
    for (size_t& entry : starts) start += std::exchange(entry, start);
    for (const RowWant& want : wants) other[starts[DigitOf(want.position, shift)]++] = want;
    std::swap(wants, other);
  }
}

std::vector<RowRead> PlanReads(const RowTable& table, std::span<const RowWant> wants, const PlanLimits& limits) {
  FP_CHECK(wants.size() < UINT32_MAX);
  std::vector<RowRead> reads;
  reads.reserve(wants.size());
  for (size_t i = 0; i < wants.size(); ++i) {
    if (i > 0 && wants[i].position == wants[i - 1].position) {
      ++reads.back().want_count;
      continue;
    }
    const RowPlace place = table.PlaceOf(wants[i].position);
    const RowPiece& piece = table.pieces()[place.piece];
    const uint64_t rows_end = piece.offset_bytes + (piece.row_count * table.row_bytes());
    const uint64_t start = AlignDown(place.offset_bytes, limits.block_bytes);
    const uint64_t end = AlignUp(place.offset_bytes + table.row_bytes(), limits.block_bytes);
    const uint64_t needed_end = std::min(end, rows_end);
    if (!reads.empty()) {
      RowRead& last = reads.back();
      const uint64_t last_end = last.offset_bytes + last.size_bytes;
      const bool is_near = last.piece == place.piece && start <= last_end + limits.gap_bytes;
      // The limit also holds for rows that share a block: if every row straddles two blocks, all rows would otherwise
      // join one read.
      if (is_near && end - last.offset_bytes <= limits.read_bytes_max) {
        last.size_bytes = static_cast<uint32_t>(end - last.offset_bytes);
        last.needed_bytes = static_cast<uint32_t>(needed_end - last.offset_bytes);
        ++last.want_count;
        continue;
      }
    }
    reads.push_back({.offset_bytes = start,
                     .size_bytes = static_cast<uint32_t>(end - start),
                     .needed_bytes = static_cast<uint32_t>(needed_end - start),
                     .piece = place.piece,
                     .first_want = static_cast<uint32_t>(i),
                     .want_count = 1});
  }
  return reads;
}

}  // namespace fastpersist
