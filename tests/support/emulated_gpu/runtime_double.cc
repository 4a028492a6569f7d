// The CUDA runtime (libcudart) over the double of the driver: what a torch that was built for CUDA calls, so that its
// own allocator, streams, events and copies work on a machine without a GPU. Kernels do nothing here, but that they are
// counted by name; kernels.py computes them on the host. Errors are numbered as the driver's are.
//
// What torch could call and no test of ours needs (graphs beyond their capture, memory pools, IPC) is "not supported".
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../cuda_double/interface.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
int cuInit(unsigned flags);
int cuDriverGetVersion(int* version);
int cuGetErrorName(int error, const char** name);
int cuGetErrorString(int error, const char** text);
int cuDeviceGetCount(int* count);
int cuDeviceGetPCIBusId(char* text, int size, int device);
int cuDevicePrimaryCtxRetain(uint64_t* context, int device);
int cuCtxPushCurrent_v2(uint64_t context);
int cuCtxPopCurrent_v2(uint64_t* context);
int cuStreamCreate(uint64_t* stream, unsigned flags);
int cuStreamDestroy_v2(uint64_t stream);
int cuStreamQuery(uint64_t stream);
int cuStreamSynchronize(uint64_t stream);
int cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags);
int cuStreamIsCapturing(uint64_t stream, int* status);
int cuThreadExchangeStreamCaptureMode(int* mode);
int cuEventCreate(uint64_t* event, unsigned flags);
int cuEventDestroy_v2(uint64_t event);
int cuEventRecord(uint64_t event, uint64_t stream);
int cuEventQuery(uint64_t event);
int cuEventSynchronize(uint64_t event);
int cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t size_bytes, uint64_t stream);
int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t size_bytes, uint64_t stream);
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size_bytes, uint64_t stream);
int cuMemsetD8Async(uint64_t target, unsigned char value, size_t size_bytes, uint64_t stream);
int cuMemHostRegister_v2(void* memory, size_t size_bytes, unsigned flags);
int cuMemHostUnregister(void* memory);
int cuMemGetAddressRange_v2(uint64_t* base, size_t* size_bytes, uint64_t address);
int cuMemAlloc_v2(uint64_t* address, size_t size_bytes);
int cuMemFree_v2(uint64_t address);
}

namespace {

constexpr size_t kMemoryBytes = size_t{2} << 30;
constexpr int kCyclesPerUs = 1500;  // of a kernel that only spins

// A machine's driver can be called only once it was made: at the first use of this library, as by cuInit.
void Start() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* const count = std::getenv("FASTPERSIST_CUDA_DEVICES");
    double_reset(count == nullptr ? 1 : std::atoi(count));
    cuInit(0);
  });
}

thread_local int t_device = 0;
thread_local int t_last_error = 0;

cudaError_t Answer(int result) {
  if (result != 0 && result != cudaErrorNotReady) t_last_error = result;
  return static_cast<cudaError_t>(result);
}

uint64_t ContextOf(int device) {
  uint64_t context = 0;
  cuDevicePrimaryCtxRetain(&context, device);
  return context;
}

