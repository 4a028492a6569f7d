#include "binding/plain_pickler.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fastpersist {
namespace {

// Thrown where only Python's pickler can go on.
struct NotPlain : std::exception {};

// Objects that were written, by identity, with their numbers. It holds a reference to each, as Python's does: the
// identity of an object that was made on the way must not become another's.
class Memo {
 public:
  Memo() : slots_(1024) {}
  ~Memo() {
    for (const Slot& slot : slots_) Py_XDECREF(slot.object);
  }
  Memo(const Memo&) = delete;
  Memo& operator=(const Memo&) = delete;

  // Returns the number of an object, or null.
  const uint32_t* Find(PyObject* object) const {
    const Slot& slot = slots_[IndexOf(slots_, object)];
    return slot.object == nullptr ? nullptr : &slot.number;
  }

  // Numbers an object, which was not numbered before, and returns its number.
  uint32_t Add(PyObject* object) {
    if (2 * ++used_ > slots_.size()) Grow();
    Py_INCREF(object);
    slots_[IndexOf(slots_, object)] = {object, count_};
    return count_++;
  }

  // Numbers an object to which nobody refers, so that it cannot come again.
  uint32_t AddUnseen() { return count_++; }

 private:
  struct Slot {
    PyObject* object = nullptr;
    uint32_t number = 0;
  };

  static size_t IndexOf(const std::vector<Slot>& slots, PyObject* object) {
    const size_t mask = slots.size() - 1;
    size_t index = (reinterpret_cast<uintptr_t>(object) >> 4) * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (slots[index].object != nullptr && slots[index].object != object) index = (index + 1) & mask;
    return index;
  }

  void Grow() {
    std::vector<Slot> larger(2 * slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.object != nullptr) larger[IndexOf(larger, slot.object)] = slot;
    }
    slots_ = std::move(larger);
  }

  std::vector<Slot> slots_;  // a power of two, at most half of them used
  size_t used_ = 0;
  uint32_t count_ = 0;
};

// The opcodes of protocol 2, as Python's pickletools names them.
enum Opcode : char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kAppends = 'e',
  kBinFloat = 'G',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyTuple = ')',
  kEmptyList = ']',
  kEmptyDict = '}',
  kProto = '\x80',
  kNewObj = '\x81',
  kTuple1 = '\x85',
  kNewTrue = '\x88',
  kNewFalse = '\x89',
  kLong1 = '\x8a',
};

constexpr int kBatchCount = 1000;  // items after one MARK

PyObject* Interned(const char* text) {
  PyObject* const made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw py::error_already_set();
  return made;  // kept for good, as all that is interned by name
}

