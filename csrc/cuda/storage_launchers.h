// storage_launchers.h - Declares launches of kernels for one storage type. A source per type instantiates each class,
// so that they compile in parallel.
#pragma once

#include "../ops/cross_entropy.h"
#include "../ops/select.h"
#include "row_plan.h"

#include <cuda_runtime_api.h>

namespace sparse_ce {
namespace cuda {

// See cross_entropy_one_pass.
template <typename scalar_t>
struct OnePassLauncher {
  static cudaError_t launch(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                            cudaStream_t stream);
  // Returns true if the current device, which is `device`, runs clusters of these kernels.
  static bool has_clusters(const Device& device);
};

template <typename scalar_t>
struct SelectLauncher {
  static cudaError_t forward(const SelectArgs& args, const Plan& plan, void* parts, uint32_t* slots,
                             cudaStream_t stream);
  static cudaError_t backward(const SelectBackwardArgs& args, const Plan& plan, void* workspace, cudaStream_t stream);
};

}  // namespace cuda
}  // namespace sparse_ce
