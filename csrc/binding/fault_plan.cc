// Lets tests make requests fail and read what was written; engine/fault_engine.h has the contract. Only test builds
// contain it (setup.py).
#include <pybind11/pybind11.h>

#include <string>

#include "binding/bindings.h"
#include "engine/fault_engine.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

void BindFaultPlan(py::module_& m) {
  py::class_<FaultPlan>(m, "FaultPlan")
      .def(py::init([](const std::string& op, uint64_t nth, uint64_t count, const std::string& kind, int sys_errno,
                       uint32_t short_bytes, uint32_t delay_ms) {
             FaultPlan plan;
             if (op == "read") {
               plan.op = IoOp::kRead;
             } else if (op == "write") {
               plan.op = IoOp::kWrite;
             } else if (op != "any") {
               throw py::value_error("op must be read, write or any, not " + op);
             }
             plan.nth = nth;
             plan.count = count;
             if (kind == "errno") {
               plan.kind = FaultPlan::Kind::kErrno;
             } else if (kind == "short") {
               plan.kind = FaultPlan::Kind::kShort;
             } else if (kind == "zero") {
               plan.kind = FaultPlan::Kind::kZero;
             } else if (kind == "delay") {
               plan.kind = FaultPlan::Kind::kDelay;
             } else {
               throw py::value_error("kind must be errno, short, zero or delay, not " + kind);
             }
             plan.sys_errno = sys_errno;
             plan.short_bytes = short_bytes;
             plan.delay_ms = delay_ms;
             return plan;
           }),
           py::kw_only(), py::arg("op") = "any", py::arg("nth") = 1, py::arg("count") = 1, py::arg("kind") = "errno",
           py::arg("sys_errno") = 5, py::arg("short_bytes") = 512, py::arg("delay_ms") = 0);
  m.def("set_fault_plan", &SetFaultPlan, py::arg("plan"));
  m.def("clear_fault_plan", &ClearFaultPlan);
  m.def("set_write_recording", &SetWriteRecording, py::arg("on"));
  m.def("take_recorded_writes", [] {
    py::list writes;
    for (const RecordedWrite& write : TakeRecordedWrites()) {
      writes.append(py::make_tuple(write.offset_bytes, py::bytes(write.data)));
    }
    return writes;
  });
}

[[maybe_unused]] const bool g_registered = (g_bind_fault_plan = BindFaultPlan, true);

}  // namespace

}  // namespace fastpersist
