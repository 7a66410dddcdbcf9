// launch.cuh - Replaces launch.cuh and launch_sharing.cuh of csrc/cuda/device: a host compiler runs the kernels in
// emulation.
#define SPARSE_CE_CUDA_LAUNCH
#define SPARSE_CE_CUDA_LAUNCH_SHARING

#include "coc_portable.cuh"

#include <atomic>
#include <cstdint>

#define SCE_SHARED(T, name, ...) COC_SHARED(T, name, __VA_ARGS__)
#define SCE_DYNAMIC_SHARED(T, name) COC_DYN_SHARED(T, name)

namespace sparse_ce {
namespace cuda {

// If false, kernels and GEMMs do not run and only request their memory.
inline bool runs = true;
inline std::atomic<int64_t> launches{0};

constexpr int kMostDevices = 64;

template <cudaDeviceAttr attribute>
int device_attribute(int otherwise) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, 0) == cudaSuccess ? value : otherwise;
}

template <typename... parameters_t>
cudaError_t request_shared(void (*kernel)(parameters_t...), int64_t most) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
}

template <typename... parameters_t, typename... arguments_t>
cudaError_t launch_sharing(cudaStream_t stream, int64_t blocks, int threads, int cluster, int64_t shared, int64_t most,
                           void (*kernel)(parameters_t...), const arguments_t&... arguments) {
  ++launches;
  if (!runs) return cudaSuccess;
  if (shared > 0) {
    const cudaError_t refused = request_shared(kernel, most);
    if (refused != cudaSuccess) return refused;
  }
  coc_launch_config config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(static_cast<unsigned>(threads));
  config.cluster = dim3(static_cast<unsigned>(cluster));
  config.dyn_smem = static_cast<size_t>(shared);
  config.stream = stream;
  return coc_launch(config, kernel, arguments...);
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

// COC_MOST_CLUSTER emulates a device that holds smaller clusters.
template <typename... parameters_t>
bool supports_clusters(void (*)(parameters_t...)) {
  return true;
}

struct Cluster {
  static constexpr bool kExist = true;
  static void sync() { cooperative_groups::this_cluster().sync(); }
  static void arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
  static void wait() { cooperative_groups::this_cluster().barrier_wait(); }
  template <typename T>
  static T* of_block(T* shared, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
};

}  // namespace cuda
}  // namespace sparse_ce
