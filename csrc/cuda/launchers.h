// launchers.h - Declares the functions that launch the kernels of each op. Launchers enqueue work on `stream` and never
// wait. Those with a `workspace` need that many bytes of device memory.
#pragma once

#include "../ops/binary_cross_entropy.h"
#include "../ops/candidates.h"
#include "../ops/cross_entropy.h"
#include "../ops/dense_divergence.h"
#include "../ops/linear.h"
#include "../ops/loss_mean.h"
#include "../ops/masked_mean.h"
#include "../ops/select.h"
#include "../ops/sparse_softmax.h"
#include "../ops/topk.h"

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_ce {
namespace cuda {

struct OnePass;  // see row_plan.h

// `backward`, or null, has the rows of `forward` and reads what it writes.
cudaError_t cross_entropy_one_pass(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                                   cudaStream_t stream);

size_t workspace_of(const ForwardArgs& args);
cudaError_t cross_entropy_forward(const ForwardArgs& args, void* workspace, cudaStream_t stream);

size_t workspace_of(const BackwardArgs& args);
cudaError_t cross_entropy_backward(const BackwardArgs& args, void* workspace, cudaStream_t stream);
cudaError_t cross_entropy_backward_values(const BackwardArgs& args, cudaStream_t stream);

size_t workspace_of(const LossMeanArgs& args);
cudaError_t loss_mean(const LossMeanArgs& args, void* workspace, cudaStream_t stream);

size_t workspace_of(const SelectArgs& args);
cudaError_t select_forward(const SelectArgs& args, void* workspace, cudaStream_t stream);

cudaError_t select_merge(const SelectMergeArgs& args, cudaStream_t stream);

// Takes the workspace of cross_entropy_backward.
cudaError_t select_backward(const SelectBackwardArgs& args, void* workspace, cudaStream_t stream);

cudaError_t accumulate(const AccumulateArgs& args, cudaStream_t stream);
cudaError_t clear_ignored_rows(const ClearRowsArgs& args, cudaStream_t stream);
cudaError_t scale(const ScaleArgs& args, cudaStream_t stream);

cudaError_t candidate_logits(const CandidateForwardArgs& args, cudaStream_t stream);
cudaError_t candidate_logits_backward(const CandidateBackwardArgs& args, cudaStream_t stream);
cudaError_t candidate_weight_gradient(const CandidateWeightArgs& args, cudaStream_t stream);

// Reads each logit once, and writes each gradient once if args.grad_loss is given.
cudaError_t binary_cross_entropy(const BinaryArgs& args, cudaStream_t stream);

cudaError_t dense_divergence(const DenseDivergenceArgs& args, cudaStream_t stream);

// Returns the bytes of device memory that topk_ids needs in addition to its results.
size_t workspace_of(const TopkArgs& args);

cudaError_t topk_ids(const TopkArgs& args, void* workspace, cudaStream_t stream);

// Returns the bytes of device memory that masked_mean needs in addition to its results.
size_t workspace_of(const MaskedMeanArgs& args);

cudaError_t masked_mean(const MaskedMeanArgs& args, void* workspace, cudaStream_t stream);
cudaError_t masked_mean_backward(const MaskedMeanArgs& args, cudaStream_t stream);

// Returns the bytes of device memory that both functions need in addition to their results.
size_t workspace_of(const SparseSoftmaxArgs& args);

cudaError_t sparse_softmax(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream);
cudaError_t sparse_softmax_backward(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_ce
