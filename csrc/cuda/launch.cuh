// launch.cuh - what kernel files need of their compiler: shared variables and launches. Under nvcc plain CUDA; a host
// compiler gets the same names from third_party/cuda_on_cpu, where the kernels run on a CPU under sanitizers.
#pragma once

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#include <utility>

// COC_SHARED(float, partial, [8]);
#define COC_SHARED(T, name, ...) __shared__ T name __VA_ARGS__

struct coc_launch_config {
  dim3 grid, block;
  size_t dyn_smem = 0;
  cudaStream_t stream = nullptr;
};

template <typename... parameters_t, typename... arguments_t>
inline cudaError_t coc_launch(const coc_launch_config& c, void (*kernel)(parameters_t...), arguments_t&&... arguments) {
  kernel<<<c.grid, c.block, c.dyn_smem, c.stream>>>(std::forward<arguments_t>(arguments)...);
  return cudaGetLastError();
}

#else
#include "coc_portable.cuh"
#endif
