// Advice to the kernel about memory that is about to be filled.
#pragma once

#include <cstddef>

namespace fastpersist {

// Ask for huge pages under the whole huge pages inside [address, address + size_bytes): filling fresh memory then takes
// one fault per 2 MiB instead of 512. Only advice: nothing changes where it is refused, and no page is added at the
// ends.
void AdviseHugePages(std::byte* address, size_t size_bytes);

}  // namespace fastpersist
