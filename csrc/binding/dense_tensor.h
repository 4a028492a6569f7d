// Shape, strides and place of a tensor in one call: DLPack's C exchange API, which torch has since 2.10.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <span>

namespace fastpersist {

// DLPack's description of a tensor (https://dmlc.github.io/dlpack/latest/c_api.html); the tensor owns the arrays.
struct DenseTensor {
  void* data;
  int32_t device_kind;
  int32_t device_ordinal;
  int32_t dim_count;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  const int64_t* extents;
  const int64_t* strides_or_null;
  uint64_t byte_offset;

  static constexpr int32_t kHost = 1;
  static constexpr uint8_t kSignedInteger = 0, kComplex = 5;  // type codes

  std::span<const int64_t> shape() const { return {extents, size_t(dim_count)}; }

  // The strides, or null if DLPack does not define them, as for a tensor of one element.
  const int64_t* strides() const {
    return std::ranges::all_of(shape(), [](int64_t extent) { return extent > 1; }) ? strides_or_null : nullptr;
  }

  uint64_t ElementCount() const {
    uint64_t count = 1;
    for (const int64_t extent : shape()) count *= uint64_t(extent);
    return count;
  }

  // Whether the elements lie one after the other, in order of their indices.
  bool IsContiguous() const {
    int64_t expected = 1;
    for (int32_t dim = dim_count - 1; dim >= 0 && strides_or_null != nullptr; --dim) {
      if (extents[dim] != 1 && strides_or_null[dim] != expected) return false;
      expected *= extents[dim];
    }
    return true;
  }

  // The address of the first element; 0 if there is none.
  uintptr_t address() const { return data == nullptr ? 0 : reinterpret_cast<uintptr_t>(data) + uintptr_t(byte_offset); }
};

class [[gnu::visibility("hidden")]] DenseTensors {
 public:
  explicit DenseTensors(const pybind11::object& tensor_type) {
    const pybind11::object capsule = pybind11::getattr(tensor_type, "__dlpack_c_exchange_api__", pybind11::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return;
    const auto* const api = static_cast<const Api*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->major_version == 1) describe_ = api->describe;
  }

  // Describes a tensor; valid while the tensor lives. Returns false if this torch cannot describe tensors, or not this
  // one.
  bool Describe(PyObject* tensor, DenseTensor& found) const {
    if (describe_ == nullptr) return false;
    if (describe_(tensor, &found) == 0) return true;
    PyErr_Clear();
    return false;
  }

 private:
  struct Api {
    uint32_t major_version, minor_version;
    void* previous;
    void (*others[3])();
    int (*describe)(void* tensor, DenseTensor* found);
    void (*stream)();
  };

  int (*describe_)(void* tensor, DenseTensor* found) = nullptr;
};

}  // namespace fastpersist
