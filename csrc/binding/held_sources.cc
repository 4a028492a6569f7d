// Finds which tensors hold the sources of a file, which sources belong to an owner (an optimizer), and whether one has
// changed since. Training waits for the answers, and a state may have many thousands of tensors, so no Python code runs
// for each tensor. fastpersist/saving/capture.py says what the answers are for.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "binding/address_table.h"
#include "binding/bindings.h"
#include "binding/column.h"
#include "binding/tensor_questions.h"
#include "binding/torch_functions.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

// The queries on tensors. Tensors of a subclass may answer in their own way.
class [[gnu::visibility("hidden")]] Questions {
 public:
  Questions(const py::type& tensor, py::type parameter, const py::type& storage,
            std::shared_ptr<const TorchFunctions> functions)
      : functions_(std::move(functions)),
        tensor_(tensor),
        parameter_(std::move(parameter)),
        version_(tensor, "_version"),
        untyped_storage_(tensor, "untyped_storage"),
        key_(storage, "_cdata"),
        address_(storage, "data_ptr"),
        size_(storage, "nbytes") {}

  bool IsPlain(PyObject* tensor) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    return type == tensor_.ptr() || type == parameter_.ptr();
  }

  // Returns a tensor's version; kNoVersion for an inference tensor, which has no counter.
  int64_t VersionOf(PyObject* tensor) const {
    if (!IsPlain(tensor)) return VersionSaid([&] { return py::handle(tensor).attr("_version"); });
    if (const auto version = functions_ != nullptr ? functions_->Version(tensor) : std::nullopt) return *version;
    return VersionSaid([&] { return version_.Of(tensor); });
  }

  // REQUIRES: IsPlain. For a tensor without a storage it returns 0, or raises NotImplementedError or RuntimeError.
  uint64_t KeyOf(PyObject* tensor) const {
    return functions_ != nullptr ? functions_->StorageKey(tensor)
                                 : AsUnsigned(key_.Of(untyped_storage_.Of(tensor).ptr()));
  }

  // Prefetches the memory of the plain tensors among the first kTouchCount; see TorchFunctions::Touch.
  void Touch(std::span<PyObject* const> tensors) const {
    if (functions_ == nullptr) return;
    std::array<PyObject*, kTouchCount> plain;
    size_t count = 0;
    for (PyObject* const tensor : tensors.first(std::min(kTouchCount, tensors.size()))) {
      if (IsPlain(tensor)) plain[count++] = tensor;
    }
    functions_->Touch(std::span(plain).first(count));
  }

  static constexpr size_t kTouchCount = 64;

  uint64_t AddressOf(PyObject* storage) const { return AsUnsigned(address_.Of(storage)); }
  uint64_t SizeOf(PyObject* storage) const { return AsUnsigned(size_.Of(storage)); }

 private:
  const std::shared_ptr<const TorchFunctions> functions_;  // null: Python's attributes are read
  const py::type tensor_, parameter_;
  const Asked version_, untyped_storage_, key_, address_, size_;
};

// The objects in a list, until it changes.
std::span<PyObject* const> ObjectsIn(const py::list& list) {
  return {reinterpret_cast<PyListObject*>(list.ptr())->ob_item, list.size()};
}

// Tensors with the sources that they hold, and their versions at one moment.
class [[gnu::visibility("hidden")]] Counters {
 public:
  explicit Counters(std::shared_ptr<const Questions> questions) : questions_(std::move(questions)) {}

  // Makes room for the tensors of a list; the list keeps them alive, and must not change any more.
  void Expect(const py::list& tensors) {
    lists_.push_back(tensors);
    const size_t count = tensors_.size() + tensors.size();
    tensors_.reserve(count);
    sources_.reserve(count);
    versions_.reserve(count);
  }

  void Add(PyObject* tensor, uint32_t source, int64_t version) {
    tensors_.push_back(tensor);
    sources_.push_back(source);
    versions_.push_back(version);
  }

