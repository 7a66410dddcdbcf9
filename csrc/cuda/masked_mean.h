// cuda/masked_mean.h - the launchers. They enqueue on `stream` and never wait.
#pragma once

#include "../masked_mean.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

// Bytes of device memory that masked_mean needs beyond its results.
size_t masked_mean_workspace(const MaskedMeanArgs& args);

cudaError_t masked_mean(const MaskedMeanArgs& args, void* workspace, cudaStream_t stream);
cudaError_t masked_mean_backward(const MaskedMeanArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
