// launch.cuh - what kernel files need of their compiler: shared variables and launches. Guarded by a name, so that
// another compiler's may stand in for it.
#ifndef SPARSE_CE_CUDA_LAUNCH
#define SPARSE_CE_CUDA_LAUNCH

#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdint>

// SCE_SHARED(float, partial, [8]);
#define SCE_SHARED(T, name, ...) __shared__ T name __VA_ARGS__
// T* name: the bytes that the launch gives each block.
#define SCE_DYNAMIC_SHARED(T, name)                   \
  extern __shared__ uint4 sparse_ce_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(sparse_ce_dynamic_shared)

namespace sparse_ce {
namespace cuda {

// In clusters of `cluster` blocks, which may be 1, that have `shared` bytes each, of `most` that this kernel ever asks
// for on this device: another thread that launches it meanwhile asks for as much. Returns this launch's own error and
// leaves none behind: neither does an earlier one of somebody else's end here, nor this one there.
template <typename... parameters_t, typename... arguments_t>
cudaError_t launch_sharing(cudaStream_t stream, int64_t blocks, int threads, int cluster, int64_t shared, int64_t most,
                           void (*kernel)(parameters_t...), const arguments_t&... arguments) {
  if (shared > 0) {  // more than 48 KiB have to be asked for, and as much of the first cache as there is
    const auto bytes = static_cast<int>(most);
    cudaError_t refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (refused == cudaSuccess)
      refused =
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (refused != cudaSuccess) {
      cudaGetLastError();
      return refused;
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

template <typename... parameters_t, typename... arguments_t>
cudaError_t launch_clusters(cudaStream_t stream, int64_t blocks, int threads, int cluster,
                            void (*kernel)(parameters_t...), const arguments_t&... arguments) {
  return launch_sharing(stream, blocks, threads, cluster, 0, 0, kernel, arguments...);
}

template <typename... parameters_t, typename... arguments_t>
cudaError_t launch(cudaStream_t stream, int64_t blocks, int threads, void (*kernel)(parameters_t...),
                   const arguments_t&... arguments) {
  return launch_clusters(stream, blocks, threads, 1, kernel, arguments...);
}

// Whether the current device has clusters, and `kernel` is compiled for them.
template <typename... parameters_t>
bool has_clusters(void (*kernel)(parameters_t...)) {
  cudaFuncAttributes about{};
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9 &&
         cudaFuncGetAttributes(&about, kernel) == cudaSuccess && about.ptxVersion >= 90;
}

// The blocks of a cluster, from compute capability 9.0 on: elsewhere nobody launches one.
struct Cluster {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kExist = true;
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  // The same in two steps, between which a thread does something else.
  __device__ static void arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ static void wait() { cooperative_groups::this_cluster().barrier_wait(); }
  // What block `rank` has at `shared`, a shared variable.
  template <typename T>
  __device__ static T* of_block(T* shared, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
#else
  static constexpr bool kExist = false;
  __device__ static void sync() { __trap(); }
  __device__ static void arrive() { __trap(); }
  __device__ static void wait() { __trap(); }
  template <typename T>
  __device__ static T* of_block(T* shared, int) {
    return shared;
  }
#endif
};

}  // namespace cuda
}  // namespace sparse_ce

#endif
