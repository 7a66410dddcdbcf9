// cuda/sparse_softmax.h - the launchers. They enqueue on `stream` and never wait.
#pragma once

#include "../sparse_softmax.h"

#include <cuda_runtime_api.h>

namespace sparse_ce {
namespace cuda {

cudaError_t sparse_softmax(const SparseSoftmaxArgs& args, cudaStream_t stream);
cudaError_t sparse_softmax_backward(const SparseSoftmaxArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
