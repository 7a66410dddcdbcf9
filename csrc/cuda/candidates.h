// cuda/candidates.h - the launchers. They enqueue on `stream` and never wait.
#pragma once

#include "../candidates.h"

#include <cuda_runtime_api.h>

namespace sparse_ce {
namespace cuda {

cudaError_t candidate_logits(const CandidateForwardArgs& args, cudaStream_t stream);
cudaError_t candidate_logits_backward(const CandidateBackwardArgs& args, cudaStream_t stream);
cudaError_t candidate_weight_gradient(const CandidateWeightArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
