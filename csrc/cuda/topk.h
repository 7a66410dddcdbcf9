// cuda/topk.h - the launcher.
#pragma once

#include "../topk.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

// Bytes of device memory that topk_ids needs beyond its results.
size_t topk_ids_workspace(const TopkArgs& args);

cudaError_t topk_ids(const TopkArgs& args, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
