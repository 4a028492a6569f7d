#include "binding/type_filter.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

PyObject* Answer(PyObject* self, PyObject* object) {
  // `self` is the tuple (uninteresting, otherwise).
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  const int known = PyDict_Contains(PyTuple_GET_ITEM(self, 0), type);
  if (known < 0) return nullptr;
  if (known == 1) Py_RETURN_NONE;
  return PyObject_CallOneArg(PyTuple_GET_ITEM(self, 1), object);
}

PyMethodDef g_method = {"answer", Answer, METH_O,
                        "None for objects of uninteresting types, else the result of the callable."};

}  // namespace

py::object MakeTypeFilter(const py::dict& uninteresting, const py::object& otherwise) {
  const py::tuple self = py::make_tuple(uninteresting, otherwise);
  PyObject* const function = PyCFunction_New(&g_method, self.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

}  // namespace fastpersist
