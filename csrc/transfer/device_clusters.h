// Groups small sources that lie close together in a device's memory, since allocators place many tensors in the same 2
// MiB. One copy takes a cluster into the arena, including the gaps, which are not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "transfer/capture_ledger.h"

namespace fastpersist {

// Larger sources are copied alone: PCIe moves 256 KiB in about the time that starting one copy takes.
constexpr uint64_t kClusterSourceBytes = uint64_t{256} << 10;

struct ClusterSource {
  uint32_t index;
  Device* device;
  SourceKind kind;
  uintptr_t address;
  uint64_t size_bytes;
};

// Returns the clusters: at least two indexes each, of one kind, in one allocation of one device, at most one block of
// the arena long.
std::vector<std::vector<uint32_t>> FindDeviceClusters(std::vector<ClusterSource> sources);

}  // namespace fastpersist
