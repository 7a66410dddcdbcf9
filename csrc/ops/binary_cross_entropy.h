// binary_cross_entropy.h - Defines the arguments of the kernels of binary cross entropy. This header does not depend on
// torch.
#pragma once

#include "../core/binary_math.h"
#include "cross_entropy.h"

namespace sparse_ce {

// Describes a call. Of the base class it uses the logits, which are not strided, the target with its class weights, and
// max_blocks. With sharded classes, the loss and the gradient of scale and shift are those of this shard's classes.
struct BinaryArgs : CrossEntropyArgs {
  BinaryOptions binary;
  const void* pos_weight;  // (num_classes,), arithmetic dtype; null means 1
  const void* affine;  // (2,), arithmetic dtype: scale and shift; null means 1 and 0
  void* loss;  // (rows,), arithmetic dtype
  const void* grad_loss;  // (rows,), or null if no gradient is computed
  int64_t grad_loss_stride;
  void* grad_logits;  // (rows, vocab - first_class), dtype of the logits; may be the logits themselves
  int64_t grad_row_stride;
  void* grad_affine;  // (rows, 2), arithmetic dtype: for scale and shift, with grad_loss; or null

  template <typename acc_t>
  SCE_HD acc_t scale() const {
    return affine ? static_cast<const acc_t*>(affine)[0] : acc_t(1);
  }
  template <typename acc_t>
  SCE_HD acc_t shift() const {
    return affine ? static_cast<const acc_t*>(affine)[1] : acc_t(0);
  }

  // Returns a pointer that is indexed by class.
  template <typename scalar_t>
  SCE_HD scalar_t* gradient_row(int64_t r) const {
    return static_cast<scalar_t*>(grad_logits) + (r * grad_row_stride - first_class);
  }
  // Returns grad_output of a row.
  template <typename acc_t>
  SCE_HD acc_t grad_output(int64_t r) const {
    return static_cast<const acc_t*>(grad_loss)[r * grad_loss_stride];
  }

  // Returns the factors of a class whose entries have the sum t.
  template <typename acc_t>
  SCE_HD BinaryCoefficients<acc_t> coefficients(int64_t column, acc_t t) const {
    const acc_t e = static_cast<acc_t>(binary.label_smoothing);
    const acc_t of_positive = pos_weight ? static_cast<const acc_t*>(pos_weight)[column] : acc_t(1);
    return {(acc_t(1) - e) * t + acc_t(0.5) * e, target.class_weight<acc_t>(column), of_positive};
  }
  // Returns true if every class without an entry has the factors 1 and 0.
  SCE_HD bool alike() const { return !target.weight && binary.label_smoothing == 0; }
};

namespace cpu {
void binary_cross_entropy(const BinaryArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
