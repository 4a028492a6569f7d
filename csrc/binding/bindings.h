// Declares the parts of the native module that have files of their own; module.cc joins them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace fastpersist {

class Device;
class PieceList;
// Returns the device with torch's ordinal; raises the error of Device::Get. REQUIRES: the GIL is held.
Device& DeviceOf(int ordinal);

// Returns a reference that may be copied and dropped without the GIL. REQUIRES of this call: the GIL is held.
std::shared_ptr<const pybind11::object> Shared(const pybind11::object& object);

void BindCuFile(pybind11::module_& m);                                           // cufile.cc
void BindDevices(pybind11::module_& m);                                          // devices.cc
void BindHeldSources(pybind11::module_& m);                                      // held_sources.cc
void BindRandomAccess(pybind11::module_& m);                                     // random_access.cc
void BindRows(pybind11::module_& m);                                             // rows.cc
void BindZipRecords(pybind11::module_& m, pybind11::class_<PieceList>& pieces);  // zip_records.cc
// fault_plan.cc sets it while the module is loaded; null in builds without that file.
inline void (*g_bind_fault_plan)(pybind11::module_& m) = nullptr;

}  // namespace fastpersist
