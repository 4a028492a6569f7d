// The output of a pickler: opcodes, a byte buffer, and the memo of written objects, as in CPython's _pickle.c.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/address_table.h"

namespace fastpersist {

inline uintptr_t AddressOf(PyObject* object) { return reinterpret_cast<uintptr_t>(object); }

// The written objects, by identity, with their numbers. It holds a reference to each, as Python's memo does: otherwise
// the address of a temporary object could become another object's.
class Memo {
 public:
  struct Sizes {
    size_t known = 0, of_one_dict = 0;
  };

  Memo() = default;
  ~Memo() {
    numbers_.ForEachAddress([](uintptr_t address) { Py_DECREF(reinterpret_cast<PyObject*>(address)); });
    for (const auto& [object, number] : of_one_dict_) Py_DECREF(object);
  }
  Memo(const Memo&) = delete;
  Memo& operator=(const Memo&) = delete;

  // Returns the number of an object, or null.
  const uint32_t* Find(PyObject* object) const { return numbers_.Find(AddressOf(object)); }

  // Numbers an object, which was not numbered before, and returns its number.
  uint32_t Add(PyObject* object) {
    numbers_.FindOrAdd(AddressOf(Py_NewRef(object)), count_);
    return count_++;
  }

  // Numbers an object that nothing else refers to, so the pickler cannot meet it again.
  uint32_t AddUnseen() { return count_++; }

  // Numbers an object to which only the dict refers that is being written. The pickler can meet it again only through
  // code of an object, so it is not looked up until such code has run.
  uint32_t AddOfOneDict(PyObject* object) {
    if (knows_all_) return Add(object);
    of_one_dict_.emplace_back(Py_NewRef(object), count_);
    return count_++;
  }

  // From now on the pickler may meet any object again. Call this before code of an object runs.
  void KnowAll() {
    numbers_.Expect(numbers_.count() +
                    of_one_dict_.size());  // the rest cannot fail; a failure would drop objects twice
    knows_all_ = true;
    for (const auto& [object, number] : of_one_dict_) numbers_.FindOrAdd(AddressOf(object), number);
    of_one_dict_.clear();
  }

  void Expect(const Sizes& sizes) {
    numbers_.Expect(sizes.known);
    of_one_dict_.reserve(sizes.of_one_dict);
  }
  Sizes sizes() const { return {numbers_.count(), of_one_dict_.size()}; }

  bool knows_all() const { return knows_all_; }

 private:
  AddressTable numbers_;                                     // its objects are held
  std::vector<std::pair<PyObject*, uint32_t>> of_one_dict_;  // held, too
  bool knows_all_ = false;
  uint32_t count_ = 0;
};

// The opcodes of protocol 2, as Python's pickletools names them.
enum Opcode : char {
  kMark = '(',
  kStop = '.',
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

// A byte buffer that grows like a string. Appending a byte takes no call, and Finish returns a Python bytes object
// without a copy.
class Bytes {
 public:
  Bytes() : bytes_(PyBytes_FromStringAndSize(nullptr, 1 << 16)) {
    if (bytes_ == nullptr) throw pybind11::error_already_set();
    next_ = PyBytes_AS_STRING(bytes_);
    end_ = next_ + PyBytes_GET_SIZE(bytes_);
  }
  ~Bytes() { Py_XDECREF(bytes_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  void Put(char byte) {
    if (next_ == end_) Grow(1);
    *next_++ = byte;
  }

  // Returns a place for so many bytes; Taken() sets where they end.
  char* Room(size_t size) {
    if (size > size_t(end_ - next_)) Grow(size);
    return next_;
  }
  void Taken(char* end) { next_ = end; }

  void Append(std::string_view more) {
    std::memcpy(Room(more.size()), more.data(), more.size());
    next_ += more.size();
  }

  // Makes room for so many bytes in all; more may come.
  void Expect(size_t size) {
    if (size > size_t(PyBytes_GET_SIZE(bytes_))) GrowTo(Py_ssize_t(size));
  }
  size_t size() const { return size_t(next_ - PyBytes_AS_STRING(bytes_)); }

  // REQUIRES: nothing is appended afterwards.
  pybind11::object Finish() {
    Resize(Py_ssize_t(size()));
    return pybind11::reinterpret_steal<pybind11::object>(std::exchange(bytes_, nullptr));
  }

 private:
  [[gnu::noinline]] void Grow(size_t least) { GrowTo(2 * PyBytes_GET_SIZE(bytes_) + Py_ssize_t(least)); }

  void GrowTo(Py_ssize_t capacity) {
    const size_t used = size();
    Resize(capacity);
    next_ = PyBytes_AS_STRING(bytes_) + used;
    end_ = PyBytes_AS_STRING(bytes_) + PyBytes_GET_SIZE(bytes_);
  }

  void Resize(Py_ssize_t size) {
    if (_PyBytes_Resize(&bytes_, size) != 0) throw pybind11::error_already_set();  // it has dropped the bytes
  }

  PyObject* bytes_;
  char* next_ = nullptr;
  char* end_ = nullptr;
};

// How large a pickle is.
struct PickleSizes {
  size_t bytes = 0, storages = 0, tensors = 0;
  Memo::Sizes memo;
};

// The sizes of the largest recent pickle. A state with many tensors was probably saved before, so the buffer of its
// pickle is allocated in one step. Guarded by the GIL.
class ExpectedSizes {
 public:
  const PickleSizes& largest() const { return largest_; }

  void Note(const PickleSizes& sizes) {
    if (sizes.bytes < largest_.bytes && ++smaller_count_ < kSmallerCount) return;
    largest_ = sizes;
    smaller_count_ = 0;
  }

 private:
  static constexpr int kSmallerCount = 8;

  PickleSizes largest_;
  int smaller_count_ = 0;  // pickles since that one
};

}  // namespace fastpersist
