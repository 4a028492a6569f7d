// What a forked child may touch. The kernel objects behind an engine (its ring, its completion queue, its threads) and
// the pages of the ring (MADV_DONTFORK) belong to the parent: a child that unmapped or closed through a copied object
// could hit something of its own. So owners remember the generation they were made in and do nothing in a later one;
// descriptors that must not outlive fork are registered here and closed in the child.
#pragma once

#include <cstdint>

namespace fastpersist {

// 0 in the process that loaded the module, one more in each fork below it. Async-signal-safe, thread-safe.
uint64_t ForkGeneration();

// A file descriptor that is closed in forked children. Thread-safe; at most 1024 at once, further ones are simply
// inherited (they are O_CLOEXEC, so exec still drops them).
void CloseInForkedChild(int fd);
void ForgetDescriptor(int fd);  // before closing it in this process

}  // namespace fastpersist
