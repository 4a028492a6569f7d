// From wanted rows to reads: sorts them, and joins rows whose blocks are the same or close into one read. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rows/table.h"

namespace fastpersist {

// A row that is not in memory, and where a request wants it.
struct RowWant {
  uint64_t position = 0;  // the row's position in the table
  uint64_t index = 0;     // the row's index in the result
};

// One read of whole blocks, and the sorted wants that it fills.
struct RowRead {
  uint64_t offset_bytes = 0;
  uint32_t size_bytes = 0;    // whole blocks; may extend beyond the end of the file
  uint32_t needed_bytes = 0;  // less than these only at the end of the table's rows
  uint32_t piece = 0;
  uint32_t first_want = 0;
  uint32_t want_count = 0;
};

struct PlanLimits {
  uint32_t block_bytes = 512;           // the block size of direct I/O: a power of two; 1 through the page cache
  uint32_t gap_bytes = 0;               // unwanted bytes between two rows that cost less than another read
  uint32_t read_bytes_max = 128 << 10;  // the largest joined read; a single row may be larger
};

void SortByPosition(std::vector<RowWant>& wants);

// REQUIRES: the wants are sorted, and fewer than 2^32.
std::vector<RowRead> PlanReads(const RowTable& table, std::span<const RowWant> wants, const PlanLimits& limits);

}  // namespace fastpersist
