#include "core/memory.h"

#include <sys/mman.h>

#include <cstdint>

#include "core/alignment.h"

namespace fastpersist {

void AdviseHugePages(std::byte* address, size_t size_bytes) {
  constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
  const auto start = reinterpret_cast<uintptr_t>(address);
  const uint64_t first = AlignUp(start, kHugePageBytes);
  const uint64_t last = AlignDown(start + size_bytes, kHugePageBytes);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace fastpersist
