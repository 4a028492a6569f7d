#include "binding/plain_pickler.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fastpersist {
namespace {

// Thrown where only Python's pickler can go on.
struct NotPlain : std::exception {};

// Numbers by address, of objects or of memory.
class AddressTable {
 public:
  AddressTable() : slots_(1024) {}

  // Returns the number of an address, or null. Address 0 has none.
  const uint32_t* Find(uintptr_t address) const {
    const Slot& slot = slots_[IndexOf(slots_, address)];
    return slot.address == 0 ? nullptr : &slot.number;
  }

  // REQUIRES: the address is not 0 and has no number.
  void Add(uintptr_t address, uint32_t number) {
    if (2 * ++used_ > slots_.size()) Grow();
    slots_[IndexOf(slots_, address)] = {address, number};
  }

 private:
  struct Slot {
    uintptr_t address = 0;
    uint32_t number = 0;
  };

  static size_t IndexOf(const std::vector<Slot>& slots, uintptr_t address) {
    const size_t mask = slots.size() - 1;
    size_t index = (address >> 4) * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (slots[index].address != 0 && slots[index].address != address) index = (index + 1) & mask;
    return index;
  }

  void Grow() {
    std::vector<Slot> larger(4 * slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.address != 0) larger[IndexOf(larger, slot.address)] = slot;
    }
    slots_ = std::move(larger);
  }

  std::vector<Slot> slots_;  // a power of two, at most half of them used
  size_t used_ = 0;
};

uintptr_t AddressOf(PyObject* object) { return reinterpret_cast<uintptr_t>(object); }

// Objects that were written, by identity, with their numbers. It holds a reference to each, as Python's does: the
// identity of an object that was made on the way must not become another's.
class Memo {
 public:
  Memo() = default;
  ~Memo() {
    for (PyObject* const object : held_) Py_DECREF(object);
  }
  Memo(const Memo&) = delete;
  Memo& operator=(const Memo&) = delete;

  // Returns the number of an object, or null.
  const uint32_t* Find(PyObject* object) const { return numbers_.Find(AddressOf(object)); }

  // Numbers an object, which was not numbered before, and returns its number.
  uint32_t Add(PyObject* object) {
    held_.push_back(Py_NewRef(object));
    numbers_.Add(AddressOf(object), count_);
    return count_++;
  }

  // Numbers an object to which nobody refers, so that it cannot come again.
  uint32_t AddUnseen() { return count_++; }

 private:
  AddressTable numbers_;
  std::vector<PyObject*> held_;
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

uint64_t AsUnsigned(const py::object& number) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// An attribute of a class, or a method without arguments. It is looked up once: with thousands of tensors, each lookup
// takes as long as the answer.
class Asked {
 public:
  Asked(const py::object& type, const char* name)
      : descriptor_(type.attr(name)), is_attribute_(Py_TYPE(descriptor_.ptr())->tp_descr_set != nullptr) {}

  // REQUIRES: the object is of that class or of one derived from it.
  py::object Of(PyObject* object) const {
    if (!is_attribute_) return Taken(PyObject_CallOneArg(descriptor_.ptr(), object));
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return Taken(Py_TYPE(descriptor_.ptr())->tp_descr_get(descriptor_.ptr(), object, type));
  }

  bool IsTrueOf(PyObject* object) const { return Of(object).ptr() == Py_True; }

 private:
  const py::object descriptor_;
  const bool is_attribute_;
};

// What is asked of a tensor.
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
        is_cpu(tensor, "is_cpu"),
        is_cuda(tensor, "is_cuda"),
        dict(tensor, "__dict__") {}

  const Asked untyped_storage, storage_offset, shape, stride, requires_grad, dtype, backward_hooks;
  const Asked is_neg, is_conj, is_cpu, is_cuda, dict;
};

// Names of attributes and methods, and texts of a pickle, each made once.
struct Names {
  PyObject* const has_names = Interned("has_names");
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

// Grows like a string, but a byte takes no call.
class Bytes {
 public:
  void Put(char byte) {
    if (size_ == bytes_.size()) bytes_.resize(2 * size_);
    bytes_[size_++] = byte;
  }

  void Append(std::string_view more) {
    if (more.size() > bytes_.size() - size_) bytes_.resize(2 * bytes_.size() + more.size());
    std::memcpy(bytes_.data() + size_, more.data(), more.size());
    size_ += more.size();
  }

