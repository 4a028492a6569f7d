// Pins the buffers of rings and arenas for a device, because core/, which owns them, knows no device.
#pragma once

#include <string>

#include "core/memory.h"
#include "device/device.h"

namespace fastpersist {

// For BufferPool::PinWith and Arena::PinWith.
Pin PinFor(Device& device);

// Why pinning was refused the last time in this process; empty if it never was. Thread-safe.
std::string WhyNotPinned();

// How many bytes are pinned now. Thread-safe.
uint64_t PinnedBytes();

}  // namespace fastpersist
