// The parts of the native module that have a file of their own; module.cc puts them together.
#pragma once

#include <pybind11/pybind11.h>

namespace fastpersist {

void BindFaultPlan(pybind11::module_& m);     // fault_plan.cc
void BindRandomAccess(pybind11::module_& m);  // random_access.cc

}  // namespace fastpersist
