#include "rows/table.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace fastpersist {

RowTable::RowTable(std::vector<RowPiece> pieces, uint32_t row_bytes, std::span<const int64_t> positions)
    : pieces_(std::move(pieces)), row_bytes_(row_bytes), positions_(positions) {
  FP_CHECK(row_bytes > 0);
  uint64_t row_count = 0;
  for (const RowPiece& piece : pieces_) {
    first_rows_.push_back(row_count);
    row_count += piece.row_count;
  }
  first_rows_.push_back(row_count);
  FP_CHECK(positions.empty() || positions.size() == row_count);
}

size_t RowTable::FirstBadId(std::span<const int64_t> ids) const {
  const uint64_t row_count = this->row_count();  // a negative id becomes a number above every count
  // Whole blocks first. A set sign bit shows an id that is negative or beyond the last row: the processor does several
  // subtractions at once, unlike 64-bit comparisons.
  constexpr size_t kBlock = 256;
  size_t first = 0;
  for (; first + kBlock <= ids.size(); first += kBlock) {
    uint64_t signs = 0;
    for (size_t i = first; i < first + kBlock; ++i) {
      const auto id = static_cast<uint64_t>(ids[i]);
      signs |= id | (row_count - 1 - id);
    }
    if (signs >> 63 != 0) break;
  }
  while (first < ids.size() && static_cast<uint64_t>(ids[first]) < row_count) ++first;
  return first;
}

int64_t RowTable::IdAt(uint64_t position) const {
  const auto wanted = static_cast<int64_t>(position);
  return positions_.empty() ? wanted : std::ranges::find(positions_, wanted) - positions_.begin();
}

RowPlace RowTable::PlaceOf(uint64_t position) const {
  size_t piece = 0;
  if (pieces_.size() > 1) {  // the last piece that begins at or before it; empty ones begin where the next one does
    piece = static_cast<size_t>(std::ranges::upper_bound(first_rows_, position) - first_rows_.begin()) - 1;
  }
  return {static_cast<uint32_t>(piece), pieces_[piece].offset_bytes + ((position - first_rows_[piece]) * row_bytes_)};
}

}  // namespace fastpersist