  std::string_view view() const { return {bytes_.data(), size_}; }

 private:
  std::string bytes_ = std::string(1 << 16, '\0');
  size_t size_ = 0;
};

class PlainPickler {
 public:
  explicit PlainPickler(const TorchTypes& torch)
      : torch_(torch),
        of_tensor_(torch.tensor),
        bytes_of_storage_(torch.storage, "nbytes"),
        address_of_storage_(torch.storage, "data_ptr"),
        key_of_storage_(torch.storage, "_cdata"),
        dispatch_table_(py::module_::import("copyreg").attr("dispatch_table")) {}

  // Whether code of the object itself runs, or has raised an error.
  bool is_in_object() const { return is_in_object_; }

  py::object Pickle(PyObject* object) {
    Put(kProto);
    Put('\x02');
    Save(object);
    Put(kStop);
    py::list sizes(storages_.size());
    for (size_t i = 0; i < storages_.size(); i++) sizes[i] = py::int_(storages_[i].size_bytes);
    const py::object facts =
        has_run_code_ ? py::none() : py::object(py::make_tuple(keys_, addresses_, sizes, are_on_host_));
    return py::make_tuple(py::bytes(out_.view()), live_storages_, facts, holders_, held_);
  }

 private:
  struct Storage {
    uint64_t size_bytes = 0;
    uint32_t key = 0;                // number of the text that is its key in the file
    PyObject* only_class = nullptr;  // the one that may stand for it; null: it has no address, and any may
  };

  // --- bytes

  void Put(char byte) { out_.Put(byte); }

  void Put32(uint32_t value) {
    for (int shift = 0; shift < 32; shift += 8) Put(char(value >> shift));
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

  void PutText(std::string_view text) {
    Put(kBinUnicode);
    Put32(uint32_t(text.size()));
    out_.Append(text);
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
    const py::handle number(object);
    const uint64_t bits = AsUnsigned(number.attr(N().bit_length)());
    const auto bytes = number.attr("to_bytes")(bits / 8 + 1, "little", py::arg("signed") = true).cast<std::string>();
    size_t size = bytes.size();
    // Python leaves out one byte of signs, of negative numbers only.
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

  void SaveText(PyObject* object) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr || size > Py_ssize_t(UINT32_MAX)) throw NotPlain{};
    PutText({text, size_t(size)});
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
    out_.Append(opcode.cast<std::string_view>());
    Memoize(object);
  }

  void SaveOther(PyObject* object) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (!ordinary_types_.contains(type)) {
      if (!torch_.is_ordinary(py::handle(object)).cast<bool>()) throw NotPlain{};
      ordinary_types_.insert(type);
    }
    if (type == torch_.ordered_dict.ptr() && PyDict_GET_SIZE(object) == 0 &&
        PyDict_GET_SIZE(py::handle(object).attr(N().dict).ptr()) == 0) {
      PutEmptyOrderedDict();
      return Memoize(object);
    }
    py::object reduced;
    has_run_code_ = has_run_code_ || type != torch_.ordered_dict.ptr();
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
    const py::object attributes = Taken(PyObject_GenericGetDict(tensor, nullptr));
    return PyDict_GET_SIZE(attributes.ptr()) != 0;
  }

  void SaveTensor(PyObject* tensor) {
    if (HasAttributes(tensor) || !of_tensor_.backward_hooks.Of(tensor).is_none()) throw NotPlain{};
    PutTensor(tensor, of_tensor_.requires_grad.IsTrueOf(tensor));
    Memoize(tensor);
  }

