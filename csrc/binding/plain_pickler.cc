#include "binding/plain_pickler.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "binding/address_table.h"
#include "binding/dense_tensor.h"
#include "binding/dict_ahead.h"
#include "binding/pickle_output.h"
#include "binding/tensor_questions.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

// Thrown if the object holds something that only Python's pickler can write.
struct NotPlain : std::exception {};

constexpr int kBatchCount = 1000;      // items after one MARK
constexpr int kDeepest = 1500;         // levels; for more, Python's pickler needs less stack
constexpr size_t kManyStorages = 512;  // from so many on, the pickle is expected to be about as large as the last ones

PyObject* Interned(const char* text) {
  PyObject* const made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw py::error_already_set();
  return made;  // never freed, like all interned names
}

// The properties of a tensor.
struct TensorFacts {
  explicit TensorFacts(const py::object& tensor)
      : untyped_storage(tensor, "untyped_storage"),
        storage_offset(tensor, "storage_offset"),
        shape(tensor, "shape"),
        stride(tensor, "stride"),
        requires_grad(tensor, "requires_grad"),
        dtype(tensor, "dtype"),
        backward_hooks(tensor, "_backward_hooks"),
        is_neg(tensor, "is_neg"),
        is_conj(tensor, "is_conj"),
        version(tensor, "_version"),
        is_cpu(tensor, "is_cpu"),
        is_cuda(tensor, "is_cuda") {
    if (py::hasattr(tensor, "has_names")) has_names.emplace(tensor, "has_names");
  }

  const Asked untyped_storage, storage_offset, shape, stride, requires_grad, dtype, backward_hooks;
  const Asked is_neg, is_conj, version, is_cpu, is_cuda;
  std::optional<Asked> has_names;  // only if this torch has named tensors
};

// Names of attributes and methods, and strings of the pickle, each created once.
struct Names {
  PyObject* const dict = Interned("__dict__");
  PyObject* const name = Interned("__name__");
  PyObject* const reduce_ex = Interned("__reduce_ex__");
  PyObject* const bit_length = Interned("bit_length");
  PyObject* const storage = Interned("storage");
  PyObject* const cpu = Interned("cpu");
  PyObject* const latin1 = Interned("latin1");
};

const Names& N() {
  static const Names* const names = new Names;
  return *names;
}

// An object that is written repeatedly, with its memo number once it has one.
struct Repeated {
  PyObject* object;
  std::optional<uint32_t> number;
};

class PlainPickler {
 public:
  PlainPickler(const TorchTypes& torch, ExpectedSizes& expected)
      : torch_(torch),
        expected_(expected),
        of_tensor_(torch.tensor),
        looks_ahead_{torch.tensor.ptr(), torch.parameter.ptr(), torch.functions.get()},
        dense_tensors_(torch.tensor),
        bytes_of_storage_(torch.storage, "nbytes"),
        address_of_storage_(torch.storage, "data_ptr"),
        key_of_storage_(torch.storage, "_cdata"),
        dispatch_table_(py::module_::import("copyreg").attr("dispatch_table")),
        rebuild_parameter_{torch.rebuild_parameter.ptr(), {}},
        ordered_dict_{torch.ordered_dict.ptr(), {}} {}

  // Whether code of the object itself runs, or has raised an error.
  bool is_in_object() const { return is_in_object_; }

  py::object Pickle(PyObject* object) {
    Put(kProto);
    Put('\x02');
    Save(object);
    Put(kStop);
    if (storages_.size() >= kManyStorages) {
      expected_.Note({out_.size(), storages_.size(), held_.size(), memo_.sizes()});
    }
    const py::object facts =
        has_run_code_ ? py::none()
                      : py::object(py::make_tuple(AsArray("Q", keys_), AsArray("Q", addresses_), AsArray("Q", sizes_),
                                                  are_on_host_, AsArray("q", versions_)));
    return py::make_tuple(out_.Finish(), live_storages_, facts, holders_, AsArray("I", held_));
  }

 private:
  struct Storage {
    uint32_t key = 0;                // memo number of the string that is its key in the file
    PyObject* only_class = nullptr;  // the one that may stand for it; null: it has no address, and any may
  };

