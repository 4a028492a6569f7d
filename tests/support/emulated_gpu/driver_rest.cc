// What torch's libraries want of the driver beyond its double, for a library that has both: all of it is "not
// supported", except for the question whether a device's context is in use.
#include <cstddef>
#include <cstdint>

#include "../cuda_double/interface.h"

extern "C" {
constexpr int kNotSupported = 801;
#define NOT_SUPPORTED(name) \
  __attribute__((visibility("default"))) int name() { return kNotSupported; }
NOT_SUPPORTED(cuCtxSetCurrent)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
__attribute__((visibility("default"))) int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

// Memory that is mapped piece by piece, as torch's expandable segments do it. The double has all of what is reserved.
#define SUPPORTED __attribute__((visibility("default"))) int
SUPPORTED cuMemAddressReserve(uint64_t* address, size_t size_bytes, size_t, uint64_t, unsigned long long) {
  *address = double_alloc(size_bytes);
  return *address == 0 ? 2 : 0;
}
SUPPORTED cuMemAddressFree(uint64_t address, size_t) {
  double_free(address);
  return 0;
}
SUPPORTED cuMemCreate(uint64_t* handle, size_t, const void*, unsigned long long) {
  *handle = 1;
  return 0;
}
SUPPORTED cuMemRelease(uint64_t) { return 0; }
SUPPORTED cuMemMap(uint64_t, size_t, size_t, uint64_t, unsigned long long) { return 0; }
SUPPORTED cuMemUnmap(uint64_t, size_t) { return 0; }
SUPPORTED cuMemSetAccess(uint64_t, size_t, const void*, size_t) { return 0; }
SUPPORTED cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = size_t{2} << 20;
  return 0;
}
}
