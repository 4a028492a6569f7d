// Memory whose owner is gone, but to which a device may still copy: kept until it does so no more. At the end of the
// process it is left as it is. Buffers whose owner lives wait there (BufferPool::Strand, Arena::Strand).
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "core/memory.h"

namespace fastpersist {

// Calls `release` once all of `landed` hold: from here or from a later call of this or of ReleaseFromLimbo, on the
// thread of that call. Nothing is called in a forked child, into which the memory did not come along. Thread-safe.
void LeaveInLimbo(std::vector<Landed> landed, std::function<void()> release);

// Release what can be; returns how much is left. For who begins or ends something that has to do with such memory.
size_t ReleaseFromLimbo();

}  // namespace fastpersist