  // How tensors of a dtype are rebuilt; see TorchTypes::rebuild_by_dtype.
  struct Rebuild {
    PyObject* dtype;
    int32_t dtype_number;  // TorchFunctions' one; negative if it was not asked
    Repeated function, storage_class;
    uint64_t element_bytes;
    bool gets_dtype, may_be_conjugate;
  };

  // Returns an array.array.
  template <class Number>
  static py::object AsArray(const char* type_code, const std::vector<Number>& numbers) {
    const py::object array = py::module_::import("array").attr("array")(type_code);
    if (!numbers.empty()) {
      array.attr("frombytes")(py::memoryview::from_memory(numbers.data(), Py_ssize_t(numbers.size() * sizeof(Number))));
    }
    return array;
  }

  // --- bytes

  void Put(char byte) { out_.Put(byte); }

  void PutWith32(char opcode, uint32_t value) {
    char* const at = out_.Room(5);
    at[0] = opcode;
    std::memcpy(at + 1, &value, sizeof value);
    out_.Taken(at + 5);
  }

  void PutNumbered(char short_opcode, char long_opcode, uint32_t number) {
    char* const at = out_.Room(5);
    if (number < 256) {
      at[0] = short_opcode;
      at[1] = char(number);
      return out_.Taken(at + 2);
    }
    at[0] = long_opcode;
    std::memcpy(at + 1, &number, sizeof number);  // little-endian, as everywhere here
    out_.Taken(at + 5);
  }

  void PutInt(int64_t value) {
    if (value >= 0 && value <= 0xff) {
      Put(kBinInt1);
      Put(char(value));
    } else if (value >= 0 && value <= 0xffff) {
      Put(kBinInt2);
      Put(char(value));
      Put(char(value >> 8));
    } else if (value == int32_t(value)) {
      PutWith32(kBinInt, uint32_t(value));
    } else {
      PutLong(py::int_(value));
    }
  }

  void PutText(std::string_view text) {
    PutWith32(kBinUnicode, uint32_t(text.size()));
    out_.Append(text);
  }

  void Memoize(PyObject* object, bool is_of_one_dict = false) {
    PutNumbered(kBinPut, kLongBinPut, is_of_one_dict ? memo_.AddOfOneDict(object) : memo_.Add(object));
  }
  void MemoizeUnseen() { PutNumbered(kBinPut, kLongBinPut, memo_.AddUnseen()); }

  bool PutKnown(PyObject* object) {
    const uint32_t* const number = memo_.Find(object);
    if (number == nullptr) return false;
    PutNumbered(kBinGet, kLongBinGet, *number);
    return true;
  }

  void PutRepeated(Repeated& repeated) {
    if (repeated.number.has_value()) return PutNumbered(kBinGet, kLongBinGet, *repeated.number);
    if (Py_TYPE(repeated.object) == &PyUnicode_Type || memo_.Find(repeated.object) != nullptr) {
      Save(repeated.object);
    } else {
      SaveGlobal(repeated.object);  // a class or function of ours or of torch
    }
    if (const uint32_t* const number = memo_.Find(repeated.object)) repeated.number = *number;
  }

  // --- objects of Python

