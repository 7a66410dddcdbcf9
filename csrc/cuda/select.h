// cuda/select.h - the launchers; see cross_entropy.h.
#pragma once

#include "../select.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

size_t select_forward_workspace(const SelectArgs& args);
cudaError_t select_forward(const SelectArgs& args, void* workspace, cudaStream_t stream);

cudaError_t select_merge(const SelectMergeArgs& args, cudaStream_t stream);

// With the workspace of cross_entropy_backward.
cudaError_t select_backward(const SelectBackwardArgs& args, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