  // Returns the sources that have changed since, in ascending order.
  std::vector<uint32_t> Changed() const {
    std::vector<uint32_t> found;
    for (size_t i = 0; i < versions_.size(); i++) {
      if (i % Questions::kTouchCount == 0) questions_->Touch(std::span(tensors_).subspan(i));
      if (questions_->VersionOf(tensors_[i]) != versions_[i]) found.push_back(sources_[i]);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

 private:
  const std::shared_ptr<const Questions> questions_;
  std::vector<py::list> lists_;  // hold the tensors
  std::vector<PyObject*> tensors_;
  std::vector<uint32_t> sources_;
  std::vector<int64_t> versions_;
};

// The addresses and sizes of the storages of some sources.
class [[gnu::visibility("hidden")]] Places {
 public:
  //   sources                           the sources to watch
  //   storages, addresses, sizes_bytes  of all sources; the list is not changed any more
  Places(std::shared_ptr<const Questions> questions, std::vector<uint32_t> sources, py::list storages,
         std::vector<uint64_t> addresses, std::vector<uint64_t> sizes_bytes)
      : questions_(std::move(questions)),
        sources_(std::move(sources)),
        storages_(std::move(storages)),
        addresses_(std::move(addresses)),
        sizes_bytes_(std::move(sizes_bytes)) {}

  // Returns a source whose storage now has another address or another length.
  std::optional<uint32_t> Moved() const {
    for (const uint32_t source : sources_) {
      PyObject* const storage = PyList_GET_ITEM(storages_.ptr(), Py_ssize_t(source));
      if (questions_->AddressOf(storage) != addresses_[source] || questions_->SizeOf(storage) != sizes_bytes_[source]) {
        return source;
      }
    }
    return std::nullopt;
  }

 private:
  const std::shared_ptr<const Questions> questions_;
  const std::vector<uint32_t> sources_;
  const py::list storages_;
  const std::vector<uint64_t> addresses_, sizes_bytes_;
};

// The sources that the tensors of an owner hold.
struct [[gnu::visibility("hidden")]] Owned {
  std::vector<uint32_t> sources;  // for each storage, its first source
  py::list others;                // tensors with such storages outside of the saved object
  std::vector<uint32_t> other_sources;
};

class [[gnu::visibility("hidden")]] HeldSources {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  HeldSources(Questions questions, const py::object& keys, py::list holders, const py::object& held,
              const py::object& versions)
      : questions_(std::make_shared<const Questions>(std::move(questions))),
        keys_(Column<uint64_t>(keys)),
        holders_(std::move(holders)),
        held_(Column<uint32_t>(held)),
        versions_(Column<int64_t>(versions)),
        next_(keys_.size(), kNone),
        first_holders_(keys_.size(), kNone) {
    if (holders_.size() != held_.size()) throw py::value_error("each holder holds one source");
    if (!versions_.empty() && versions_.size() != held_.size()) throw py::value_error("each holder has one count");
    first_of_key_.Expect(keys_.size());
    firsts_.reserve(keys_.size());
    for (uint32_t source = 0; source < keys_.size(); source++) {
      const auto [first, is_new] = first_of_key_.FindOrAdd(uintptr_t(keys_[source]), source);
      firsts_.push_back(first);
      if (!is_new) next_[source] = std::exchange(next_[first], source);
    }
    for (size_t i = held_.size(); i-- > 0;) {
      if (held_[i] >= keys_.size()) throw py::value_error("a holder holds a source that is not there");
      first_holders_[held_[i]] = uint32_t(i);
    }
  }

  // Returns the sources with a storage.
  std::vector<uint32_t> SourcesOf(uint64_t key) const {
    std::vector<uint32_t> found;
    const uint32_t* const first = first_of_key_.Find(uintptr_t(key));
    for (uint32_t source = first == nullptr ? kNone : *first; source != kNone; source = next_[source]) {
      found.push_back(source);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  // Finds what tensors hold.
  //   keys_of  returns the keys of the storages inside a tensor that is not plain
  Owned OwnedBy(const py::list& tensors, const py::function& keys_of) const {
    Owned owned;
    owned.sources.reserve(tensors.size());
    size_t next = 0;  // an object lists the state of an optimizer in the optimizer's order
    size_t touched_count = 0;
    for (size_t i = 0; i < tensors.size(); i++) {
      PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), Py_ssize_t(i));
      if (next < held_.size() && PyList_GET_ITEM(holders_.ptr(), Py_ssize_t(next)) == tensor) {
        owned.sources.push_back(firsts_[held_[next++]]);
        continue;
      }
      if (!questions_->IsPlain(tensor)) {
        for (const uint64_t key : keys_of(py::handle(tensor)).cast<std::vector<uint64_t>>()) Own(owned, tensor, key);
        continue;
      }
      if (i >= touched_count) {
        questions_->Touch(ObjectsIn(tensors).subspan(i));
        touched_count = i + Questions::kTouchCount;
      }
      if (const uint32_t source = Own(owned, tensor); source != kNone && first_holders_[source] != kNone) {
        next = first_holders_[source] + 1;
      }
    }
    return owned;
  }

  // Finds the sources with the storages of tensors, whose keys are known.
  Owned OwnedWith(const py::list& tensors, const py::object& keys) const {
    const std::vector<uint64_t> known = Column<uint64_t>(keys);
    if (tensors.size() != known.size()) throw py::value_error("each tensor has one key");
    Owned owned;
    for (size_t i = 0; i < known.size(); i++) Own(owned, PyList_GET_ITEM(tensors.ptr(), Py_ssize_t(i)), known[i]);
    return owned;
  }

  // Sets the kind of all sources that an owner holds.
  void Mark(const py::bytearray& kinds, const Owned& owned, uint8_t kind) const {
    uint8_t* const of_source = KindsIn(kinds);
    for (const uint32_t first : owned.sources) {
      for (uint32_t source = first; source != kNone; source = next_[source]) of_source[source] = kind;
    }
  }

  // Notes the versions of all tensors that hold sources of a kind: tensors of the object, and of owners. If a tensor
  // without a version counter holds a storage, the sources of that storage get another kind.
  std::unique_ptr<Counters> Watch(const py::bytearray& kinds, uint8_t kind, uint8_t kind_in_doubt,
                                  const std::vector<const Owned*>& owners) const {
    uint8_t* const of_source = KindsIn(kinds);
    auto counters = std::make_unique<Counters>(questions_);
    counters->Expect(holders_);
    for (const Owned* const owned : owners) counters->Expect(owned->others);
    std::vector<uint32_t> doubtful;
    const auto add = [&](PyObject* tensor, uint32_t source, int64_t version) {
      if (version == kNoVersion) {
        doubtful.push_back(source);
      } else {
        counters->Add(tensor, source, version);
      }
    };
    for (size_t i = 0; i < held_.size(); i++) {
      if (of_source[held_[i]] != kind) continue;
      PyObject* const tensor = PyList_GET_ITEM(holders_.ptr(), Py_ssize_t(i));
      add(tensor, held_[i], versions_.empty() ? questions_->VersionOf(tensor) : versions_[i]);
    }
    for (const Owned* const owned : owners) {
      for (size_t i = 0; i < owned->other_sources.size(); i++) {
        if (of_source[owned->other_sources[i]] != kind) continue;
        PyObject* const tensor = PyList_GET_ITEM(owned->others.ptr(), Py_ssize_t(i));
        add(tensor, owned->other_sources[i], questions_->VersionOf(tensor));
      }
    }
    if (doubtful.empty()) return counters;
    for (const uint32_t source : doubtful) {
      for (const uint32_t same : SourcesOf(keys_[source])) of_source[same] = kind_in_doubt;
    }
    return Watch(kinds, kind, kind_in_doubt, owners);
  }

  // Notes addresses and sizes of the storages of the sources of a kind.
  //   storages, addresses, sizes_bytes  of all sources
  std::unique_ptr<Places> PlacesOf(const py::bytearray& kinds, uint8_t kind, const py::list& storages,
                                   const py::object& addresses, const py::object& sizes_bytes) const {
    const uint8_t* const of_source = KindsIn(kinds);
    std::vector<uint64_t> all_addresses = Column<uint64_t>(addresses), all_sizes = Column<uint64_t>(sizes_bytes);
    if (storages.size() != keys_.size() || all_addresses.size() != keys_.size() || all_sizes.size() != keys_.size()) {
      throw py::value_error("each source has a storage, its address and its size");
    }
    std::vector<uint32_t> sources;
    sources.reserve(keys_.size());
    for (uint32_t source = 0; source < keys_.size(); source++) {
      if (of_source[source] == kind) sources.push_back(source);
    }
    return std::make_unique<Places>(questions_, std::move(sources), storages, std::move(all_addresses),
                                    std::move(all_sizes));
  }

 private:
  uint8_t* KindsIn(const py::bytearray& kinds) const {
    if (kinds.size() != keys_.size()) throw py::value_error("each source has a kind");
    return reinterpret_cast<uint8_t*>(PyByteArray_AS_STRING(kinds.ptr()));
  }

  // Returns the first source with the storage of a plain tensor, or kNone.
  uint32_t Own(Owned& owned, PyObject* tensor) const {
    try {
      return Own(owned, tensor, questions_->KeyOf(tensor));
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_RuntimeError)) throw;  // NotImplementedError is one
      return kNone;
    }
  }

