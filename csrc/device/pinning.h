// Rings and arenas that a device knows: how core's buffers, which know no device, are pinned for one.
#pragma once

#include <string>

#include "core/memory.h"
#include "device/device.h"

namespace fastpersist {

// For BufferPool::PinWith and Arena::PinWith.
Pin PinFor(Device& device);

// Why memory of this process was not pinned, the last time it was refused; empty if it never was. Thread-safe.
std::string WhyNotPinned();

// How much memory of ours is pinned now. Thread-safe.
uint64_t PinnedBytes();

}  // namespace fastpersist
