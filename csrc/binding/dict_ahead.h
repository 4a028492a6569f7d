// Prefetches the memory of a dict's items before they are pickled.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <span>

#include "binding/torch_functions.h"

namespace fastpersist {

// Runs some items ahead of the pickler, and reads a word of each cache line that the pickler will need: of keys and
// values, of the entries of dicts among the values, and of the tensors in both. So the processor waits for the memory
// of many items at once; see TorchFunctions::Touch. REQUIRES: the dict outlives this object.
class [[gnu::visibility("hidden")]] DictAhead {
 public:
  struct Torch {
    PyObject* tensor;                 // torch.Tensor
    PyObject* parameter;              // torch.nn.Parameter
    const TorchFunctions* functions;  // null: nothing is read ahead
  };

  DictAhead(PyObject* dict, const Torch& torch)
      : dict_(torch.functions != nullptr && PyDict_GET_SIZE(dict) > kLeastCount ? dict : nullptr), torch_(torch) {}

  // To be called before each item.
  void Next() {
    if (dict_ != nullptr && left_-- == 0) ReadSome();
  }

 private:
  static constexpr Py_ssize_t kLeastCount = 8;
  static constexpr size_t kCount = 64;
  static constexpr size_t kInnerCount = 8;  // values of each dict among the values
  static constexpr size_t kLine = 64;

  void ReadSome() {
    std::array<PyObject*, kCount> keys, values;
    size_t count = 0;
    while (count < kCount && PyDict_Next(dict_, &position_, &keys[count], &values[count]) != 0) count++;
    left_ = count == 0 ? 0 : count - 1;
    for (size_t i = 0; i < count; i++) {
      TorchFunctions::Read(keys[i]);
      TorchFunctions::Read(values[i]);
    }
    for (PyObject* const value : std::span(values).first(count)) {
      if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) == 0) continue;
      const auto* const entries = reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(value)->ma_keys);
      TorchFunctions::Read(entries);
      TorchFunctions::Read(entries + kLine);
    }
    std::array<PyObject*, kCount * kInnerCount> found;
    size_t found_count = 0;
    for (PyObject* const value : std::span(values).first(count)) {
      if (!PyDict_CheckExact(value)) {
        found[found_count++] = value;
        continue;
      }
      const size_t end = found_count + kInnerCount;
      for (Py_ssize_t at = 0; found_count < end && PyDict_Next(value, &at, nullptr, &found[found_count]) != 0;) {
        found_count++;
      }
    }
    for (PyObject* const object : std::span(found).first(found_count)) TorchFunctions::Read(object);
    size_t tensor_count = 0;
    for (size_t i = 0; i < found_count; i++) {
      PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(found[i]));
      if (type == torch_.tensor || type == torch_.parameter) found[tensor_count++] = found[i];
    }
    torch_.functions->Touch(std::span(found).first(tensor_count));
  }

  PyObject* const dict_;  // null: it is too small
  const Torch& torch_;
  Py_ssize_t position_ = 0;
  size_t left_ = 0;  // items before the next ones are read
};

}  // namespace fastpersist
