// The C interface of the CUDA driver, loaded from libcuda.so.1 of the kernel driver: building and running need no
// toolkit, header or CUDA runtime, and one build serves every torch and every CUDA since 11. Names carry their version
// (`_v2`) where cuda.h would add it. device.h adds streams and marks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/status.h"

namespace fastpersist {

using CudaResult = int;
using CudaDeviceId = int;
using CudaAddress = uint64_t;  // CUdeviceptr
using CudaContext = struct CudaContextTag*;
using CudaStream = struct CudaStreamTag*;  // null: the legacy default stream
using CudaEvent = struct CudaEventTag*;
using CudaModule = struct CudaModuleTag*;
using CudaFunction = struct CudaFunctionTag*;

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr CudaResult kCudaCaptureImplicit = 906;   // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
constexpr unsigned kCudaStreamNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned kCudaEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
constexpr unsigned kCudaHostRegisterPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts
constexpr int kCudaCaptureModeRelaxed = 2;         // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kCudaReadsHostPointers = 91;         // CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

struct CudaDriver {
  // NOLINTBEGIN(readability-identifier-naming): the names of the driver
  CudaResult (*Init)(unsigned flags);            // cuInit
  CudaResult (*DriverGetVersion)(int* version);  // 12040 is 12.4
  CudaResult (*GetErrorName)(CudaResult error, const char** name);
  CudaResult (*GetErrorString)(CudaResult error, const char** text);
  CudaResult (*DeviceGetCount)(int* count);
  CudaResult (*DeviceGet)(CudaDeviceId* device, int ordinal);
  CudaResult (*DeviceGetPCIBusId)(char* text, int size, CudaDeviceId device);
  CudaResult (*DeviceGetAttribute)(int* value, int attribute, CudaDeviceId device);
  CudaResult (*DevicePrimaryCtxRetain)(CudaContext* context, CudaDeviceId device);
  CudaResult (*CtxPushCurrent)(CudaContext context);  // cuCtxPushCurrent_v2
  CudaResult (*CtxPopCurrent)(CudaContext* context);  // cuCtxPopCurrent_v2
  CudaResult (*StreamCreate)(CudaStream* stream, unsigned flags);
  CudaResult (*StreamQuery)(CudaStream stream);
  CudaResult (*StreamSynchronize)(CudaStream stream);
  CudaResult (*StreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaResult (*EventCreate)(CudaEvent* event, unsigned flags);
  CudaResult (*EventRecord)(CudaEvent event, CudaStream stream);
  CudaResult (*EventQuery)(CudaEvent event);
  CudaResult (*MemcpyDtoHAsync)(void* target, CudaAddress source, size_t size_bytes, CudaStream stream);  // …_v2
  CudaResult (*MemcpyHtoDAsync)(CudaAddress target, const void* source, size_t size_bytes, CudaStream stream);
  CudaResult (*MemHostRegister)(void* memory, size_t size_bytes, unsigned flags);  // cuMemHostRegister_v2
  CudaResult (*MemHostUnregister)(void* memory);
  CudaResult (*MemGetAddressRange)(CudaAddress* base, size_t* size_bytes, CudaAddress address);                 // …_v2
  CudaResult (*MemAlloc)(CudaAddress* address, size_t size_bytes);                                              // …_v2
  CudaResult (*MemFree)(CudaAddress address);                                                                   // …_v2
  CudaResult (*MemcpyDtoDAsync)(CudaAddress target, CudaAddress source, size_t size_bytes, CudaStream stream);  // …_v2
  CudaResult (*MemsetD8Async)(CudaAddress target, unsigned char value, size_t size_bytes, CudaStream stream);
  CudaResult (*ModuleLoadData)(CudaModule* module, const void* image);
  CudaResult (*ModuleGetFunction)(CudaFunction* function, CudaModule module, const char* name);
  CudaResult (*LaunchKernel)(CudaFunction function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                             unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                             CudaStream stream, void** arguments, void** extra);
  CudaResult (*StreamIsCapturing)(CudaStream stream, int* status);  // 0: it is not
  CudaResult (*ThreadExchangeStreamCaptureMode)(int* mode);         // swaps the calling thread's mode and *mode
  // NOLINTEND(readability-identifier-naming)

  // Returns the driver of this process; the first call that succeeds loads and initialises it, later ones are cheap.
  // kUnsupported, with the reason in one sentence: no driver, one without these calls, cuInit failed, the process is
  // ending, or it was forked after CUDA was used here (a child cannot use its parent's CUDA). Thread-safe.
  static Result<const CudaDriver*> Get();

  // Whether there is a driver with these calls. Does not call cuInit, which would make CUDA unusable in children forked
  // later. Thread-safe.
  static Status Present();

  // Returns Ok for kCudaSuccess, else a kDeviceError "<operation>: <CUDA_ERROR_NAME> (<text>)", which also says if the
  // process cannot use the device any more.
  Status Check(CudaResult result, std::string_view operation) const;
  // Whether this result means that the device is lost to this process, so it makes no further copies.
  static bool IsLost(CudaResult result);
};

}  // namespace fastpersist
