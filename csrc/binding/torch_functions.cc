#include "binding/torch_functions.h"

#include <dlfcn.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "binding/tensor_questions.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

constexpr size_t kWord = sizeof(void*);
constexpr size_t kWordsOfTensor = 8;  // one of the first words of a C++ tensor is its storage
constexpr size_t kLine = 64;
constexpr size_t kTensorLines = 3, kStorageLines = 2;

uint64_t WordAt(const void* start, size_t offset) {
  uint64_t word = 0;
  std::memcpy(&word, static_cast<const char*>(start) + offset, kWord);
  return word;
}

// Returns the only offset below `end` at which every structure has its expected word.
std::optional<size_t> OffsetOf(const std::vector<std::pair<const void*, uint64_t>>& structures, size_t start,
                               size_t end) {
  std::optional<size_t> found;
  for (size_t offset = start; offset + kWord <= end; offset += kWord) {
    if (!std::ranges::all_of(structures, [&](const auto& each) { return WordAt(each.first, offset) == each.second; })) {
      continue;
    }
    if (found.has_value()) return std::nullopt;
    found = offset;
  }
  return found;
}

const void* ImplOfObject(const py::object& tensor) {
  return reinterpret_cast<const void*>(AsUnsigned(tensor.attr("_cdata")));
}

// Returns the only offset in a C++ tensor that holds the pointer to its version counter: detach() shares the counter,
// and `.data` has its own.
std::optional<size_t> OffsetOfCounter(const py::list& samples) {
  std::optional<size_t> found;
  for (size_t offset = kWord; offset < kWordsOfTensor * kWord; offset += kWord) {
    const bool is_counter = std::ranges::all_of(samples, [offset](const py::handle sample) {
      const py::object detached = sample.attr("detach")(), data = sample.attr("data");
      const uint64_t counter = WordAt(ImplOfObject(py::reinterpret_borrow<py::object>(sample)), offset);
      const uint64_t of_data = WordAt(ImplOfObject(data), offset);
      return counter != 0 && of_data != 0 && counter != of_data && counter == WordAt(ImplOfObject(detached), offset);
    });
    if (!is_counter) continue;
    if (found.has_value()) return std::nullopt;
    found = offset;
  }
  return found;
}

template <class Function>
bool FindFunction(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

std::shared_ptr<const TorchFunctions> TorchFunctions::Find(const std::string& library, const py::object& tensor,
                                                           const py::object& storage, const py::list& samples) {
  void* const opened = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // dlsym searches its dependencies, too
  if (opened == nullptr) return nullptr;
  auto found = std::make_shared<TorchFunctions>();
  const bool has_all = FindFunction(opened, "aoti_torch_get_storage_offset", found->storage_offset_) &&
                       FindFunction(opened, "aoti_torch_get_storage_size", found->storage_bytes_) &&
                       FindFunction(opened, "aoti_torch_get_strides", found->strides_) &&
                       FindFunction(opened, "aoti_torch_get_dtype", found->dtype_) &&
                       FindFunction(opened, "_ZN2at6native6is_negERKNS_6TensorE", found->is_negative_) &&
                       FindFunction(opened, "_ZNK3c1010TensorImpl13requires_gradEv", found->requires_grad_) &&
                       FindFunction(opened, "_ZNK2at10TensorBase8_versionEv", found->version_);
  bool is_right = false;
  try {
    is_right = has_all && found->FindPlaces(samples) && found->AgreesWithPython(tensor, storage, samples);
  } catch (const py::error_already_set& error) {  // a sample raises an error
    if (!error.matches(PyExc_Exception)) throw;
  }
  dlclose(opened);  // torch keeps it loaded
  return is_right ? found : nullptr;
}

bool TorchFunctions::FindPlaces(const py::list& samples) {
  if (samples.size() < 2) return false;
  std::vector<std::pair<const void*, uint64_t>> tensors, hooks, storages;
  size_t size_bytes = SIZE_MAX;
  for (const py::handle sample : samples) {
    const py::object of_sample = sample.attr("_backward_hooks");
    const uint64_t impl = AsUnsigned(sample.attr("_cdata"));
    tensors.emplace_back(sample.ptr(), impl);
    hooks.emplace_back(sample.ptr(), of_sample.is_none() ? 0 : reinterpret_cast<uint64_t>(of_sample.ptr()));
    storages.emplace_back(reinterpret_cast<const void*>(impl),
                          AsUnsigned(sample.attr("untyped_storage")().attr("_cdata")));
    size_bytes = std::min(size_bytes, size_t(Py_TYPE(sample.ptr())->tp_basicsize));
  }
  const auto handle = OffsetOf(tensors, sizeof(PyObject), size_bytes);
  const auto hook = OffsetOf(hooks, sizeof(PyObject), size_bytes);
  const auto storage = OffsetOf(storages, kWord, kWordsOfTensor * kWord);
  const auto counter = OffsetOfCounter(samples);
  if (!handle.has_value() || !hook.has_value() || !storage.has_value() || !counter.has_value()) return false;
  handle_offset_ = *handle;
  hooks_offset_ = *hook;
  storage_offset_in_tensor_ = *storage;
  counter_offset_in_tensor_ = *counter;
  return true;
}

bool TorchFunctions::AgreesWithPython(const py::object& tensor, const py::object& storage,
                                      const py::list& samples) const {
  const Asked strides(tensor, "stride"), offset(tensor, "storage_offset"), negative(tensor, "is_neg");
  const Asked grad(tensor, "requires_grad"), version(tensor, "_version"), dtype(tensor, "dtype");
  const Asked untyped(tensor, "untyped_storage"), bytes(storage, "nbytes"), key(storage, "_cdata");
  std::map<int32_t, PyObject*> dtypes;
  for (const py::handle sample : samples) {
    PyObject* const one = sample.ptr();
    const auto expected = strides.Of(one).cast<std::vector<int64_t>>();
    const int64_t* const found = Strides(one);
    const py::object its_storage = untyped.Of(one);
    if (!std::equal(expected.begin(), expected.end(), found) || StorageOffset(one) != offset.Of(one).cast<int64_t>() ||
        IsNegative(one) != negative.IsTrueOf(one) || RequiresGrad(one) != grad.IsTrueOf(one) ||
        Version(one) != version.Of(one).cast<int64_t>() ||
        StorageBytes(one) != AsUnsigned(bytes.Of(its_storage.ptr())) ||
        StorageKey(one) != AsUnsigned(key.Of(its_storage.ptr()))) {
      return false;
    }
    PyObject* const its_dtype = dtype.Of(one).ptr();  // torch keeps it
    if (dtypes.emplace(DtypeNumber(one), its_dtype).first->second != its_dtype) return false;
    if (std::ranges::count(dtypes, its_dtype, &std::pair<const int32_t, PyObject*>::second) != 1) return false;
  }
  return true;
}

void TorchFunctions::Touch(std::span<PyObject* const> tensors) const {
  for (PyObject* const tensor : tensors) Read(HandleOf(tensor));
  for (PyObject* const tensor : tensors) {
    for (size_t line = 0; line < kTensorLines; line++) Read(static_cast<const char*>(ImplOf(tensor)) + line * kLine);
  }
  for (PyObject* const tensor : tensors) {
    const auto* const storage = static_cast<const char*>(StorageOf(tensor));
    for (size_t line = 0; storage != nullptr && line < kStorageLines; line++) Read(storage + line * kLine);
  }
  for (PyObject* const tensor : tensors) {
    const void* const counter = WordOfImpl(tensor, counter_offset_in_tensor_);
    if (counter != nullptr) Read(counter);
  }
}

}  // namespace fastpersist
