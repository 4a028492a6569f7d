// CRC-32 as in zip, gzip and zlib (reflected polynomial 0xEDB88320), at memory speed: continued, fused with a copy, and
// combined. The first use chooses the best implementation that this CPU has. The formats decide where a CRC is stored.
//
// Everything here is thread-safe, and neither allocates nor fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fastpersist {

// Continue `crc`, the CRC of earlier bytes, with `data`; the CRC of no bytes is 0, so start with that.
// Crc32(0, "123456789", 9) == 0xCBF43926.
uint32_t Crc32(uint32_t crc, const std::byte* data, size_t size_bytes);

// memcpy and Crc32 in one pass. The CRC is of what was copied, not of a second look at `source`. Large copies bypass
// the cache where the CPU allows it, since a device, not this core, reads `target` next. Any alignment is allowed; the
// bytes before the target's first 64-byte border are copied slowly. REQUIRES: the ranges do not overlap.
uint32_t CopyWithCrc32(uint32_t crc, std::byte* target, const std::byte* source, size_t size_bytes);

// The CRC of two byte strings joined, from the CRC of each and the length of the second. O(log second_size_bytes).
uint32_t CombineCrc32(uint32_t first, uint32_t second, uint64_t second_size_bytes);

// One implementation; `function` has the contract of Crc32, `copy_function` that of CopyWithCrc32.
struct Crc32Variant {
  std::string_view name;  // "avx512-vpclmulqdq", "pclmulqdq", "armv8-crc" or "portable"
  uint32_t (*function)(uint32_t crc, const std::byte* data, size_t size_bytes);
  uint32_t (*copy_function)(uint32_t crc, std::byte* target, const std::byte* source, size_t size_bytes);
};

// The variants that this CPU can run, fastest first, "portable" last. For tests and benchmarks.
std::span<const Crc32Variant> Crc32Variants();

// The name of the variant that Crc32 and CopyWithCrc32 use.
std::string_view Crc32Implementation();

}  // namespace fastpersist
