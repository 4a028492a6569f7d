#include "device/cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "core/fork.h"

namespace fastpersist {
namespace {

constexpr int kOldestVersion = 11000;

constexpr CudaResult kNotInitialized = 3;
constexpr CudaResult kStubLibrary = 34;
constexpr CudaResult kDeviceUnavailable = 46;
constexpr CudaResult kNoDevice = 100;

// After one of these, every further call of this process for that device fails with the same error.
constexpr std::array<CudaResult, 19> kLost = {
    4,    // DEINITIALIZED
    100,  // NO_DEVICE
    214,  // ECC_UNCORRECTABLE
    220,  // NVLINK_UNCORRECTABLE
    226,  // CONTAINED
    700,  // ILLEGAL_ADDRESS
    702,  // LAUNCH_TIMEOUT
    709,  // CONTEXT_IS_DESTROYED
    710,  // ASSERT
    714,  // HARDWARE_STACK_ERROR
    715,  // ILLEGAL_INSTRUCTION
    716,  // MISALIGNED_ADDRESS
    717,  // INVALID_ADDRESS_SPACE
    718,  // INVALID_PC
    719,  // LAUNCH_FAILED
    721,  // TENSOR_MEMORY_LEAK
    810,  // MPS_CLIENT_TERMINATED
    911,  // EXTERNAL_DEVICE
    999,  // UNKNOWN
};

// Atomics without a lock, so a fork at any moment leaves them usable. The driver's table is never freed, since other
// threads' transfers may outlive the interpreter's shutdown.
std::atomic<const CudaDriver*> g_driver{nullptr};
// The fork generation + 1 of the process that called cuInit; 0 if none did. Set before the call, so that a child forked
// during the call sees it.
std::atomic<uint64_t> g_used_by{0};
std::atomic<bool> g_ending{false};

Status Unsupported(std::string message) { return Status::Error(StatusCode::kUnsupported, std::move(message)); }

Status ForkedAfterUse() {
  return Unsupported(
      "this process was forked after CUDA was used, and a child cannot use its parent's CUDA: start it with the spawn "
      "or the forkserver method of multiprocessing");
}

// The error of a call that initialises the driver.
Status StartError(const CudaDriver& driver, CudaResult result, const char* call) {
  switch (result) {
    case kNotInitialized:  // the parent used CUDA without us
      return ForkedAfterUse();
    case kStubLibrary:
      return Unsupported("libcuda.so.1 is the stub of the CUDA toolkit: take its directory out of LD_LIBRARY_PATH");
    case kNoDevice:
      return Unsupported("the NVIDIA driver shows this process no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES");
    default:
      return Unsupported("the NVIDIA driver does not start, which nvidia-smi or dmesg may explain: " +
                         driver.Check(result, call).message());
  }
}

Status Load(CudaDriver& driver) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // a library once loaded stays
  if (library == nullptr) {
    const char* const reason = dlerror();  // NOLINT(concurrency-mt-unsafe): of the calling thread, in glibc and musl
    return Unsupported("the NVIDIA driver cannot be loaded (" + std::string(reason == nullptr ? "dlopen" : reason) +
                       "): install it, or start the container with its GPUs (--gpus all)");
  }
  const char* missing = nullptr;
  const auto find = [&]<class Function>(Function*& function, const char* symbol) {
    function = reinterpret_cast<Function*>(dlsym(library, symbol));
    if (function == nullptr && missing == nullptr) missing = symbol;
  };
  find(driver.Init, "cuInit");
  find(driver.DriverGetVersion, "cuDriverGetVersion");
  find(driver.GetErrorName, "cuGetErrorName");
  find(driver.GetErrorString, "cuGetErrorString");
  find(driver.DeviceGetCount, "cuDeviceGetCount");
  find(driver.DeviceGet, "cuDeviceGet");
  find(driver.DeviceGetPCIBusId, "cuDeviceGetPCIBusId");
  find(driver.DeviceGetAttribute, "cuDeviceGetAttribute");
  find(driver.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(driver.CtxPushCurrent, "cuCtxPushCurrent_v2");
  find(driver.CtxPopCurrent, "cuCtxPopCurrent_v2");
  find(driver.StreamCreate, "cuStreamCreate");
  find(driver.StreamQuery, "cuStreamQuery");
  find(driver.StreamSynchronize, "cuStreamSynchronize");
  find(driver.StreamWaitEvent, "cuStreamWaitEvent");
  find(driver.EventCreate, "cuEventCreate");
  find(driver.EventRecord, "cuEventRecord");
  find(driver.EventQuery, "cuEventQuery");
  find(driver.MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  find(driver.MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  find(driver.MemHostRegister, "cuMemHostRegister_v2");
  find(driver.MemHostUnregister, "cuMemHostUnregister");
  find(driver.MemGetAddressRange, "cuMemGetAddressRange_v2");
  find(driver.MemAlloc, "cuMemAlloc_v2");
  find(driver.MemFree, "cuMemFree_v2");
  find(driver.MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
  find(driver.MemsetD8Async, "cuMemsetD8Async");
  find(driver.ModuleLoadData, "cuModuleLoadData");
  find(driver.ModuleGetFunction, "cuModuleGetFunction");
  find(driver.LaunchKernel, "cuLaunchKernel");
  find(driver.StreamIsCapturing, "cuStreamIsCapturing");
  find(driver.ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  if (missing != nullptr) {
    return Unsupported("libcuda.so.1 has no " + std::string(missing) +
                       ": install an NVIDIA driver for CUDA 11.0 or later");
  }
  int version = 0;
  const CudaResult result = driver.DriverGetVersion(&version);
  if (result != kCudaSuccess) return StartError(driver, result, "cuDriverGetVersion");
  if (version < kOldestVersion) {
    return Unsupported("the NVIDIA driver is for CUDA " + std::to_string(version / 1000) + "." +
                       std::to_string(version % 1000 / 10) + ": install one for CUDA 11.0 or later");
  }
  return Status::Ok();
}

// Whether this process may call a driver.
Status Allowed() {
  const uint64_t used_by = g_used_by.load(std::memory_order_acquire);
  if (used_by != 0 && used_by != ForkGeneration() + 1) return ForkedAfterUse();
  if (g_ending.load(std::memory_order_relaxed))
    return Unsupported("the process is ending, and the NVIDIA driver with it");
  return Status::Ok();
}

}  // namespace

Result<const CudaDriver*> CudaDriver::Get() {
  FP_RETURN_IF_ERROR(Allowed());
  if (const CudaDriver* const driver = g_driver.load(std::memory_order_acquire); driver != nullptr) return driver;
  // Several threads may be here at once; a second load and initialisation does nothing.
  auto fresh = std::make_unique<CudaDriver>();
  FP_RETURN_IF_ERROR(Load(*fresh));
  g_used_by.store(ForkGeneration() + 1, std::memory_order_release);
  const CudaResult result = fresh->Init(0);
  if (result != kCudaSuccess) {
    if (g_driver.load(std::memory_order_acquire) == nullptr) g_used_by.store(0, std::memory_order_release);
    return StartError(*fresh, result, "cuInit");
  }
  const CudaDriver* first = nullptr;
  if (!g_driver.compare_exchange_strong(first, fresh.get())) return first;
  // Registered after cuInit, so that it runs before the driver's own exit handlers.
  (void)std::atexit([] { g_ending.store(true, std::memory_order_relaxed); });
  return fresh.release();
}

Status CudaDriver::Present() {
  FP_RETURN_IF_ERROR(Allowed());
  if (g_driver.load(std::memory_order_acquire) != nullptr) return Status::Ok();
  CudaDriver driver = {};
  return Load(driver);
}

bool CudaDriver::IsLost(CudaResult result) { return std::find(kLost.begin(), kLost.end(), result) != kLost.end(); }

Status CudaDriver::Check(CudaResult result, std::string_view operation) const {
  if (result == kCudaSuccess) return Status::Ok();
  std::string message(operation);
  const char* name = nullptr;
  const char* text = nullptr;
  if (GetErrorName(result, &name) == kCudaSuccess && name != nullptr) {
    message.append(": ").append(name);
  } else {
    message.append(": CUDA error ").append(std::to_string(result));
  }
  if (GetErrorString(result, &text) == kCudaSuccess && text != nullptr) message.append(" (").append(text).append(")");
  if (IsLost(result)) {
    message.append("; this process cannot use the device any more, a new one may; saves of CPU tensors go on");
  } else if (result == kDeviceUnavailable) {
    message.append(
        "; another process has the device for itself, or its compute mode forbids to use it (nvidia-smi shows both), "
        "so this process cannot use the device; saves of CPU tensors go on");
  }
  return Status::Error(StatusCode::kDeviceError, std::move(message));
}

}  // namespace fastpersist
