// Small sources that lie close together in a device's memory, where an allocator gives many tensors from the same
// 2 MiB: they go into the arena in one copy, and what lies between them is copied and ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "transfer/capture_ledger.h"

namespace fastpersist {

// Larger ones are copied on their own: a copy of 256 KiB takes PCIe about as long as starting it takes us.
constexpr uint64_t kClusterSourceBytes = uint64_t{256} << 10;

struct ClusterSource {
  uint32_t index;
  Device* device;
  SourceKind kind;
  uintptr_t address;
  uint64_t size_bytes;
};

// The clusters: each of at least two indexes, of one kind, in one allocation of one device, and no longer than a block
// of the arena.
std::vector<std::vector<uint32_t>> FindDeviceClusters(std::vector<ClusterSource> sources);

}  // namespace fastpersist
