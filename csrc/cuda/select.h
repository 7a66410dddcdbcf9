// cuda/select.h - the launchers; see cross_entropy.h.
#pragma once

#include "../select.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

size_t select_forward_workspace(const SelectArgs& args);
cudaError_t select_forward(const SelectArgs& args, void* workspace, cudaStream_t stream);

size_t select_backward_workspace(const SelectBackwardArgs& args);
cudaError_t select_backward(const SelectBackwardArgs& args, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
