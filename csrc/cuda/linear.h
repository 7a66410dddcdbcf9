// cuda/linear.h - the launchers. They enqueue on `stream` and never wait.
#pragma once

#include "../linear.h"

#include <cuda_runtime_api.h>

namespace sparse_ce {
namespace cuda {

cudaError_t accumulate(const AccumulateArgs& args, cudaStream_t stream);
cudaError_t clear_ignored_rows(const ClearRowsArgs& args, cudaStream_t stream);
cudaError_t scale(const ScaleArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