// The current device's context is the calling thread's meanwhile.
class Scope {
 public:
  explicit Scope(int device = t_device) {
    Start();
    cuCtxPushCurrent_v2(ContextOf(device));
  }
  ~Scope() { cuCtxPopCurrent_v2(nullptr); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

uint64_t Number(const void* handle) { return reinterpret_cast<uint64_t>(handle); }

bool IsOfDevice(const void* memory) {
  uint64_t base = 0;
  size_t size_bytes = 0;
  return cuMemGetAddressRange_v2(&base, &size_bytes, Number(memory)) == 0;
}

std::mutex g_mutex;
std::map<uint64_t, size_t> g_host;  // pinned by this library
std::map<uint64_t, std::chrono::steady_clock::time_point> g_recorded;
std::map<const void*, std::string> g_kernels;  // by their functions of the host
std::map<std::string, uint64_t> g_launches;

// Of the calling thread, as <<<…>>> leaves it.
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> t_configurations;

int CopyAsync(void* target, const void* source, size_t size_bytes, cudaStream_t stream) {
  const Scope scope;
  const bool to_device = IsOfDevice(target);
  const bool from_device = IsOfDevice(source);
  if (to_device && from_device) {
    return cuMemcpyDtoDAsync_v2(Number(target), Number(source), size_bytes, Number(stream));
  }
  if (to_device) return cuMemcpyHtoDAsync_v2(Number(target), source, size_bytes, Number(stream));
  if (from_device) return cuMemcpyDtoHAsync_v2(target, Number(source), size_bytes, Number(stream));
  const int result = cuStreamSynchronize(Number(stream));
  std::memcpy(target, source, size_bytes);
  return result;
}

cudaError_t Launch(const void* function, void** arguments, cudaStream_t stream) {
  std::string name = "?";
  {
    const std::lock_guard lock(g_mutex);
    if (const auto known = g_kernels.find(function); known != g_kernels.end()) name = known->second;
    ++g_launches[name];
  }
  if (name.find("spin_kernel") != std::string::npos) {
    const Scope scope;
    const int64_t cycles = *static_cast<int64_t*>(arguments[0]);
    const uint64_t handle = Number(stream) > 2 ? Number(stream) : double_default_stream(t_device);
    double_stream_add_work(handle, static_cast<int>(cycles / kCyclesPerUs), 0, 0, 0);
  } else if (std::getenv("FASTPERSIST_CUDA_KERNELS") != nullptr) {
    std::fprintf(stderr, "kernel: %s\n", name.c_str());
  }
  return cudaSuccess;
}

int Unsupported() { return cudaErrorNotSupported; }

}  // namespace

// --- for kernels.py ---

EXPORT int runtime_double_launch_count(int index, char* name, int size, uint64_t* count) {
  const std::lock_guard lock(g_mutex);
  for (const auto& [known, launches] : g_launches) {
    if (index-- > 0) continue;
    std::snprintf(name, static_cast<size_t>(size), "%s", known.c_str());
    *count = launches;
    return 1;
  }
  return 0;
}

// --- devices ---

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  Start();
  return Answer(cuDeviceGetCount(count));
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  Start();
  int count = 0;
  cuDeviceGetCount(&count);
  if (device < 0 || device >= count) return Answer(cudaErrorInvalidDevice);
  t_device = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof(properties->name), "double %d", device);
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = kMemoryBytes;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->l2CacheSize = 50 << 20;
  properties->textureAlignment = 512;
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = i == 2 ? 64 : 1024;
    properties->maxGridSize[i] = i == 0 ? 2147483647 : 65535;
  }
  properties->pciBusID = 0x3B + device;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = 1;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  Start();
  return Answer(cuDeviceGetPCIBusId(text, size, device));
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return Answer(Unsupported()); }
EXPORT cudaError_t cudaDeviceSynchronize() {
  const Scope scope;
  double_synchronize();
  return Answer(cuStreamQuery(0));
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  Start();
  return Answer(cuDriverGetVersion(version));
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// --- errors ---

EXPORT cudaError_t cudaGetLastError() {
  const auto error = static_cast<cudaError_t>(t_last_error);
  t_last_error = 0;
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(t_last_error); }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  const char* text = nullptr;
  return cuGetErrorString(error, &text) == 0 && text != nullptr ? text : "an error that the double does not know";
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
  const char* name = nullptr;
  return cuGetErrorName(error, &name) == 0 && name != nullptr ? name : "cudaErrorUnknown";
}

// --- streams and events ---

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Scope scope;
  return Answer(cuStreamCreate(reinterpret_cast<uint64_t*>(stream), flags));
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Scope scope;
  return Answer(cuStreamDestroy_v2(Number(stream)));
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Scope scope;
  return Answer(cuStreamQuery(Number(stream)));
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Scope scope;
  return Answer(cuStreamSynchronize(Number(stream)));
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  const Scope scope;
  return Answer(cuStreamWaitEvent(Number(stream), Number(event), flags));
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Scope scope;
  return Answer(cuEventCreate(reinterpret_cast<uint64_t*>(event), flags));
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Scope scope;
  return Answer(cuEventDestroy_v2(Number(event)));
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  const Scope scope;
  {
    const std::lock_guard lock(g_mutex);
    g_recorded[Number(event)] = std::chrono::steady_clock::now();
  }
  return Answer(cuEventRecord(Number(event), Number(stream)));
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Scope scope;
  return Answer(cuEventQuery(Number(event)));
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Scope scope;
  return Answer(cuEventSynchronize(Number(event)));
}
// Between the calls that recorded them.
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  const std::lock_guard lock(g_mutex);
  *ms = std::chrono::duration<float, std::milli>(g_recorded[Number(last)] - g_recorded[Number(first)]).count();
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaError_t result = cudaStreamSynchronize(stream);
  if (result == cudaSuccess) function(data);
  return result;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  const cudaError_t result = cudaStreamSynchronize(stream);
  function(stream, result, data);
  return result;
}