  uint32_t Own(Owned& owned, PyObject* tensor, uint64_t key) const {
    const uint32_t* const source = first_of_key_.Find(uintptr_t(key));
    if (source == nullptr) return kNone;
    owned.sources.push_back(*source);
    const uint32_t holder = first_holders_[*source];
    if (holder == kNone || PyList_GET_ITEM(holders_.ptr(), Py_ssize_t(holder)) != tensor) {
      owned.others.append(py::handle(tensor));
      owned.other_sources.push_back(*source);
    }
    return *source;
  }

  const std::shared_ptr<const Questions> questions_;
  const std::vector<uint64_t> keys_;
  const py::list holders_;
  const std::vector<uint32_t> held_;
  const std::vector<int64_t> versions_;  // one for each holder; empty if they were not looked at
  AddressTable first_of_key_;            // the first source with a storage
  std::vector<uint32_t> firsts_;         // for each source, the first source with the same storage
  std::vector<uint32_t> next_;           // for each source, the next source with the same storage
  std::vector<uint32_t> first_holders_;  // for each source, its first holder
};

// Appends the tensors among the values of a dict and of its nested dicts, as ownership._add_tensors does.
//   add  add(value, found) for all other values
void AddTensors(const py::dict& values, py::list found, const py::type& tensor, const py::function& add) {
  const auto add_one = [&](PyObject* value) {
    PyTypeObject* const type = Py_TYPE(value);
    if (reinterpret_cast<PyObject*>(type) == tensor.ptr()) {
      found.append(py::handle(value));
    } else if (type != &PyFloat_Type && type != &PyLong_Type && type != &PyBool_Type && value != Py_None) {
      add(py::reinterpret_borrow<py::object>(value), found);
    }
  };
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(values.ptr(), &at, &key, &value) != 0;) {
    if (!PyDict_CheckExact(value)) {
      add_one(value);
      continue;
    }
    const py::object kept = py::reinterpret_borrow<py::object>(value);
    PyObject* inner = nullptr;
    for (Py_ssize_t inner_at = 0; PyDict_Next(kept.ptr(), &inner_at, &key, &inner) != 0;) add_one(inner);
  }
}

}  // namespace

