// What we declare of the CUDA driver (csrc/device/cuda_driver), and what its double exports, against NVIDIA's cuda.h.
// It is compiled, not linked: it says all that it has to say by static_assert. check_abi.py makes abi_symbols.h from
// our sources and from that header, and compiles this for each version of it.
#include <cuda.h>

// Its constants and its table of errors are its own.
#include "device/cuda_driver.cc"
#include "same_abi.h"
// clang-format off
#include "../support/cuda_double/machine.h"
#include "abi_symbols.h"
// clang-format on

namespace fastpersist {
namespace {

// --- calls ---

#define FP_ABI_COUNT(member, symbol) +1
static_assert(sizeof(CudaDriver) == sizeof(void*) * (0 FP_ABI_DRIVER_CALLS(FP_ABI_COUNT)),
              "a function of CudaDriver is looked up twice or never");

#define FP_ABI_CALL(member, symbol)   \
  FP_ABI_IS_ITS_OWN(#symbol, symbol); \
  static_assert(abi::kSameCall<decltype(CudaDriver::member), decltype(symbol)>, #symbol);
FP_ABI_DRIVER_CALLS(FP_ABI_CALL)

using cuda_double::Handle;
#define FP_ABI_DOUBLE_CALL(symbol, type) \
  FP_ABI_IS_ITS_OWN(#symbol, symbol);    \
  static_assert(abi::kSameRegisters<type, decltype(symbol)>, "the double's " #symbol);
FP_ABI_DOUBLE_CALLS(FP_ABI_DOUBLE_CALL)

// --- constants ---

static_assert(kCudaSuccess == CUDA_SUCCESS);
static_assert(kCudaNotReady == CUDA_ERROR_NOT_READY);
static_assert(kCudaCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(kCudaStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kCudaEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCudaHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kCudaCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kCudaReadsHostPointers == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
static_assert(CU_STREAM_CAPTURE_STATUS_NONE == 0, "what StreamIsCapturing says of a stream that is none");
static_assert(kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(kStubLibrary == CUDA_ERROR_STUB_LIBRARY);
static_assert(kDeviceUnavailable == CUDA_ERROR_DEVICE_UNAVAILABLE);
static_assert(kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(kOldestVersion <= CUDA_VERSION);

constexpr bool IsAmongLost(CudaResult result) { return std::find(kLost.begin(), kLost.end(), result) != kLost.end(); }

// By the name that stands beside each, as far as this version has it.
#define FP_ABI_LOST(name, code)                                                 \
  static_assert(CUDA_ERROR_##name == (code), "kLost: " #code " is not " #name); \
  static_assert(IsAmongLost(code));
FP_ABI_LOST_ERRORS(FP_ABI_LOST)
// Those after which, the header says, the process must be started anew.
#define FP_ABI_MUST_BE_LOST(name) static_assert(IsAmongLost(name), "kLost has no " #name);
FP_ABI_DOCUMENTED_AS_LOST(FP_ABI_MUST_BE_LOST)

// The double's.
#define FP_ABI_WORD(name, code) static_assert(name == (code), "the double's " #name);
FP_ABI_DOUBLE_ERRORS(FP_ABI_WORD)

static_assert(cuda_double::kSuccess == CUDA_SUCCESS);
static_assert(cuda_double::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda_double::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda_double::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda_double::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(cuda_double::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(cuda_double::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(cuda_double::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(cuda_double::kNotFound == CUDA_ERROR_NOT_FOUND);
static_assert(cuda_double::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda_double::kAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(cuda_double::kNotRegistered == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(cuda_double::kCaptureUnsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(cuda_double::kCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(cuda_double::kNoCapture == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cuda_double::kCapturing == CU_STREAM_CAPTURE_STATUS_ACTIVE);
static_assert(cuda_double::kCaptureInvalidated == CU_STREAM_CAPTURE_STATUS_INVALIDATED);

}  // namespace
}  // namespace fastpersist