// --- graphs: a capture can begin and end; what it makes does nothing ---

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Scope scope;
  int value = 0;
  const int result = cuStreamIsCapturing(Number(stream), &value);
  *status = static_cast<cudaStreamCaptureStatus>(value);
  return Answer(result);
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  Start();
  int value = *mode;
  const int result = cuThreadExchangeStreamCaptureMode(&value);
  *mode = static_cast<cudaStreamCaptureMode>(value);
  return Answer(result);
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  if (id != nullptr) *id = 1;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(1);
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Start();
  double_capture(Number(stream), 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Scope scope;
  int status = 0;
  cuStreamIsCapturing(Number(stream), &status);
  double_capture(Number(stream), 0);
  *graph = reinterpret_cast<cudaGraph_t>(1);
  return Answer(status == cudaStreamCaptureStatusInvalidated ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// --- memory ---

EXPORT cudaError_t cudaMalloc(void** memory, size_t size_bytes) {
  const Scope scope;
  if (size_bytes == 0) {
    *memory = nullptr;
    return cudaSuccess;
  }
  return Answer(cuMemAlloc_v2(reinterpret_cast<uint64_t*>(memory), size_bytes));
}
EXPORT cudaError_t cudaFree(void* memory) {
  const Scope scope;
  if (memory == nullptr) return cudaSuccess;
  double_synchronize();  // as the driver does
  return Answer(cuMemFree_v2(Number(memory)));
}
// The pools of the driver give memory back at once, when their stream has come so far.
EXPORT cudaError_t cudaMallocAsync(void** memory, size_t size_bytes, cudaStream_t) {
  return cudaMalloc(memory, size_bytes);
}
EXPORT cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = kMemoryBytes;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* memory, size_t size_bytes, unsigned flags) {
  const Scope scope;
  const int result = cuMemHostRegister_v2(memory, size_bytes, flags);
  const std::lock_guard lock(g_mutex);
  if (result == 0) g_host[Number(memory)] = size_bytes;
  return Answer(result);
}
EXPORT cudaError_t cudaHostUnregister(void* memory) {
  const Scope scope;
  const int result = cuMemHostUnregister(memory);
  const std::lock_guard lock(g_mutex);
  if (result == 0) g_host.erase(Number(memory));
  return Answer(result);
}
EXPORT cudaError_t cudaHostAlloc(void** memory, size_t size_bytes, unsigned) {
  const size_t mapped_bytes = (size_bytes + 4095) / 4096 * 4096;
  *memory = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*memory == MAP_FAILED) return Answer(cudaErrorMemoryAllocation);
  return cudaHostRegister(*memory, mapped_bytes, 1);
}
EXPORT cudaError_t cudaFreeHost(void* memory) {
  size_t mapped_bytes = 0;
  {
    const std::lock_guard lock(g_mutex);
    mapped_bytes = g_host[Number(memory)];
  }
  const cudaError_t result = cudaHostUnregister(memory);
  if (result == cudaSuccess) munmap(memory, mapped_bytes);
  return result;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  const Scope scope;
  *attributes = cudaPointerAttributes{};
  attributes->device = t_device;
  if (IsOfDevice(memory)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(memory);
    return cudaSuccess;
  }
  if (double_is_registered(Number(memory), 1) != 0) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = const_cast<void*>(memory);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size_bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  return Answer(CopyAsync(target, source, size_bytes, stream));
}
EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t size_bytes, cudaMemcpyKind) {
  const int result = CopyAsync(target, source, size_bytes, nullptr);
  return result == 0 ? cudaStreamSynchronize(nullptr) : Answer(result);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size_bytes,
                                       cudaStream_t stream) {
  const cudaError_t result = cudaStreamSynchronize(stream);
  std::vector<std::byte> bytes(size_bytes);
  double_read(Number(source), bytes.data(), size_bytes);
  double_write(Number(target), bytes.data(), size_bytes);
  return result;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const int result = CopyAsync(static_cast<std::byte*>(target) + row * target_pitch,
                                 static_cast<const std::byte*>(source) + row * source_pitch, width, stream);
    if (result != 0) return Answer(result);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t size_bytes, cudaStream_t stream) {
  const Scope scope;
  return Answer(cuMemsetD8Async(Number(target), static_cast<unsigned char>(value), size_bytes, Number(stream)));
}
EXPORT cudaError_t cudaMemset(void* target, int value, size_t size_bytes) {
  const cudaError_t result = cudaMemsetAsync(target, value, size_bytes, nullptr);
  return result == cudaSuccess ? cudaStreamSynchronize(nullptr) : result;
}

// --- kernels ---

EXPORT void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 0; }
EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                                   dim3*, int*) {
  const std::lock_guard lock(g_mutex);
  g_kernels[function] = name;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  t_configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (t_configurations.empty()) return Answer(cudaErrorMissingConfiguration);
  const Configuration& last = t_configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  t_configurations.pop_back();
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return Launch(kernel, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return Launch(function, arguments, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                               cudaStream_t stream) {
  return Launch(function, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                       void** arguments) {
  return Launch(function, arguments, configuration->stream);
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = cudaFuncAttributes{};
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                          unsigned) {
  *count = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// What the driver has beyond its double answers that it cannot.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* status) {
  *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str());
  if (*function == nullptr) *function = dlsym(RTLD_DEFAULT, symbol);
  if (*function == nullptr) *function = reinterpret_cast<void*>(&Unsupported);
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
