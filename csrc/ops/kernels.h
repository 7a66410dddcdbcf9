// kernels.h - Lists the kernels of each device, and their arguments, which the other headers of this folder describe.
#pragma once

#include "binary_cross_entropy.h"
#include "candidates.h"
#include "cross_entropy.h"
#include "dense_divergence.h"
#include "linear.h"
#include "loss_mean.h"
#include "masked_mean.h"
#include "select.h"
#include "sparse_softmax.h"
#include "topk.h"

// W lists those that need a workspace on a GPU.
#define SCE_KERNELS(X, W)                             \
  W(cross_entropy_forward, ForwardArgs)               \
  W(cross_entropy_backward, BackwardArgs)             \
  X(cross_entropy_backward_values, BackwardArgs)      \
  W(loss_mean, LossMeanArgs)                          \
  W(select_forward, SelectArgs)                       \
  W(select_backward, SelectBackwardArgs)              \
  X(select_merge, SelectMergeArgs)                    \
  W(topk_ids, TopkArgs)                               \
  X(binary_cross_entropy, BinaryArgs)                 \
  X(dense_divergence, DenseDivergenceArgs)            \
  W(sparse_softmax, SparseSoftmaxArgs)                \
  W(sparse_softmax_backward, SparseSoftmaxArgs)       \
  W(masked_mean, MaskedMeanArgs)                      \
  X(masked_mean_backward, MaskedMeanArgs)             \
  X(candidate_logits, CandidateForwardArgs)           \
  X(candidate_logits_backward, CandidateBackwardArgs) \
  X(candidate_weight_gradient, CandidateWeightArgs)   \
  X(accumulate, AccumulateArgs)                       \
  X(scale, ScaleArgs)
