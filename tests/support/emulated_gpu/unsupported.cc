// What torch's libraries want to find in the CUDA runtime and nothing of ours needs: all of it is "not supported". By
// itself, since the runtime's header declares each with its own arguments.
extern "C" {
constexpr int kNotSupported = 801;
#define NOT_SUPPORTED(name) \
  __attribute__((visibility("default"))) int name() { return kNotSupported; }
NOT_SUPPORTED(cudaGetSymbolAddress)
NOT_SUPPORTED(cudaGraphAddNode)
NOT_SUPPORTED(cudaGraphConditionalHandleCreate)
NOT_SUPPORTED(cudaGraphDebugDotPrint)
NOT_SUPPORTED(cudaGraphNodeGetDependencies)
NOT_SUPPORTED(cudaIpcCloseMemHandle)
NOT_SUPPORTED(cudaIpcGetEventHandle)
NOT_SUPPORTED(cudaIpcGetMemHandle)
NOT_SUPPORTED(cudaIpcOpenEventHandle)
NOT_SUPPORTED(cudaIpcOpenMemHandle)
NOT_SUPPORTED(cudaKernelSetAttributeForDevice)
NOT_SUPPORTED(cudaLibraryGetKernel)
NOT_SUPPORTED(cudaLibraryLoadData)
NOT_SUPPORTED(cudaLibraryUnload)
NOT_SUPPORTED(cudaMemcpyToSymbol)
NOT_SUPPORTED(cudaStreamBeginCaptureToGraph)
NOT_SUPPORTED(cudaStreamUpdateCaptureDependencies)
}