  //   is_of_one_dict  only a dict that is being written refers to it
  void Save(PyObject* object, bool is_of_one_dict = false) {
    PyTypeObject* const type = Py_TYPE(object);
    if (object == Py_None) return Put(kNone);
    if (object == Py_True) return Put(kNewTrue);
    if (object == Py_False) return Put(kNewFalse);
    if (type == &PyLong_Type) return SaveInt(object);
    if (type == &PyFloat_Type) return SaveFloat(object);
    if (!is_of_one_dict && PutKnown(object)) return;
    if (type == &PyUnicode_Type) return SaveText(object, is_of_one_dict);
    if (reinterpret_cast<PyObject*>(type) == torch_.tensor.ptr()) return SaveTensor(object, is_of_one_dict);
    if (Py_EnterRecursiveCall(" while pickling an object") != 0) throw py::error_already_set();
    struct Level {
      explicit Level(int& own) : depth(++own) {}
      ~Level() {
        --depth;
        Py_LeaveRecursiveCall();
      }
      int& depth;
    } const level(depth_);
    if (depth_ > kDeepest) throw NotPlain{};
    const py::object kept = py::reinterpret_borrow<py::object>(object);  // a __reduce_ex__ called meanwhile may drop it
    if (type == &PyBytes_Type) return SaveBytes(object);
    if (type == &PyByteArray_Type) return SaveByteArray(object);
    if (type == &PyDict_Type) return SaveDict(object, is_of_one_dict);
    if (type == &PyTuple_Type) return SaveTuple(object);
    if (type == &PyList_Type) return SaveList(object);
    if (type == &PySet_Type || type == &PyFrozenSet_Type) return SaveSet(object);
    if (reinterpret_cast<PyObject*>(type) == torch_.parameter.ptr()) return SaveParameter(object);
    if (type == &PyType_Type || type == &PyFunction_Type) {
      memo_.KnowAll();
      return SaveGlobal(object);
    }
    SaveOther(object);
  }

  void SaveInt(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0 && value == int32_t(value)) return PutInt(value);
    PutLong(object);
  }

  // Put a number of more than 32 bits.
  void PutLong(py::handle number) {
    const uint64_t bits = AsUnsigned(number.attr(N().bit_length)());
    const auto bytes = number.attr("to_bytes")(bits / 8 + 1, "little", py::arg("signed") = true).cast<std::string>();
    size_t size = bytes.size();
    // For negative numbers only, Python omits a redundant sign byte.
    if (size > 1 && bytes[size - 1] == '\xff' && (bytes[size - 2] & 0x80) != 0) size--;
    if (size > 0xff) throw NotPlain{};
    Put(kLong1);
    Put(char(size));
    out_.Append(std::string_view(bytes).substr(0, size));
  }

  void SaveFloat(PyObject* object) {
    const auto bits = std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(object));
    Put(kBinFloat);
    for (int shift = 56; shift >= 0; shift -= 8) Put(char(bits >> shift));
  }

  void SaveText(PyObject* object, bool is_of_one_dict) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr || size > Py_ssize_t(UINT32_MAX)) throw NotPlain{};
    PutText({text, size_t(size)});
    Memoize(object, is_of_one_dict);
  }

  void SaveBytes(PyObject* object) {
    const std::string_view bytes(PyBytes_AS_STRING(object), size_t(PyBytes_GET_SIZE(object)));
    if (bytes.empty()) return SaveReduced(object, py::make_tuple(py::type::of(py::handle(object)), py::tuple()));
    const py::object encode = py::module_::import("_codecs").attr("encode");
    const py::object text = Taken(PyUnicode_DecodeLatin1(bytes.data(), Py_ssize_t(bytes.size()), nullptr));
    SaveReduced(object, py::make_tuple(encode, py::make_tuple(text, py::handle(N().latin1))));
  }

  void SaveByteArray(PyObject* object) {
    const py::object bytes = Taken(PyBytes_FromObject(object));
    const bool is_empty = PyByteArray_GET_SIZE(object) == 0;
    SaveReduced(object,
                py::make_tuple(py::type::of(py::handle(object)), is_empty ? py::tuple() : py::make_tuple(bytes)));
  }

  void SaveSet(PyObject* object) {
    const py::object items = Taken(PySequence_List(object));
    SaveReduced(object, py::make_tuple(py::type::of(py::handle(object)), py::make_tuple(items)));
  }

  void SaveTuple(PyObject* object) {
    const Py_ssize_t size = PyTuple_GET_SIZE(object);
    if (size == 0) return Put(kEmptyTuple);
    if (size > 3) Put(kMark);
    for (Py_ssize_t i = 0; i < size; i++) Save(PyTuple_GET_ITEM(object, i));
    if (memo_.Find(object) != nullptr) throw NotPlain{};  // it contains itself
    Put(size > 3 ? char(kTuple) : char(kTuple1 + size - 1));
    Memoize(object);
  }

  void SaveList(PyObject* object) {
    Put(kEmptyList);
    Memoize(object);
    const Py_ssize_t size = PyList_GET_SIZE(object);
    if (size == 1) {
      Save(PyList_GET_ITEM(object, 0));
      Put(kAppend);
      return;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
      if (i % kBatchCount == 0) Put(kMark);
      Save(PyList_GET_ITEM(object, i));
      if (PyList_GET_SIZE(object) != size) throw NotPlain{};
      if ((i + 1) % kBatchCount == 0 || i + 1 == size) Put(kAppends);
    }
  }

  void SaveDict(PyObject* object, bool is_of_one_dict) {
    Put(kEmptyDict);
    Memoize(object, is_of_one_dict);
    const Py_ssize_t size = PyDict_GET_SIZE(object);
    if (size == 0) return;
    if (size > 1) Put(kMark);
    DictAhead ahead(object, looks_ahead_);
    const bool shares_keys = reinterpret_cast<PyDictObject*>(object)->ma_values != nullptr;  // as a __dict__ does
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    int count = 0;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value) != 0;) {
      ahead.Next();
      const bool is_ours = IsOfOneDict(value, 1);
      const py::object kept = py::reinterpret_borrow<py::object>(value);
      Save(key, !shares_keys && IsOfOneDict(key, 1));
      Save(value, is_ours && !memo_.knows_all());
      if (PyDict_GET_SIZE(object) != size) throw NotPlain{};
      if (++count % kBatchCount == 0 && size > 1) {  // another batch follows, even if it is empty
        Put(kSetItems);
        Put(kMark);
      }
    }
    Put(size == 1 ? kSetItem : kSetItems);
  }

  // Whether an object has only `count` references: one of the dict that is being written, and `count` - 1 temporary
  // ones. Then only code of an object could bring it to the pickler again, and none has run.
  bool IsOfOneDict(PyObject* object, Py_ssize_t count) const {
    return Py_REFCNT(object) == count && !memo_.knows_all();
  }

  void SaveGlobal(PyObject* object) {
    const py::object opcode = torch_.global_opcode(py::handle(object));
    if (opcode.is_none()) throw NotPlain{};
    out_.Append(opcode.cast<std::string_view>());
    Memoize(object);
  }

  void SaveOther(PyObject* object) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    PyObject* const reduce = PyDict_GetItemWithError(dispatch_table_.ptr(), type);
    const bool is_ordered_dict = type == torch_.ordered_dict.ptr() && reduce == nullptr;
    if (!is_ordered_dict) memo_.KnowAll();
    if (!is_ordered_dict && !ordinary_types_.contains(type)) {
      if (!torch_.is_ordinary(py::handle(object)).cast<bool>()) throw NotPlain{};
      ordinary_types_.insert(type);
    }
    if (is_ordered_dict && PyDict_GET_SIZE(object) == 0 &&
        PyDict_GET_SIZE(py::handle(object).attr(N().dict).ptr()) == 0) {
      PutEmptyOrderedDict();
      return Memoize(object);
    }
    py::object reduced;
    is_in_object_ = true;
    if (reduce != nullptr) {
      reduced = Taken(PyObject_CallOneArg(reduce, object));
    } else if (!PyType_Check(object)) {
      reduced = py::handle(object).attr(N().reduce_ex)(2);
    }
    is_in_object_ = false;
    if (!reduced) return SaveGlobal(object);  // it is a class of another metaclass
    if (!is_ordered_dict) NoteRunCode();
    if (py::isinstance<py::str>(reduced)) return SaveGlobal(object);
    if (!py::isinstance<py::tuple>(reduced)) throw NotPlain{};
    SaveReduced(object, py::reinterpret_borrow<py::tuple>(reduced), is_ordered_dict);
  }

  void SaveReduced(PyObject* object, const py::tuple& reduced, bool is_ordered_dict = false) {
    if (reduced.size() < 2 || reduced.size() > 5 || !py::isinstance<py::tuple>(reduced[1])) throw NotPlain{};
    const auto part = [&](size_t index) { return index < reduced.size() ? py::object(reduced[index]) : py::none(); };
    const py::object function = reduced[0];
    const py::tuple arguments = reduced[1];
    if (PyCallable_Check(function.ptr()) == 0) throw NotPlain{};
    py::object name = py::none();
    try {
      name = function.attr(N().name);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_AttributeError)) throw;
    }
    if (name.equal(py::str("__newobj_ex__"))) throw NotPlain{};
    if (name.equal(py::str("__newobj__"))) {
      if (arguments.empty() || !py::object(arguments[0]).is(py::handle(object).attr("__class__"))) throw NotPlain{};
      Save(py::object(arguments[0]).ptr());
      Save(Taken(PyTuple_GetSlice(arguments.ptr(), 1, PyTuple_GET_SIZE(arguments.ptr()))).ptr());
      Put(kNewObj);
    } else {
      if (function.is(torch_.ordered_dict)) {
        PutRepeated(ordered_dict_);
      } else {
        Save(function.ptr());
      }
      Save(arguments.ptr());
      Put(kReduce);
    }
    if (memo_.Find(object) != nullptr) throw NotPlain{};  // it was reduced to something that contains it
    Memoize(object);
    const auto save_item = [this](PyObject* item) { Save(item); };
    std::optional<DictAhead> ahead;
    if (is_ordered_dict) ahead.emplace(object, looks_ahead_);
    const auto save_pair = [&](PyObject* pair) {
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) throw NotPlain{};
      if (ahead.has_value()) ahead->Next();
      PyObject* const key = PyTuple_GET_ITEM(pair, 0);
      Save(key, is_ordered_dict && IsOfOneDict(key, 3));  // its order, and the pair, too
      PyObject* const value = PyTuple_GET_ITEM(pair, 1);
      Save(value, is_ordered_dict && IsOfOneDict(value, 2));  // the pair, too
    };
    SaveAll(part(3), kAppend, kAppends, save_item);
    SaveAll(part(4), kSetItem, kSetItems, save_pair);
    if (const py::object state = part(2); !state.is_none()) {
      Save(state.ptr());
      Put(kBuild);
    }
  }

  // Save what an iterator yields, in batches. Unlike those of a dict, none is empty, and one of one has no MARK.
  template <class SaveItem>
  void SaveAll(const py::object& items, Opcode one, Opcode many, SaveItem save_item) {
    if (items.is_none()) return;
    const auto next = [&] {
      is_in_object_ = true;
      py::object item = py::reinterpret_steal<py::object>(PyIter_Next(items.ptr()));
      if (!item && PyErr_Occurred() != nullptr) throw py::error_already_set();
      is_in_object_ = false;
      return item;
    };
    if (PyIter_Check(items.ptr()) == 0) throw NotPlain{};
    while (true) {
      py::object item = next();
      if (!item) return;
      py::object following = next();
      if (!following) {
        save_item(item.ptr());
        return Put(one);
      }
      Put(kMark);
      save_item(item.ptr());
      int count = 1;
      while (following) {
        save_item(following.ptr());
        if (++count == kBatchCount) break;
        following = next();
      }
      Put(many);
      if (count < kBatchCount) return;
    }
  }

  // --- tensors

  void PutEmptyOrderedDict() {
    PutRepeated(ordered_dict_);
    Put(kEmptyTuple);
    Put(kReduce);
  }

  static bool HasAttributes(PyObject* tensor) {
    PyObject** const attributes = _PyObject_GetDictPtr(tensor);  // to ask for the dict itself makes one
    if (attributes == nullptr) throw NotPlain{};
    return *attributes != nullptr && PyDict_GET_SIZE(*attributes) != 0;
  }

  bool HasBackwardHooks(PyObject* tensor) const {
    return torch_.functions != nullptr ? torch_.functions->HasBackwardHooks(tensor)
                                       : !of_tensor_.backward_hooks.Of(tensor).is_none();
  }

  // A tensor and its DLPack description.
  struct Described {
    PyObject* tensor;
    DenseTensor dense;
    bool is_dense;                    // DLPack describes it
    const TorchFunctions* functions;  // null: Python's attributes are read
  };

  Described Describe(PyObject* tensor) const {
    Described described = {tensor, {}, false, nullptr};
    described.is_dense = dense_tensors_.Describe(tensor, described.dense);
    if (described.is_dense) described.functions = torch_.functions.get();
    return described;
  }

  bool RequiresGrad(const Described& of) const {
    return of.functions != nullptr ? of.functions->RequiresGrad(of.tensor)
                                   : of_tensor_.requires_grad.IsTrueOf(of.tensor);
  }

  void SaveTensor(PyObject* tensor, bool is_of_one_dict) {
    const py::object kept = py::reinterpret_borrow<py::object>(tensor);  // another thread may remove it from a list
    if (HasAttributes(tensor) || HasBackwardHooks(tensor)) throw NotPlain{};
    const Described described = Describe(tensor);
    PutTensor(described, RequiresGrad(described));
    Memoize(tensor, is_of_one_dict);
  }

  // torch reduces a parameter to its data, a tensor with the same storage that requires no gradient.
  void SaveParameter(PyObject* parameter) {
    if (HasAttributes(parameter)) throw NotPlain{};
    const Described described = Describe(parameter);
    PutRepeated(rebuild_parameter_);
    PutTensor(described, false);
    MemoizeUnseen();
    Put(RequiresGrad(described) ? kNewTrue : kNewFalse);
    PutEmptyOrderedDict();
    MemoizeUnseen();
    Put(char(kTuple1 + 2));
    MemoizeUnseen();
    Put(kReduce);
    Memoize(parameter);
  }

  // Put the call that rebuilds a plain tensor. Sparse, nested and opaque tensors, those on the meta device and
  // ZeroTensors raise an error, because they have no storage, no strides or no address.
  void PutTensor(const Described& described, bool requires_grad) {
    const auto& [tensor, dense, is_dense, functions] = described;
    const bool is_on_host =
        is_dense && dense.device_kind == DenseTensor::kHost ? true : of_tensor_.is_cpu.IsTrueOf(tensor);
    if (!is_on_host && !of_tensor_.is_cuda.IsTrueOf(tensor)) throw NotPlain{};
    Rebuild& rebuild = RebuildOf(described);
    if (functions != nullptr ? functions->IsNegative(tensor) : of_tensor_.is_neg.IsTrueOf(tensor)) throw NotPlain{};
    if (rebuild.may_be_conjugate && of_tensor_.is_conj.IsTrueOf(tensor)) throw NotPlain{};
    if (of_tensor_.has_names.has_value() && of_tensor_.has_names->IsTrueOf(tensor)) throw NotPlain{};
    const int64_t offset = functions != nullptr ? functions->StorageOffset(tensor) : OffsetOf(tensor);
    PutRepeated(rebuild.function);
    Put(kMark);
    // A tensor with offset 0 begins where its storage begins.
    PutStorage(described, is_on_host, rebuild, is_dense && offset == 0 ? dense.address() : 0);
    PutInt(offset);
    if (is_dense) {
      PutNumbers(dense.shape());
    } else {
      PutNumbers(of_tensor_.shape.Of(tensor));
    }
    const int64_t* const strides = functions != nullptr ? functions->Strides(tensor)
                                   : is_dense           ? dense.strides()
                                                        : nullptr;
    if (strides != nullptr || (is_dense && dense.dim_count == 0)) {
      PutNumbers({strides, size_t(dense.dim_count)});
    } else {
      PutNumbers(of_tensor_.stride.Of(tensor));
    }
    Put(requires_grad ? kNewTrue : kNewFalse);
    PutEmptyOrderedDict();
    MemoizeUnseen();
    if (rebuild.gets_dtype) Save(rebuild.dtype);
    Put(kTuple);
    MemoizeUnseen();
    Put(kReduce);
  }

  int64_t OffsetOf(PyObject* tensor) const {
    const py::object offset = of_tensor_.storage_offset.Of(tensor);
    if (!PyLong_CheckExact(offset.ptr())) throw NotPlain{};
    return offset.cast<int64_t>();
  }

  // Returns a tensor's version; kNoVersion for an inference tensor, which has no counter.
  int64_t VersionOf(const Described& of) const {
    if (of.functions != nullptr) {
      if (const std::optional<int64_t> version = of.functions->Version(of.tensor)) return *version;
    }
    return VersionSaid([&] { return of_tensor_.version.Of(of.tensor); });
  }

  Rebuild& RebuildOf(const Described& of) {
    const int32_t number = of.functions != nullptr ? of.functions->DtypeNumber(of.tensor) : -1;
    for (Rebuild& known : rebuilds_) {
      if (number >= 0 && known.dtype_number == number) return known;
    }
    const py::object dtype = of_tensor_.dtype.Of(of.tensor);
    for (Rebuild& known : rebuilds_) {
      if (known.dtype != dtype.ptr()) continue;
      known.dtype_number = number;
      return known;
    }
    PyObject* const found = PyDict_GetItemWithError(torch_.rebuild_by_dtype.ptr(), dtype.ptr());
    if (found == nullptr) throw NotPlain{};
    rebuilds_.push_back({.dtype = dtype.ptr(),  // the dict keeps it, and what follows
                         .dtype_number = number,
                         .function = {PyTuple_GET_ITEM(found, 0), {}},
                         .storage_class = {PyTuple_GET_ITEM(found, 1), {}},
                         .element_bytes = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(found, 2)),
                         .gets_dtype = PyTuple_GET_ITEM(found, 3) == Py_True,
                         // torch allows the conjugate bit only for complex dtypes.
                         .may_be_conjugate = dtype.attr("is_complex").cast<bool>()});
    return rebuilds_.back();
  }

  // Put the persistent id of a tensor's storage.
  //   address  of the storage, if it is known
  void PutStorage(const Described& of, bool is_on_host, Rebuild& rebuild, uint64_t address) {
    PyObject* const tensor = of.tensor;
    const py::object live = of_tensor_.untyped_storage.Of(tensor);
    if (address == 0) address = AsUnsigned(address_of_storage_.Of(live.ptr()));
    const auto [index, is_new] = IndexOf(live.ptr(), address);
    PyObject* const storage_class = rebuild.storage_class.object;
    if (is_new) {
      live_storages_.append(live);
      storages_.emplace_back();
      if (storages_.size() == kManyStorages) ExpectMany();
      if (of.functions != nullptr) {
        sizes_.push_back(of.functions->StorageBytes(tensor));
        keys_.push_back(of.functions->StorageKey(tensor));
      } else {
        sizes_.push_back(AsUnsigned(bytes_of_storage_.Of(live.ptr())));
        keys_.push_back(AsUnsigned(key_of_storage_.Of(live.ptr())));
      }
      if (sizes_.back() % rebuild.element_bytes != 0) throw NotPlain{};
      addresses_.push_back(address);
      are_on_host_ = are_on_host_ && is_on_host;
      // A ZeroTensor has no address, and storages of two dtypes at one address are an error.
      if (address == 0 && sizes_.back() > 0) throw NotPlain{};
      if (address != 0) {
        const uint32_t first = first_at_.FindOrAdd(address, index).first;
        storages_.back().only_class = first == index ? storage_class : storages_[first].only_class;
      }
    }
    Storage& storage = storages_[index];
    if (storage.only_class != nullptr && storage.only_class != storage_class) throw NotPlain{};
    holders_.append(py::handle(tensor));
    held_.push_back(index);
    versions_.push_back(VersionOf(of));
    Put(kMark);
    PutRepeated(storage_text_);
    PutRepeated(rebuild.storage_class);
    if (is_new) {
      std::array<char, 10> digits;
      PutText({digits.data(), std::to_chars(digits.begin(), digits.end(), index).ptr});
      storage.key = memo_.AddUnseen();
      PutNumbered(kBinPut, kLongBinPut, storage.key);
    } else {
      PutNumbered(kBinGet, kLongBinGet, storage.key);
    }
    if (is_on_host && torch_.is_host_tagged_cpu) {
      PutRepeated(cpu_text_);
    } else {
      Save(torch_.location_of(live).ptr());
    }
    PutInt(int64_t(sizes_[index] / rebuild.element_bytes));
    Put(kTuple);
    MemoizeUnseen();
    Put(kBinPersId);
  }

  void ExpectMany() {
    const auto& [bytes, storages, tensors, memo] = expected_.largest();
    out_.Expect(bytes + bytes / 16);
    storages_.reserve(storages);
    first_at_.Expect(storages);
    for (auto* const column : {&keys_, &addresses_, &sizes_}) column->reserve(storages);
    held_.reserve(tensors);
    versions_.reserve(tensors);
    memo_.Expect(memo);
  }

  // Returns the index of a storage, and whether the storage is new: then the index is the next one.
  std::pair<uint32_t, bool> IndexOf(PyObject* storage, uint64_t address) {
    const auto next = uint32_t(storages_.size());
    if (address != 0 && !has_run_code_) {
      const auto [first, is_new] = first_at_.FindOrAdd(address, next);
      if (is_new || PyList_GET_ITEM(live_storages_.ptr(), Py_ssize_t(first)) == storage) return {first, is_new};
    }
    return index_of_other_.FindOrAdd(AddressOf(storage), next);
  }

  // From now on, a storage that was met before may have another address.
  void NoteRunCode() {
    if (std::exchange(has_run_code_, true)) return;
    for (uint32_t index = 0; index < storages_.size(); index++) {
      index_of_other_.FindOrAdd(AddressOf(PyList_GET_ITEM(live_storages_.ptr(), Py_ssize_t(index))), index);
    }
  }

  // Put a new tuple with the numbers of a shape or strides.
  void PutNumbers(const py::object& numbers) {
    if (!PyTuple_Check(numbers.ptr())) throw NotPlain{};
    numbers_.clear();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers.ptr()); i++) {
      PyObject* const number = PyTuple_GET_ITEM(numbers.ptr(), i);
      if (!PyLong_CheckExact(number)) throw NotPlain{};
      numbers_.push_back(PyLong_AsLongLong(number));
    }
    PutNumbers(numbers_);
  }

  void PutNumbers(std::span<const int64_t> numbers) {
    if (numbers.empty()) return Put(kEmptyTuple);
    if (numbers.size() > 3) Put(kMark);
    for (const int64_t number : numbers) PutInt(number);
    Put(numbers.size() > 3 ? char(kTuple) : char(kTuple1 + numbers.size() - 1));
    MemoizeUnseen();
  }

  const TorchTypes& torch_;
  ExpectedSizes& expected_;
  const TensorFacts of_tensor_;
  const DictAhead::Torch looks_ahead_;
  const DenseTensors dense_tensors_;
  const Asked bytes_of_storage_, address_of_storage_, key_of_storage_;
  const py::dict dispatch_table_;
  int depth_ = 0;  // the nesting depth of what is being written
  bool is_in_object_ = false;
  bool has_run_code_ = false;  // an object's code, which may have changed storages that were met before
  Bytes out_;
  Memo memo_;
  std::unordered_set<PyObject*> ordinary_types_;
  Repeated rebuild_parameter_, ordered_dict_;
  Repeated storage_text_{N().storage, {}};
  Repeated cpu_text_{N().cpu, {}};
  std::deque<Rebuild> rebuilds_;  // one for each dtype met
  std::vector<int64_t> numbers_;
  std::vector<Storage> storages_;
  AddressTable first_at_;        // the first storage at an address
  AddressTable index_of_other_;  // by object, in live_storages_: storages without address; all once code has run
  py::list live_storages_;
  std::vector<uint64_t> keys_;  // the _cdata of each, which identifies it while it lives
  std::vector<uint64_t> addresses_, sizes_;
  bool are_on_host_ = true;
  py::list holders_;               // the tensors
  std::vector<uint32_t> held_;     // for each holder, the index of its storage
  std::vector<int64_t> versions_;  // for each holder, its version
};

}  // namespace

py::object PicklePlain(const py::object& object, const TorchTypes& torch) {
  static ExpectedSizes expected;
  PlainPickler pickler(torch, expected);
  try {
    return pickler.Pickle(object.ptr());
  } catch (const NotPlain&) {
    PyErr_Clear();
    return py::none();
  } catch (const py::error_already_set& error) {
    // Other errors, of torch or Python, mean that the object is not plain. Python's pickler then meets them again, if
    // they are real.
    if (pickler.is_in_object() || !error.matches(PyExc_Exception)) throw;
    return py::none();
  }
}

}  // namespace fastpersist
