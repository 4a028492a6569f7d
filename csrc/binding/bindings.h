// The parts of the native module that have a file of their own; module.cc puts them together.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace fastpersist {

class Device;
// By torch's ordinal; raises what Device::Get says. Call it with the GIL.
Device& DeviceOf(int ordinal);

// A reference that may be copied and dropped without the GIL. Call this with the GIL.
std::shared_ptr<const pybind11::object> Shared(const pybind11::object& object);

void BindCuFile(pybind11::module_& m);        // cufile.cc
void BindDevices(pybind11::module_& m);       // devices.cc
void BindRandomAccess(pybind11::module_& m);  // random_access.cc
// Null where fault_plan.cc is not compiled in; set by it while the module is loaded.
inline void (*g_bind_fault_plan)(pybind11::module_& m) = nullptr;

}  // namespace fastpersist
