// Tables of rows for the tests of csrc/rows: files in which each byte says which row it belongs to and where in it.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "rows/table.h"
#include "testing.h"

namespace fastpersist {

// Byte `at` of the row at this position of a table.
inline std::byte RowByte(uint64_t position, uint64_t at) {
  return static_cast<std::byte>(((position * 0x9E3779B97F4A7C15U) + (at * 0x85EBCA6B) + 77) >> 29);
}

// Whether these bytes are the row at a position.
inline bool IsRow(const std::byte* bytes, uint64_t position, uint32_t row_bytes) {
  for (uint32_t at = 0; at < row_bytes; ++at) {
    if (bytes[at] != RowByte(position, at)) return false;
  }
  return true;
}

// A piece of a table before it is written: where its rows begin in the file, and how many there are.
struct PieceShape {
  uint64_t offset_bytes = 0;
  uint64_t row_count = 0;
};

// The files of a table, one for each piece, removed at the end.
class TableFiles {
 public:
  TableFiles(uint32_t row_bytes, const std::vector<PieceShape>& shapes) : row_bytes_(row_bytes) {
    uint64_t position = 0;
    for (const PieceShape& shape : shapes) {
      Bytes content(shape.offset_bytes + (shape.row_count * row_bytes), std::byte{0xEE});
      for (uint64_t row = 0; row < shape.row_count; ++row, ++position) {
        for (uint32_t at = 0; at < row_bytes; ++at) {
          content[shape.offset_bytes + (row * row_bytes) + at] = RowByte(position, at);
        }
      }
      static int file_count = 0;
      const std::string name = "rows-" + std::to_string(++file_count);
      files_.push_back(std::make_unique<ScratchFile>(name.c_str(), content));
      pieces_.push_back({files_.back()->fd(), files_.back()->path(), shape.offset_bytes, shape.row_count});
    }
    row_count_ = position;
  }

  RowTable Table(std::span<const int64_t> positions = {}) const { return {pieces_, row_bytes_, positions}; }
  uint32_t row_bytes() const { return row_bytes_; }
  uint64_t row_count() const { return row_count_; }
  const ScratchFile& file(size_t piece) const { return *files_[piece]; }

 private:
  const uint32_t row_bytes_;
  uint64_t row_count_ = 0;
  std::vector<std::unique_ptr<ScratchFile>> files_;
  std::vector<RowPiece> pieces_;
};

inline std::vector<int64_t> AllIds(uint64_t row_count) {
  std::vector<int64_t> ids(row_count);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

}  // namespace fastpersist
