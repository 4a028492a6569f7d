// Reads properties of tensors and storages through torch's Python types.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace fastpersist {

// Takes what a call of Python's C API has returned.
inline pybind11::object Taken(PyObject* made) {
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

inline uint64_t AsUnsigned(pybind11::handle number) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

// Stands for the version of a tensor that has no version counter.
constexpr int64_t kNoVersion = -1;

// An attribute of a class, or a method without arguments. It is looked up once, and its C function is called directly:
// with thousands of tensors, the interpreter's usual path would take as long as the function itself.
class [[gnu::visibility("hidden")]] Asked {
 public:
  Asked(const pybind11::object& type, const char* name) : descriptor_(type.attr(name)) {
    PyObject* const descriptor = descriptor_.ptr();
    if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
      attribute_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
      if (attribute_->get == nullptr) attribute_ = nullptr;
    } else if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type)) {
      const PyMethodDef* const method = reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method;
      if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
    }
  }

  // REQUIRES: the object is of that class or of one derived from it.
  pybind11::object Of(PyObject* object) const {
    if (attribute_ != nullptr) return Taken(attribute_->get(object, attribute_->closure));
    if (method_ != nullptr) return Taken(method_(object, nullptr));
    PyObject* const descriptor = descriptor_.ptr();
    if (Py_TYPE(descriptor)->tp_descr_set == nullptr) return Taken(PyObject_CallOneArg(descriptor, object));
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return Taken(Py_TYPE(descriptor)->tp_descr_get(descriptor, object, type));
  }

  bool IsTrueOf(PyObject* object) const { return Of(object).ptr() == Py_True; }

 private:
  const pybind11::object descriptor_;
  const PyGetSetDef* attribute_ = nullptr;
  PyCFunction method_ = nullptr;
};

// A tensor's version (its count of in-place changes), which `ask` reads from Python; kNoVersion for an inference
// tensor, which has no counter.
template <class Ask>
int64_t VersionSaid(const Ask& ask) {
  try {
    return static_cast<pybind11::object>(ask()).template cast<int64_t>();
  } catch (const pybind11::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    return kNoVersion;
  }
}

}  // namespace fastpersist
