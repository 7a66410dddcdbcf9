// all_ops.h - Registers the ops of a device.
#pragma once

#include "binary_cross_entropy_ops.h"
#include "candidates_ops.h"
#include "cross_entropy_ops.h"
#include "dense_divergence_ops.h"
#include "linear/ops.h"
#include "masked_mean_ops.h"
#include "op_library.h"
#include "select_ops.h"
#include "sparse_softmax_ops.h"
#include "topk_ops.h"

namespace sparse_ce {

template <typename device_t, typename library_t>
void add_ops(library_t& m) {
  CrossEntropyOps<device_t>::add_to(m);
  SelectOps<device_t>::add_to(m);
  LinearOps<device_t>::add_to(m);
  SparseSoftmaxOps<device_t>::add_to(m);
  MaskedMeanOps<device_t>::add_to(m);
  TopkOps<device_t>::add_to(m);
  CandidateOps<device_t>::add_to(m);
  DenseDivergenceOps<device_t>::add_to(m);
  BinaryCrossEntropyOps<device_t>::add_to(m);
}

}  // namespace sparse_ce
