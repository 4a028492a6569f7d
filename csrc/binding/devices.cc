// Devices for Python: reports the driver's state, and orders copies against the caller's streams.
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "binding/bindings.h"
#include "binding/errors.h"
#include "binding/gil.h"
#include "core/pinned_cache.h"
#include "device/device.h"
#include "device/pinning.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

std::string CudaWhyNot() {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() ? "" : driver.status().message();
}

void FollowCaller(int device, uintptr_t stream, bool to_host) {
  Device& followed = DeviceOf(device);
  const auto follow = [&] { return (to_host ? followed.to_host() : followed.to_device()).FollowCaller(stream); };
  ThrowIfError(WithoutGil(follow), "");  // it waits while the stream is full
}

}  // namespace

Device& DeviceOf(int ordinal) {
  Result<Device*> device = Device::Get(ordinal);
  ThrowIfError(device.status(), "");
  return *device.value();
}

void BindDevices(py::module_& m) {
  m.def("cuda_why_not", &CudaWhyNot);
  m.def("follow_caller", &FollowCaller, py::arg("device"), py::arg("stream"), py::arg("to_host"));
  m.def(
      "set_device_grace_s",
      [](double grace_s) { Grace::Set(std::chrono::milliseconds(static_cast<int64_t>(grace_s * 1e3))); },
      py::arg("grace_s"));
  m.def("why_not_pinned", [] { return FileSystemText(WhyNotPinned()); });
  m.def("pinned_bytes", &PinnedBytes);
  m.def("pinned_cache_bytes", &PinnedCacheBytes, py::call_guard<ReleasedGil>());
  m.def("empty_pinned_cache", &EmptyPinnedCache, py::call_guard<ReleasedGil>());
}

}  // namespace fastpersist
