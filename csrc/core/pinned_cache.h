// The cache of pinned memory: what ended arenas had pinned, for the arenas that follow. To pin memory takes longer than
// to fill it; with the cache, a program that makes an arena for each save pins no more than one that keeps its arena.
// The cache never holds more than arenas have had at once. It gives memory back to the kernel when no arena has taken
// it for ten minutes, or when a device refuses to pin more.
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

// The functions below are thread-safe. A forked child has a cache of its own, which is empty at first.

// REQUIRES: no device copies into the memory.
void PutInPinnedCache(PinnedMemory memory);

// The smallest mapping of at least this size, else the largest. Its memory is null where the cache is empty.
PinnedMemory TakeFromPinnedCache(size_t size_bytes);

uint64_t PinnedCacheBytes();

// Give all of it back to the kernel; returns how many bytes that was.
uint64_t EmptyPinnedCache();

// How long memory stays in the cache. For tests.
void SetPinnedCacheLifetime(std::chrono::milliseconds lifetime);

// The device forgets the memory, then the memory, if there is any, is unmapped.
void Unmap(PinnedMemory memory);

}  // namespace fastpersist
