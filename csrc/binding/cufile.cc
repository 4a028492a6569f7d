// GPUDirect Storage for Python: sets its library's path, reports its state, and provides device memory for trying it.
#include "device/cufile.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "binding/bindings.h"
#include "binding/errors.h"
#include "binding/gil.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

std::string WhyNot() {
  const ReleasedGil released;  // opening looks for every device and every file system
  return CuFile::Get().status().message();
}

std::string DriverWhyNot() {
  const ReleasedGil released;
  return CudaDriver::Present().message();
}

std::tuple<uint64_t, uint64_t, uint64_t> Traffic() {
  Result<CuFile*> cufile = CuFile::Get();
  ThrowIfError(cufile.status(), "");
  Result<CuFileTraffic> traffic = cufile.value()->Traffic();
  ThrowIfError(traffic.status(), "");
  const CuFileTraffic& counts = traffic.value();
  return {counts.p2p_count, counts.nvfs_count, counts.posix_count};
}

// All buffers of a staging area, for run_requests.
class StagingBuffers {
 public:
  StagingBuffers(int device, size_t buffer_count, size_t buffer_bytes) {
    Device& owner = DeviceOf(device);
    Result<std::unique_ptr<DeviceStaging>> made =
        WithoutGil([&] { return DeviceStaging::Create(owner, buffer_count, buffer_bytes); });
    ThrowIfError(made.status(), "");
    staging_ = std::move(made).value();
    while (std::byte* const buffer = staging_->Take()) buffers_.push_back(buffer);
  }
  ~StagingBuffers() {
    for (std::byte* const buffer : buffers_) staging_->Put(buffer);
  }
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  std::vector<uintptr_t> addresses() const {
    std::vector<uintptr_t> addresses;
    addresses.reserve(buffers_.size());
    for (std::byte* const buffer : buffers_) addresses.push_back(reinterpret_cast<uintptr_t>(buffer));
    return addresses;
  }

 private:
  std::unique_ptr<DeviceStaging> staging_;
  std::vector<std::byte*> buffers_;
};

}  // namespace

void BindCuFile(py::module_& m) {
  m.def("cuda_driver_why_not", &DriverWhyNot);
  m.def(
      "cufile_configure",
      [](const py::bytes& library_path, int host_device) { CuFile::Configure(library_path, host_device); },
      py::arg("library_path"), py::arg("host_device"));
  m.def("cufile_why_not", &WhyNot);
  m.def("cufile_traffic", &Traffic);
  py::class_<StagingBuffers>(m, "StagingBuffers")
      .def(py::init<int, size_t, size_t>(), py::arg("device"), py::arg("buffer_count"), py::arg("buffer_bytes"))
      .def_property_readonly("addresses", &StagingBuffers::addresses);
}

}  // namespace fastpersist
