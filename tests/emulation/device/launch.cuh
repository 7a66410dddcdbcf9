// launch.cuh - stands in for csrc/cuda/launch.cuh: under a host compiler kernels run in emulation.
#define SPARSE_CE_CUDA_LAUNCH

#include "coc_portable.cuh"

#include <cstdint>

#define SCE_SHARED(T, name, ...) COC_SHARED(T, name, __VA_ARGS__)

namespace sparse_ce {
namespace cuda {

template <typename... parameters_t, typename... arguments_t>
cudaError_t launch(cudaStream_t stream, int64_t blocks, int threads, void (*kernel)(parameters_t...),
                   const arguments_t&... arguments) {
  coc_launch_config config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return coc_launch(config, kernel, arguments...);
}

}  // namespace cuda
}  // namespace sparse_ce
