// Reads properties of tensors by torch's C++ functions instead of Python's attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace fastpersist {

// Reading a Python attribute takes 25 to 60 ns, mostly to prepare for warnings and errors. The C++ function behind it
// takes 2 to 6 ns, and the processor starts the next call while it waits for memory.
//
// Building does not need torch, so its functions are looked up by name at run time: three C functions of its stable
// interface (torch/csrc/inductor/aoti_torch/c/shim.h), and four C++ functions, whose mangled names contain the types of
// their arguments. The offsets of other fields are found by comparing sample tensors with their Python attributes. If
// any result differs from Python's attributes on the samples, none of the functions is used.
//
// REQUIRES, of all calls: the object's type is torch.Tensor or Parameter, and the GIL is held. StorageOffset,
// StorageBytes and Strides: the tensor has storage and strides, as DenseTensors::Describe finds out; else torch prints
// an error.
class [[gnu::visibility("hidden")]] TorchFunctions {
 public:
  // Returns null if a function is missing, or disagrees with Python.
  //   library       the path of torch._C
  //   tensor        torch.Tensor
  //   storage       torch.UntypedStorage
  //   samples       plain tensors in host memory; at least one has backward hooks
  static std::shared_ptr<const TorchFunctions> Find(const std::string& library, const pybind11::object& tensor,
                                                    const pybind11::object& storage, const pybind11::list& samples);

  int64_t StorageOffset(PyObject* tensor) const {
    int64_t offset = 0;
    storage_offset_(HandleOf(tensor), &offset);
    return offset;
  }

  uint64_t StorageBytes(PyObject* tensor) const {
    int64_t size_bytes = 0;
    storage_bytes_(HandleOf(tensor), &size_bytes);
    return uint64_t(size_bytes);
  }

  // The strides, one for each dimension; the tensor owns the array.
  const int64_t* Strides(PyObject* tensor) const {
    int64_t* strides = nullptr;
    strides_(HandleOf(tensor), &strides);
    return strides;
  }

  // A number that identifies the dtype.
  int32_t DtypeNumber(PyObject* tensor) const {
    int32_t number = 0;
    dtype_(HandleOf(tensor), &number);
    return number;
  }

  bool IsNegative(PyObject* tensor) const { return is_negative_(HandleOf(tensor)); }
  bool RequiresGrad(PyObject* tensor) const { return requires_grad_(ImplOf(tensor)); }

  bool HasBackwardHooks(PyObject* tensor) const {
    return *reinterpret_cast<PyObject* const*>(reinterpret_cast<const char*>(tensor) + hooks_offset_) != nullptr;
  }

  // Returns the tensor's version; nothing if Python would raise an error, as for an inference tensor.
  std::optional<int64_t> Version(PyObject* tensor) const {
    try {
      return version_(HandleOf(tensor));
    } catch (...) {
      return std::nullopt;
    }
  }

  // The `_cdata` of the tensor's storage; 0 without a storage.
  uint64_t StorageKey(PyObject* tensor) const { return reinterpret_cast<uint64_t>(StorageOf(tensor)); }

  // Reads a word of each cache line that the other calls need, for many tensors: so the processor waits for the memory
  // of all of them at once, and not one after the other. A prefetch instruction would be dropped on a TLB miss.
  void Touch(std::span<PyObject* const> tensors) const;

  // Reads a word of a cache line, for the same reason.
  static void Read(const void* address) { static_cast<void>(*static_cast<const volatile char*>(address)); }

 private:
  using Handle = const void*;  // a C++ tensor by its address, which is what both kinds of functions take

  Handle HandleOf(PyObject* tensor) const { return reinterpret_cast<const char*>(tensor) + handle_offset_; }
  const void* ImplOf(PyObject* tensor) const { return *static_cast<void* const*>(HandleOf(tensor)); }
  const void* WordOfImpl(PyObject* tensor, size_t offset) const {
    return *reinterpret_cast<void* const*>(static_cast<const char*>(ImplOf(tensor)) + offset);
  }
  const void* StorageOf(PyObject* tensor) const { return WordOfImpl(tensor, storage_offset_in_tensor_); }

  bool FindPlaces(const pybind11::list& samples);
  bool AgreesWithPython(const pybind11::object& tensor, const pybind11::object& storage,
                        const pybind11::list& samples) const;

  size_t handle_offset_ = 0, hooks_offset_ = 0;                         // offsets in a Python tensor
  size_t storage_offset_in_tensor_ = 0, counter_offset_in_tensor_ = 0;  // offsets in a C++ tensor
  int32_t (*storage_offset_)(Handle, int64_t*) = nullptr;
  int32_t (*storage_bytes_)(Handle, int64_t*) = nullptr;
  int32_t (*strides_)(Handle, int64_t**) = nullptr;
  int32_t (*dtype_)(Handle, int32_t*) = nullptr;
  bool (*is_negative_)(Handle) = nullptr;
  bool (*requires_grad_)(const void* impl) = nullptr;
  int64_t (*version_)(Handle) = nullptr;
};

}  // namespace fastpersist
