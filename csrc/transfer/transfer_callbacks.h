// The callbacks of a transfer: they move tensor bytes that have no address in this process, and may stop the transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/status.h"

namespace fastpersist {

struct TransferCallbacks {
  // Copy bytes [offset_bytes, offset_bytes + size_bytes) of source `id` to `target`.
  std::function<Status(uint64_t id, uint64_t offset_bytes, std::byte* target, uint64_t size_bytes)> pull;
  // Take bytes [offset_bytes, offset_bytes + size_bytes) of destination `id` from `source`.
  std::function<Status(uint64_t id, uint64_t offset_bytes, const std::byte* source, uint64_t size_bytes)> push;
  // Keeps the destinations of a read alive, above all device memory. The transfer holds it while a device may still
  // copy there, which may be long after the read has failed. May be null.
  std::shared_ptr<const void> destinations;
  // Called about every 50 ms with the bytes done so far; its error stops the transfer.
  std::function<Status(uint64_t done_bytes)> poll;
};

}  // namespace fastpersist
