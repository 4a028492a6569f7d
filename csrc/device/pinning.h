// Pins the buffers of rings and arenas for a device; core/, which has them, knows no device.
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
