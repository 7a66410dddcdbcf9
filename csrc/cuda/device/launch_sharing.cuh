// launch_sharing.cuh - Launches kernels with more than 48 KiB of shared memory per block. The few files that do so
// include this header, because <map> and <mutex> take a second to compile. Emulation replaces it with launch.cuh.
#ifndef SPARSE_CE_CUDA_LAUNCH_SHARING
#define SPARSE_CE_CUDA_LAUNCH_SHARING

#include "launch.cuh"

#include <map>
#include <mutex>
#include <utility>

namespace sparse_ce {
namespace cuda {

// Requests `most` bytes of shared memory per block: more than 48 KiB must be requested, and the carveout of the L1
// cache too. A kernel's largest request on a device is remembered. The lock is held during a request, so that a smaller
// one of another thread cannot follow.
template <typename... parameters_t>
cudaError_t request_shared(void (*kernel)(parameters_t...), int64_t most) {
  static std::mutex mutex;
  static std::map<std::pair<void (*)(parameters_t...), int>, int64_t> requested;  // by kernel and device
  int device = 0;
  cudaError_t refused = cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = requested.find({kernel, device});
  if (refused == cudaSuccess && known != requested.end() && known->second >= most) return cudaSuccess;
  const auto bytes = static_cast<int>(most);
  if (refused == cudaSuccess)
    refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (refused == cudaSuccess)
    refused =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (refused == cudaSuccess)
    requested[{kernel, device}] = most;
  else
    cudaGetLastError();
  return refused;
}

// Launches clusters as launch_with does. `most` is the maximum that the kernel ever requests on this device: concurrent
// launches by other threads request the same.
template <typename... parameters_t, typename... arguments_t>
cudaError_t launch_sharing(cudaStream_t stream, int64_t blocks, int threads, int cluster, int64_t shared, int64_t most,
                           void (*kernel)(parameters_t...), const arguments_t&... arguments) {
  if (shared > 0) {
    const cudaError_t refused = request_shared(kernel, most);
    if (refused != cudaSuccess) return refused;
  }
  return launch_with(shared, stream, blocks, threads, cluster, kernel, arguments...);
}

}  // namespace cuda
}  // namespace sparse_ce

#endif
