// cuda/loss_mean.h - the launcher. It enqueues on `stream` and never waits.
#pragma once

#include "../loss_mean.h"

#include <cuda_runtime_api.h>

namespace sparse_ce {
namespace cuda {

cudaError_t loss_mean(const LossMeanArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
