// Pinned memory of arenas that are gone, kept for those that come: to pin takes longer than to fill, so that who makes
// an arena for each save shall pin no more than who keeps one. There is no more of it than arenas have had at once. It
// goes back to the kernel when nobody has taken it for ten minutes, or when a device will pin no more.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fastpersist {

// A mapping (MapBuffers), and what keeps it known to a device.
struct PinnedMemory {
  std::byte* memory = nullptr;  // null: there is none
  size_t size_bytes = 0;
  std::shared_ptr<void> pinned = nullptr;
};

// All of these are thread-safe. A forked child has none of the parent's.

// REQUIRES: no device copies into it.
void KeepSpare(PinnedMemory memory);

// The smallest with so many bytes, else the largest.
PinnedMemory TakeSpare(size_t size_bytes);

uint64_t SpareBytes();

// Give all of it back; returns how much that was.
uint64_t ReleaseSpares();

// For tests.
void SetSpareLifetime(std::chrono::milliseconds lifetime);

// The device forgets the memory before it is gone.
void Unmap(PinnedMemory memory);

}  // namespace fastpersist
