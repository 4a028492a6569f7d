// Turns a Status into a Python exception, by one table. The classes are those of fastpersist/errors.py.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "core/status.h"

namespace fastpersist {

// Raise the exception for a Status; kCancelled raises the exception of the hook unchanged. REQUIRES: the GIL is held,
// !status.ok().
[[noreturn]] void Throw(const Status& status, const std::string& path);

// A str from the bytes of a path, or of a message with a path: not every file name is UTF-8.
pybind11::str FileSystemText(const std::string& bytes);
pybind11::list FileSystemTexts(const std::vector<std::string>& texts);

inline void ThrowIfError(const Status& status, const std::string& path) {
  if (!status.ok()) Throw(status, path);
}

}  // namespace fastpersist
