// cuda/sparse_softmax.h - the launchers. They enqueue on `stream` and never wait.
#pragma once

#include "../sparse_softmax.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

// Bytes of device memory that both need beyond their results.
size_t sparse_softmax_workspace(const SparseSoftmaxArgs& args);

cudaError_t sparse_softmax(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream);
cudaError_t sparse_softmax_backward(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
