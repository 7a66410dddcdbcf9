// launch.cuh - what kernel files need of their compiler: shared variables and launches. Guarded by a name, so that
// another compiler's may stand in for it.
#ifndef SPARSE_CE_CUDA_LAUNCH
#define SPARSE_CE_CUDA_LAUNCH

#include <cuda_runtime.h>

#include <cstdint>

// SCE_SHARED(float, partial, [8]);
#define SCE_SHARED(T, name, ...) __shared__ T name __VA_ARGS__

namespace sparse_ce {
namespace cuda {

template <typename... parameters_t, typename... arguments_t>
cudaError_t launch(cudaStream_t stream, int64_t blocks, int threads, void (*kernel)(parameters_t...),
                   const arguments_t&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace sparse_ce

#endif