// Takes what a call of Python's C API has returned.
py::object Taken(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object Ask(PyObject* object, PyObject* method) { return Taken(PyObject_CallMethodNoArgs(object, method)); }
py::object Attribute(PyObject* object, PyObject* name) { return Taken(PyObject_GetAttr(object, name)); }

uint64_t AsUnsigned(const py::object& number) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// Names of attributes and methods, each made once.
struct Names {
  PyObject* const untyped_storage = Interned("untyped_storage");
  PyObject* const storage_offset = Interned("storage_offset");
  PyObject* const shape = Interned("shape");
  PyObject* const stride = Interned("stride");
  PyObject* const requires_grad = Interned("requires_grad");
  PyObject* const dtype = Interned("dtype");
  PyObject* const backward_hooks = Interned("_backward_hooks");
  PyObject* const is_neg = Interned("is_neg");
  PyObject* const is_conj = Interned("is_conj");
  PyObject* const has_names = Interned("has_names");
  PyObject* const is_cpu = Interned("is_cpu");
  PyObject* const is_cuda = Interned("is_cuda");
  PyObject* const dict = Interned("__dict__");
  PyObject* const nbytes = Interned("nbytes");
  PyObject* const data_ptr = Interned("data_ptr");
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

class PlainPickler {
 public:
  explicit PlainPickler(const TorchTypes& torch)
      : torch_(torch), dispatch_table_(py::module_::import("copyreg").attr("dispatch_table")) {}

  // Whether code of the object itself runs, or has raised an error.
  bool is_in_object() const { return is_in_object_; }

  py::object Pickle(PyObject* object) {
    Put(kProto);
    Put('\x02');
    Save(object);
    Put(kStop);
    return py::make_tuple(py::bytes(out_), storages_, tensors_);
  }

 private:
  struct Storage {
    py::object key;  // in the file: its index, as text
    uint64_t size_bytes = 0;
    size_t index = 0;
    PyObject* only_class = nullptr;  // the one that may stand for it; null: it has no address, and any may
    py::object location;             // of the host; null: to be asked for each time
  };

  // --- bytes

  void Put(char byte) { out_.push_back(byte); }

  void Put32(uint32_t value) {
    const char bytes[] = {char(value), char(value >> 8), char(value >> 16), char(value >> 24)};
    out_.append(bytes, sizeof bytes);
  }

  void PutNumbered(char short_opcode, char long_opcode, uint32_t number) {
    if (number < 256) {
      Put(short_opcode);
      Put(char(number));
    } else {
      Put(long_opcode);
      Put32(number);
    }
  }

  void PutInt(int32_t value) {
    if (value >= 0 && value <= 0xff) {
      Put(kBinInt1);
      Put(char(value));
    } else if (value >= 0 && value <= 0xffff) {
      Put(kBinInt2);
      Put(char(value));
      Put(char(value >> 8));
    } else {
      Put(kBinInt);
      Put32(uint32_t(value));
    }
  }

  void Memoize(PyObject* object) { PutNumbered(kBinPut, kLongBinPut, memo_.Add(object)); }
  void MemoizeUnseen() { PutNumbered(kBinPut, kLongBinPut, memo_.AddUnseen()); }

  bool PutKnown(PyObject* object) {
    const uint32_t* const number = memo_.Find(object);
    if (number == nullptr) return false;
    PutNumbered(kBinGet, kLongBinGet, *number);
    return true;
  }

  // --- objects of Python

  void Save(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    if (object == Py_None) return Put(kNone);
    if (object == Py_True) return Put(kNewTrue);
    if (object == Py_False) return Put(kNewFalse);
    if (type == &PyLong_Type) return SaveInt(object);
    if (type == &PyFloat_Type) return SaveFloat(object);
    if (PutKnown(object)) return;
    if (type == &PyUnicode_Type) return SaveText(object);
    if (Py_EnterRecursiveCall(" while pickling an object") != 0) throw py::error_already_set();
    struct Leave {
      ~Leave() { Py_LeaveRecursiveCall(); }
    } const leave;
    const py::object kept = py::reinterpret_borrow<py::object>(object);  // a __reduce_ex__ on the way may drop it
    if (type == &PyBytes_Type) return SaveBytes(object);
    if (type == &PyByteArray_Type) return SaveByteArray(object);
    if (type == &PyDict_Type) return SaveDict(object);
    if (type == &PyTuple_Type) return SaveTuple(object);
    if (type == &PyList_Type) return SaveList(object);
    if (type == &PySet_Type || type == &PyFrozenSet_Type) return SaveSet(object);
    if (reinterpret_cast<PyObject*>(type) == torch_.tensor.ptr()) return SaveTensor(object);
    if (reinterpret_cast<PyObject*>(type) == torch_.parameter.ptr()) return SaveParameter(object);
    if (type == &PyType_Type || type == &PyFunction_Type) return SaveGlobal(object);
    SaveOther(object);
  }

  void SaveInt(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0 && value == int32_t(value)) return PutInt(int32_t(value));
    const uint64_t bits = AsUnsigned(Ask(object, N().bit_length));
    const py::handle number(object);
    const auto bytes = number.attr("to_bytes")(bits / 8 + 1, "little", py::arg("signed") = true).cast<std::string>();
    size_t size = bytes.size();
    // Python leaves out one byte of signs, of negative numbers only.
    if (size > 1 && bytes[size - 1] == '\xff' && (bytes[size - 2] & 0x80) != 0) size--;
    if (size > 0xff) throw NotPlain{};
    Put(kLong1);
    Put(char(size));
    out_.append(bytes, 0, size);
  }

  void SaveFloat(PyObject* object) {
    const auto bits = std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(object));
    Put(kBinFloat);
    for (int shift = 56; shift >= 0; shift -= 8) Put(char(bits >> shift));
  }

  void SaveText(PyObject* object) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr || size > Py_ssize_t(UINT32_MAX)) throw NotPlain{};
    Put(kBinUnicode);
    Put32(uint32_t(size));
    out_.append(text, size_t(size));
    Memoize(object);
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
    if (memo_.Find(object) != nullptr) throw NotPlain{};  // it holds itself
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
      if (PyList_GET_SIZE(object) != size) throw NotPlain{};
      Save(PyList_GET_ITEM(object, i));
      if ((i + 1) % kBatchCount == 0 || i + 1 == size) Put(kAppends);
    }
  }

  void SaveDict(PyObject* object) {
    Put(kEmptyDict);
    Memoize(object);
    const Py_ssize_t size = PyDict_GET_SIZE(object);
    if (size == 0) return;
    if (size > 1) Put(kMark);
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    int count = 0;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value) != 0;) {
      const py::object kept = py::reinterpret_borrow<py::object>(value);
      Save(key);
      Save(value);
      if (PyDict_GET_SIZE(object) != size) throw NotPlain{};
      if (++count % kBatchCount == 0 && size > 1) {  // another batch follows, be it empty
        Put(kSetItems);
        Put(kMark);
      }
    }
    Put(size == 1 ? kSetItem : kSetItems);
  }

  void SaveGlobal(PyObject* object) {
    const py::object opcode = torch_.global_opcode(py::handle(object));
    if (opcode.is_none()) throw NotPlain{};
    out_ += opcode.cast<std::string_view>();
    Memoize(object);
  }

  void SaveOther(PyObject* object) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (!ordinary_types_.contains(type)) {
      if (!torch_.is_ordinary(py::handle(object)).cast<bool>()) throw NotPlain{};
      ordinary_types_.insert(type);
    }
    if (type == torch_.ordered_dict.ptr() && PyDict_GET_SIZE(object) == 0 &&
        PyDict_GET_SIZE(Attribute(object, N().dict).ptr()) == 0) {
      PutEmptyOrderedDict();
      return Memoize(object);
    }
    py::object reduced;
    is_in_object_ = true;
    if (PyObject* const reduce = PyDict_GetItemWithError(dispatch_table_.ptr(), type)) {
      reduced = Taken(PyObject_CallOneArg(reduce, object));
    } else if (!PyType_Check(object)) {
      reduced = py::handle(object).attr(N().reduce_ex)(2);
    }
    is_in_object_ = false;
    if (!reduced) return SaveGlobal(object);  // it is a class of another metaclass
    if (py::isinstance<py::str>(reduced)) return SaveGlobal(object);
    if (!py::isinstance<py::tuple>(reduced)) throw NotPlain{};
    SaveReduced(object, py::reinterpret_borrow<py::tuple>(reduced));
  }

  void SaveReduced(PyObject* object, const py::tuple& reduced) {
    if (reduced.size() < 2 || reduced.size() > 5 || !py::isinstance<py::tuple>(reduced[1])) throw NotPlain{};
    const auto part = [&](size_t index) { return index < reduced.size() ? py::object(reduced[index]) : py::none(); };
    const py::object function = reduced[0];
    const py::tuple arguments = reduced[1];
    const py::object name = py::getattr(function, N().name, py::none());
    if (name.equal(py::str("__newobj_ex__"))) throw NotPlain{};
    if (name.equal(py::str("__newobj__"))) {
      if (arguments.empty() || !py::object(arguments[0]).is(py::handle(object).attr("__class__"))) throw NotPlain{};
      Save(py::object(arguments[0]).ptr());
      Save(Taken(PyTuple_GetSlice(arguments.ptr(), 1, PyTuple_GET_SIZE(arguments.ptr()))).ptr());
      Put(kNewObj);
    } else {
      Save(function.ptr());
      Save(arguments.ptr());
      Put(kReduce);
    }
    if (memo_.Find(object) != nullptr) throw NotPlain{};  // it was reduced to something that holds it
    Memoize(object);
    const auto save_item = [this](PyObject* item) { Save(item); };
    const auto save_pair = [this](PyObject* pair) {
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) throw NotPlain{};
      Save(PyTuple_GET_ITEM(pair, 0));
      Save(PyTuple_GET_ITEM(pair, 1));
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
    Save(torch_.ordered_dict.ptr());
    Put(kEmptyTuple);
    Put(kReduce);
  }

  static bool HasAttributes(PyObject* tensor) {
    const py::object attributes = Attribute(tensor, N().dict);
    return !PyDict_CheckExact(attributes.ptr()) || PyDict_GET_SIZE(attributes.ptr()) != 0;
  }

  static bool IsTrue(const py::object& answer) { return answer.ptr() == Py_True; }

  void SaveTensor(PyObject* tensor) {
    if (HasAttributes(tensor) || !Attribute(tensor, N().backward_hooks).is_none()) throw NotPlain{};
    PutTensor(tensor, IsTrue(Attribute(tensor, N().requires_grad)));
    Memoize(tensor);
  }

  // torch reduces it to its data, a tensor of the same storage that requires no gradient.
  void SaveParameter(PyObject* parameter) {
    if (HasAttributes(parameter)) throw NotPlain{};
    Save(torch_.rebuild_parameter.ptr());
    PutTensor(parameter, false);
    MemoizeUnseen();
    Put(IsTrue(Attribute(parameter, N().requires_grad)) ? kNewTrue : kNewFalse);
    PutEmptyOrderedDict();
    MemoizeUnseen();
    Put(char(kTuple1 + 2));
    MemoizeUnseen();
    Put(kReduce);
    Memoize(parameter);
  }

  // Put the call that makes a plain tensor. Sparse, nested and opaque tensors, those on the meta device and ZeroTensors
  // raise an error, because they have no storage, no strides or no address.
  void PutTensor(PyObject* tensor, bool requires_grad) {
    const bool is_on_host = IsTrue(Attribute(tensor, N().is_cpu));
    if (!is_on_host && !IsTrue(Attribute(tensor, N().is_cuda))) throw NotPlain{};
    if (IsTrue(Ask(tensor, N().is_neg)) || IsTrue(Ask(tensor, N().is_conj))) throw NotPlain{};
    if (torch_.may_have_names && IsTrue(Ask(tensor, N().has_names))) throw NotPlain{};
    const py::object dtype = Attribute(tensor, N().dtype);
    PyObject* const rebuild = PyDict_GetItemWithError(torch_.rebuild_by_dtype.ptr(), dtype.ptr());
    if (rebuild == nullptr) throw NotPlain{};
    Save(PyTuple_GET_ITEM(rebuild, 0));
    Put(kMark);
    PutStorage(tensor, is_on_host, PyTuple_GET_ITEM(rebuild, 1),
               PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(rebuild, 2)));
    Save(Ask(tensor, N().storage_offset).ptr());
    PutNumbers(Attribute(tensor, N().shape));
    PutNumbers(Ask(tensor, N().stride));
    Put(requires_grad ? kNewTrue : kNewFalse);
    PutEmptyOrderedDict();
    MemoizeUnseen();
    if (PyTuple_GET_ITEM(rebuild, 3) == Py_True) Save(dtype.ptr());
    Put(kTuple);
    MemoizeUnseen();
    Put(kReduce);
  }

  void PutStorage(PyObject* tensor, bool is_on_host, PyObject* storage_class, uint64_t element_bytes) {
    const py::object live = Ask(tensor, N().untyped_storage);
    auto [found, is_new] = storages_by_object_.try_emplace(live.ptr());
    Storage& storage = found->second;
    if (is_new) {
      storage.index = storages_.size();
      storage.key = Taken(PyObject_Str(Taken(PyLong_FromSize_t(storage.index)).ptr()));
      storage.size_bytes = AsUnsigned(Ask(live.ptr(), N().nbytes));
      storages_.append(live);
      tensors_.append(py::list());
      if (is_on_host && torch_.is_host_tagged_cpu) storage.location = py::reinterpret_borrow<py::object>(N().cpu);
      const uint64_t address = AsUnsigned(Ask(live.ptr(), N().data_ptr));
      // A ZeroTensor has no address, and storages of two dtypes at one address are an error.
      if (address == 0 && storage.size_bytes > 0) throw NotPlain{};
      if (address != 0) storage.only_class = class_at_.try_emplace(address, storage_class).first->second;
    }
    if (storage.only_class != nullptr && storage.only_class != storage_class) throw NotPlain{};
    if (PyList_Append(PyList_GET_ITEM(tensors_.ptr(), Py_ssize_t(storage.index)), tensor) != 0) {
      throw py::error_already_set();
    }
    Put(kMark);
    Save(N().storage);
    Save(storage_class);
    Save(storage.key.ptr());
    Save(storage.location ? storage.location.ptr() : torch_.location_of(live).ptr());
    Save(Taken(PyLong_FromUnsignedLongLong(storage.size_bytes / element_bytes)).ptr());
    Put(kTuple);
    MemoizeUnseen();
    Put(kBinPersId);
  }

  // A new tuple of what a shape or strides hold.
  void PutNumbers(const py::object& numbers) {
    if (!PyTuple_Check(numbers.ptr())) throw NotPlain{};
    const Py_ssize_t count = PyTuple_GET_SIZE(numbers.ptr());
    if (count == 0) return Put(kEmptyTuple);
    if (count > 3) Put(kMark);
    for (Py_ssize_t i = 0; i < count; i++) {
      PyObject* const number = PyTuple_GET_ITEM(numbers.ptr(), i);
      if (!PyLong_CheckExact(number)) throw NotPlain{};
      SaveInt(number);
    }
    Put(count > 3 ? char(kTuple) : char(kTuple1 + count - 1));
    MemoizeUnseen();
  }

  const TorchTypes& torch_;
  const py::dict dispatch_table_;
  bool is_in_object_ = false;
  std::string out_;
  Memo memo_;
  std::unordered_set<PyObject*> ordinary_types_;
  std::unordered_map<PyObject*, Storage> storages_by_object_;  // storages_ holds them
  std::unordered_map<uint64_t, PyObject*> class_at_;           // of each storage that has an address
  py::list storages_;
  py::list tensors_;  // for each storage a list
};

}  // namespace

py::object PicklePlain(const py::object& object, const TorchTypes& torch) {
  PlainPickler pickler(torch);
  try {
    return pickler.Pickle(object.ptr());
  } catch (const NotPlain&) {
    PyErr_Clear();
    return py::none();
  } catch (const py::error_already_set& error) {
    // Others, of torch and of Python, mean that the object is not plain. Python's pickler raises them if it has to.
    if (pickler.is_in_object() || !error.matches(PyExc_Exception)) throw;
    return py::none();
  }
}

}  // namespace fastpersist
