// The cache of pinned memory: ended arenas leave theirs, later arenas take it. Pinning takes longer than filling; with
// the cache, a program that makes an arena for each save pins no more than one that keeps its arena. The cache never
// holds more than arenas have had at once. It gives memory back to the kernel if no arena has taken it for ten minutes,
// or if a device refuses to pin more.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fastpersist {

// A mapping (MapBuffers), and the object that keeps it pinned.
struct PinnedMemory {
  std::byte* memory = nullptr;  // null: there is none
  size_t size_bytes = 0;
  std::shared_ptr<void> pinned = nullptr;
};

// The functions below are thread-safe. A forked child has a cache of its own, which is empty at first.

// REQUIRES: no device copies into the memory.
void PutInPinnedCache(PinnedMemory memory);

// Take the smallest mapping of at least this size, else the largest. Its memory is null if the cache is empty.
PinnedMemory TakeFromPinnedCache(size_t size_bytes);

uint64_t PinnedCacheBytes();

// Give all memory back to the kernel; returns its size in bytes.
uint64_t EmptyPinnedCache();

// How long memory stays in the cache. For tests.
void SetPinnedCacheLifetime(std::chrono::milliseconds lifetime);

// Unpin the memory, if there is any, then unmap it.
void Unmap(PinnedMemory memory);

}  // namespace fastpersist
