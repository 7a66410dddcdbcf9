// launch.cuh - Defines what kernel files need from the compiler: shared variables and launches. The include guard is a
// macro, so that another compiler's version can replace this file.
#ifndef SPARSE_CE_CUDA_LAUNCH
#define SPARSE_CE_CUDA_LAUNCH

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

// Usage: SCE_SHARED(float, partial, [8]);
#define SCE_SHARED(T, name, ...) __shared__ T name __VA_ARGS__
// Declares T* name, which points to the bytes that the launch assigns to each block.
#define SCE_DYNAMIC_SHARED(T, name)                   \
  extern __shared__ uint4 sparse_ce_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(sparse_ce_dynamic_shared)

namespace sparse_ce {
namespace cuda {

constexpr int kMostDevices = 64;  // whose properties are cached

// Returns an attribute of the current device, or `otherwise` if it is unknown. Each device is asked once: a query takes
// longer than a launch.
template <cudaDeviceAttr attribute>
int device_attribute(int otherwise) {
  static std::atomic<int> known[kMostDevices];  // one more than the value; 0 means not yet queried
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return otherwise;
  if (device < kMostDevices && known[device] > 0) return known[device] - 1;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return otherwise;
  if (device < kMostDevices) known[device] = value + 1;
  return value;
}

// Launches clusters of `cluster` blocks (may be 1) with `shared` bytes of shared memory each; launch_sharing.cuh allows
// more than 48 KiB. Returns the error of this launch only and clears it, so that no later call reports it; an earlier
// error of another caller is not returned.
template <typename... parameters_t, typename... arguments_t>
cudaError_t launch_with(int64_t shared, cudaStream_t stream, int64_t blocks, int threads, int cluster,
                        void (*kernel)(parameters_t...), const arguments_t&... arguments) {
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
  return launch_with(0, stream, blocks, threads, cluster, kernel, arguments...);
}

template <typename... parameters_t, typename... arguments_t>
cudaError_t launch(cudaStream_t stream, int64_t blocks, int threads, void (*kernel)(parameters_t...),
                   const arguments_t&... arguments) {
  return launch_clusters(stream, blocks, threads, 1, kernel, arguments...);
}

// Returns true if the current device supports clusters and `kernel` is compiled for them.
template <typename... parameters_t>
bool supports_clusters(void (*kernel)(parameters_t...)) {
  cudaFuncAttributes about{};
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9 &&
         cudaFuncGetAttributes(&about, kernel) == cudaSuccess && about.ptxVersion >= 90;
}

// Accesses the blocks of a cluster. Clusters exist from compute capability 9.0 on; other devices never launch them.
// cooperative_groups does the same with the same functions, but its headers take two seconds to compile.
struct Cluster {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kExist = true;
  __device__ static void sync() { arrive(), wait(); }
  // These split the barrier into two steps, between which a thread can do other work.
  __device__ static void arrive() { __cluster_barrier_arrive(); }
  __device__ static void wait() { __cluster_barrier_wait(); }
  // Returns the address of the shared variable `shared` in block `rank`.
  template <typename T>
  __device__ static T* of_block(T* shared, int rank) {
    return static_cast<T*>(__cluster_map_shared_rank(shared, static_cast<unsigned>(rank)));
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
