// As much of NVML as torch asks: for expandable segments a device, and that it has no fabric; where a device is full,
// who else is on it (nobody).
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kNotSupported = 3;
}

EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return 0;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int*) { return kNotSupported; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }
