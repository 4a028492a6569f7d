// Where the rows of a table are: pieces of consecutive rows, each in a file, and an optional permutation from the
// callers' ids to the positions of the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fastpersist {

struct RowPiece {
  int fd = -1;  // the table's owner keeps it open
  std::string path;
  uint64_t offset_bytes = 0;  // the offset of its first row
  uint64_t row_count = 0;
};

struct RowPlace {
  uint32_t piece = 0;
  uint64_t offset_bytes = 0;
};

// Immutable, so thread-safe.
class RowTable {
 public:
  // `positions`, if not empty, gives the position of each id; every value is below the number of rows. It stays valid
  // as long as the table. REQUIRES: row_bytes > 0; offsets and ends fit off_t.
  RowTable(std::vector<RowPiece> pieces, uint32_t row_bytes, std::span<const int64_t> positions);

  const std::vector<RowPiece>& pieces() const { return pieces_; }
  uint32_t row_bytes() const { return row_bytes_; }
  uint64_t row_count() const { return first_rows_.back(); }

  // Returns the index of the first id that is no row of the table, or the number of ids.
  size_t FirstBadId(std::span<const int64_t> ids) const;
  // REQUIRES: the id is valid.
  uint64_t PositionOf(int64_t id) const {
    return static_cast<uint64_t>(positions_.empty() ? id : positions_[static_cast<size_t>(id)]);
  }
  // The id of the row at a position; looks at all ids if there is an order. REQUIRES: the position is below
  // row_count().
  int64_t IdAt(uint64_t position) const;
  // REQUIRES: the position is below row_count().
  RowPlace PlaceOf(uint64_t position) const;

 private:
  const std::vector<RowPiece> pieces_;
  const uint32_t row_bytes_;
  const std::span<const int64_t> positions_;
  std::vector<uint64_t> first_rows_;  // the first row of each piece; and the number of rows at the end
};

}  // namespace fastpersist
