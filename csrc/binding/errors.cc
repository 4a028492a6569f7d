#include "binding/errors.h"

#include <pybind11/pybind11.h>

#include <cerrno>

namespace py = pybind11;

namespace fastpersist {
namespace {

py::object OptionalPath(const std::string& path) {
  return path.empty() ? py::object(py::none()) : py::object(FileSystemText(path));
}

void SetException(const Status& status, const std::string& path) {
  const py::module_ errors = py::module_::import("fastpersist.errors");
  const auto raise = [](const py::object& type, const py::object& value) { PyErr_SetObject(type.ptr(), value.ptr()); };
  const py::str message = FileSystemText(status.message());
  const auto storage_error = [&](const char* name, int sys_errno) {
    const py::object type = errors.attr(name);
    const py::object number = sys_errno == 0 ? py::object(py::none()) : py::object(py::int_(sys_errno));
    const py::object offset = status.offset_bytes() == Status::kNoOffset ? py::object(py::none())
                                                                         : py::object(py::int_(status.offset_bytes()));
    raise(type, type(number, message, OptionalPath(path), offset));
  };
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      return raise(errors.attr("ConfigError"), errors.attr("ConfigError")(message));
    case StatusCode::kUnsupported:
      return raise(errors.attr("UnsupportedError"), errors.attr("UnsupportedError")(message));
    case StatusCode::kIoError:
    case StatusCode::kEndOfFile:
      return storage_error("StorageError", status.sys_errno());
    case StatusCode::kNoSpace:
      return storage_error("NoSpaceError", status.sys_errno() == 0 ? ENOSPC : status.sys_errno());
    case StatusCode::kNoMemory:
      return storage_error("StorageError", status.sys_errno() == 0 ? ENOMEM : status.sys_errno());
    case StatusCode::kDeviceError:
      return raise(errors.attr("DeviceError"), errors.attr("DeviceError")(message));
    case StatusCode::kOk:
    case StatusCode::kCancelled:
    case StatusCode::kInternal:
      return raise(errors.attr("InternalError"), errors.attr("InternalError")(message));
  }
}

}  // namespace

py::str FileSystemText(const std::string& bytes) {
  PyObject* const text = PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

py::list FileSystemTexts(const std::vector<std::string>& texts) {
  py::list list;
  for (const std::string& text : texts) list.append(FileSystemText(text));
  return list;
}

void Throw(const Status& status, const std::string& path) {
  if (PyErr_Occurred() == nullptr) SetException(status, path);
  throw py::error_already_set();
}

}  // namespace fastpersist