void BindHeldSources(py::module_& m) {
  py::class_<Questions>(m, "TensorQuestions")
      .def(py::init<py::type, py::type, py::type, std::shared_ptr<const TorchFunctions>>(), py::arg("tensor"),
           py::arg("parameter"), py::arg("storage"), py::arg("functions") = py::none());
  m.def("add_tensors", &AddTensors, py::arg("values"), py::arg("found"), py::arg("tensor"), py::arg("add"));
  const py::class_<Owned> owned(m, "OwnedSources");
  py::class_<Counters>(m, "Counters").def("changed", &Counters::Changed);
  py::class_<Places>(m, "Places").def("moved", &Places::Moved);
  py::class_<HeldSources>(m, "HeldSources")
      .def(py::init<Questions, py::object, py::list, py::object, py::object>(), py::arg("questions"), py::arg("keys"),
           py::arg("holders"), py::arg("held"), py::arg("versions"))
      .def("sources_of", &HeldSources::SourcesOf, py::arg("key"))
      .def("owned_by", &HeldSources::OwnedBy, py::arg("tensors"), py::arg("keys_of"))
      .def("owned_with", &HeldSources::OwnedWith, py::arg("tensors"), py::arg("keys"))
      .def("mark", &HeldSources::Mark, py::arg("kinds"), py::arg("owned"), py::arg("kind"))
      .def("watch", &HeldSources::Watch, py::arg("kinds"), py::arg("kind"), py::arg("kind_in_doubt"), py::arg("owners"))
      .def("places", &HeldSources::PlacesOf, py::arg("kinds"), py::arg("kind"), py::arg("storages"),
           py::arg("addresses"), py::arg("sizes_bytes"));
}

}  // namespace fastpersist
