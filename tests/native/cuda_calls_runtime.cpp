// Stands in for the CUDA runtime in cuda_calls.cu.
#include "cuda_calls_runtime.h"

#include <map>
#include <mutex>
#include <utility>

thread_local int current_device = 0;
std::atomic<int64_t> queries{0}, requests{0}, launches{0};
std::atomic<bool> fails{false};
std::atomic<cudaError_t> last_error{cudaSuccess};
int asked_of[128] = {};

namespace {
std::mutex mutex;
std::map<std::pair<const void*, int>, int64_t> bytes;
}  // namespace

int64_t bytes_of(const void* kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  return bytes[{kernel, current_device}];
}

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  ++queries;
  if (fails) return cudaErrorInvalidValue;
  *value = 10 + device;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  ++requests;
  if (fails) return cudaErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) bytes[{kernel, current_device}] = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  ++launches;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return last_error.exchange(cudaSuccess); }

// nvcc's code calls these to register kernels and to launch them with <<<>>>.
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
char __cudaInitModule(void**) { return 0; }
cudaError_t __cudaGetKernel(void**, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
}
