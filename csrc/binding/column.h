// Converts columns of numbers from Python, such as the addresses and sizes of a file's sources.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstring>
#include <vector>

namespace fastpersist {

// Returns the numbers of a Python column: an array of that type, or any sequence.
template <class Number>
std::vector<Number> Column(const pybind11::object& numbers) {
  if (!pybind11::isinstance<pybind11::buffer>(numbers)) return numbers.cast<std::vector<Number>>();
  const pybind11::buffer_info info = pybind11::reinterpret_borrow<pybind11::buffer>(numbers).request();
  if (info.itemsize != sizeof(Number) || info.ndim != 1 || info.strides[0] != info.itemsize) {
    throw pybind11::value_error("a column has numbers of another size");
  }
  std::vector<Number> found(size_t(info.size));
  if (!found.empty()) std::memcpy(found.data(), info.ptr, found.size() * sizeof(Number));
  return found;
}

}  // namespace fastpersist
