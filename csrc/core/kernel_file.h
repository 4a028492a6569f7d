// Reads the small files of /proc and /sys. It does not use C++ streams: a module with its own copy of the C++ library
// (-static-libstdc++, as compilers of older systems link) finds the facets of another copy in the process, and crashes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fastpersist {

// The content of the file; empty if it cannot be read.
std::string ReadKernelFile(const std::string& path);

// The decimal number that the file begins with; nullopt if it has none or cannot be read.
std::optional<int64_t> ReadKernelNumber(const std::string& path);

}  // namespace fastpersist
