// Reads the small files of /proc and /sys. Not by streams of the C++ library: a module that has its own copy of it
// (-static-libstdc++, as compilers of older systems link) finds the facets of the other copy in the process, and
// crashes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fastpersist {

// All that the file says; nothing if it cannot be read.
std::string ReadKernelFile(const std::string& path);

// The decimal number that the file begins with; nullopt if it has none or cannot be read.
std::optional<int64_t> ReadKernelNumber(const std::string& path);

}  // namespace fastpersist
