// Status → Python exception, in one table. The classes are those of fastpersist/errors.py.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/status.h"

namespace fastpersist {

// Raise the exception that belongs to a Status. An exception that a hook left behind (kCancelled) goes through as it
// is. REQUIRES: the GIL is held, !status.ok().
[[noreturn]] void Throw(const Status& status, const std::string& path);

// A str from bytes of a path or a message that holds one: not every file name is UTF-8.
pybind11::str FileSystemText(const std::string& bytes);

inline void ThrowIfError(const Status& status, const std::string& path) {
  if (!status.ok()) Throw(status, path);
}

}  // namespace fastpersist
