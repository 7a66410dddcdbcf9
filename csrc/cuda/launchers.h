// launchers.h - Declares the functions that launch the kernels of each op. Launchers enqueue work on `stream` and never
// wait. Those with a `workspace` need that many bytes of device memory besides their arguments.
#pragma once

#include "../ops/kernels.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

#define SCE_DECLARE(name, args_t) cudaError_t name(const args_t& args, cudaStream_t stream);
#define SCE_DECLARE_WITH_WORKSPACE(name, args_t) \
  cudaError_t name(const args_t& args, void* workspace, cudaStream_t stream);
SCE_KERNELS(SCE_DECLARE, SCE_DECLARE_WITH_WORKSPACE)
#undef SCE_DECLARE
#undef SCE_DECLARE_WITH_WORKSPACE

struct OnePass;  // see row_plan.h

// `backward`, or null, has the rows of `forward` and reads what it writes.
cudaError_t cross_entropy_one_pass(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                                   cudaStream_t stream);

size_t workspace_of(const ForwardArgs& args);
size_t workspace_of(const BackwardArgs& args);  // also of select_backward
size_t workspace_of(const LossMeanArgs& args);
size_t workspace_of(const SelectArgs& args);
size_t workspace_of(const TopkArgs& args);
size_t workspace_of(const MaskedMeanArgs& args);
size_t workspace_of(const SparseSoftmaxArgs& args);

}  // namespace cuda
}  // namespace sparse_ce