  // torch reduces it to its data, a tensor of the same storage that requires no gradient.
  void SaveParameter(PyObject* parameter) {
    if (HasAttributes(parameter)) throw NotPlain{};
    Save(torch_.rebuild_parameter.ptr());
    PutTensor(parameter, false);
    MemoizeUnseen();
    Put(of_tensor_.requires_grad.IsTrueOf(parameter) ? kNewTrue : kNewFalse);
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
    const bool is_on_host = of_tensor_.is_cpu.IsTrueOf(tensor);
    if (!is_on_host && !of_tensor_.is_cuda.IsTrueOf(tensor)) throw NotPlain{};
    if (of_tensor_.is_neg.IsTrueOf(tensor) || of_tensor_.is_conj.IsTrueOf(tensor)) throw NotPlain{};
    if (torch_.may_have_names && py::handle(tensor).attr(N().has_names)().ptr() == Py_True) throw NotPlain{};
    const py::object dtype = of_tensor_.dtype.Of(tensor);
    PyObject* const rebuild = PyDict_GetItemWithError(torch_.rebuild_by_dtype.ptr(), dtype.ptr());
    if (rebuild == nullptr) throw NotPlain{};
    Save(PyTuple_GET_ITEM(rebuild, 0));
    Put(kMark);
    PutStorage(tensor, is_on_host, PyTuple_GET_ITEM(rebuild, 1),
               PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(rebuild, 2)));
    SaveInt(of_tensor_.storage_offset.Of(tensor).ptr());
    PutNumbers(of_tensor_.shape.Of(tensor));
    PutNumbers(of_tensor_.stride.Of(tensor));
    Put(requires_grad ? kNewTrue : kNewFalse);
    PutEmptyOrderedDict();
    MemoizeUnseen();
    if (PyTuple_GET_ITEM(rebuild, 3) == Py_True) Save(dtype.ptr());
    Put(kTuple);
    MemoizeUnseen();
    Put(kReduce);
  }

  void PutStorage(PyObject* tensor, bool is_on_host, PyObject* storage_class, uint64_t element_bytes) {
    const py::object live = of_tensor_.untyped_storage.Of(tensor);
    const uint32_t* const known = index_of_storage_.Find(AddressOf(live.ptr()));
    const auto index = known == nullptr ? uint32_t(storages_.size()) : *known;
    if (known == nullptr) {
      index_of_storage_.Add(AddressOf(live.ptr()), index);
      live_storages_.append(live);
      storages_.push_back({.size_bytes = AsUnsigned(bytes_of_storage_.Of(live.ptr()))});
      keys_.append(key_of_storage_.Of(live.ptr()));
      addresses_.append(address_of_storage_.Of(live.ptr()));
      are_on_host_ = are_on_host_ && is_on_host;
      const uint64_t address = AsUnsigned(addresses_[index]);
      // A ZeroTensor has no address, and storages of two dtypes at one address are an error.
      if (address == 0 && storages_.back().size_bytes > 0) throw NotPlain{};
      if (address != 0) storages_.back().only_class = OnlyClassAt(address, index, storage_class);
    }
    Storage& storage = storages_[index];
    if (storage.only_class != nullptr && storage.only_class != storage_class) throw NotPlain{};
    holders_.append(py::handle(tensor));
    held_.append(index);
    Put(kMark);
    Save(N().storage);
    Save(storage_class);
    if (known == nullptr) {
      std::array<char, 10> digits;
      PutText({digits.data(), std::to_chars(digits.begin(), digits.end(), index).ptr});
      storage.key = memo_.AddUnseen();
      PutNumbered(kBinPut, kLongBinPut, storage.key);
    } else {
      PutNumbered(kBinGet, kLongBinGet, storage.key);
    }
    Save(is_on_host && torch_.is_host_tagged_cpu ? N().cpu : torch_.location_of(live).ptr());
    const uint64_t element_count = storage.size_bytes / element_bytes;
    if (element_count <= INT32_MAX) {
      PutInt(int32_t(element_count));
    } else {
      SaveInt(py::int_(element_count).ptr());
    }
    Put(kTuple);
    MemoizeUnseen();
    Put(kBinPersId);
  }

  // Returns the class of the first storage at an address.
  PyObject* OnlyClassAt(uint64_t address, uint32_t index, PyObject* storage_class) {
    if (const uint32_t* const first = first_at_.Find(address)) return storages_[*first].only_class;
    first_at_.Add(address, index);
    return storage_class;
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
  const TensorFacts of_tensor_;
  const Asked bytes_of_storage_, address_of_storage_, key_of_storage_;
  const py::dict dispatch_table_;
  bool is_in_object_ = false;
  bool has_run_code_ = false;  // of an object; it may have changed storages that were met before
  Bytes out_;
  Memo memo_;
  std::unordered_set<PyObject*> ordinary_types_;
  std::vector<Storage> storages_;
  AddressTable index_of_storage_;  // by the storage's object, which live_storages_ holds
  AddressTable first_at_;          // the first storage at an address
  py::list live_storages_;
  py::list keys_;       // of each what identifies it while it lives: its _cdata
  py::list addresses_;  // of each
  bool are_on_host_ = true;
  py::list holders_;  // the tensors
  py::list held_;     // of each the index of its storage
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
