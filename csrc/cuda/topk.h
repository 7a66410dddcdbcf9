// cuda/topk.h - the launcher.
#pragma once

#include "../topk.h"

#include <cuda_runtime_api.h>

namespace sparse_ce {
namespace cuda {

cudaError_t topk_ids(const TopkArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
