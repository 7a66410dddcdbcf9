// cross_entropy.h - what the bindings hand to a device: pointers and sizes, nothing of torch.
#pragma once

#include "math.h"
#include "target.h"

namespace sparse_ce {

struct CrossEntropyArgs {
  const void* logits;       // (rows, vocab): unit column stride, any row stride
  DType dtype;
  int64_t rows, vocab;      // columns >= target.num_classes exist in memory only
  int64_t row_stride;
  TargetView target;
  LossOptions options;
  const void* weight_sum;   // (1,) sum of the class weights, or null: it is num_classes
  int64_t max_blocks;       // 0: no limit. Tests lower it, so that blocks take several rows
};

struct ForwardArgs : CrossEntropyArgs {
  void* loss;               // (rows,) arithmetic dtype
  void* lse;                // (rows,)
  void* lse_residual;       // (rows,), or null
};

// Reads of `lse`, `grad_*` may be strided: an expanded scalar has stride 0.
struct BackwardArgs : CrossEntropyArgs {
  const void* grad_loss;    // (rows,)
  const void* grad_lse;     // (rows,), or null
  const void* lse;          // (rows,)
  const void* lse_residual; // (rows,), or null
  int64_t grad_loss_stride, grad_lse_stride;
  void* grad_logits;        // (rows, vocab), dtype of logits; may be the logits themselves
  int64_t grad_row_stride;
  void* grad_values;        // shape of target.values, arithmetic dtype; zero on entry (values' gradient only)
};

struct MeanArgs {
  const void* loss;         // (rows,), any stride, or null: only the divisor is asked for
  int64_t loss_stride;
  DType dtype;              // float32 or float64, of all that is not the target's
  TargetView target;
  const void* normalizer;   // (1,), or null: the count of the rows
  const void* grad_mean;    // (1,), or null
  void* mean;               // (1,), or null without a loss
  void* divisor;            // (1,)
  void* grad_loss;          // (1,), or null without grad_mean: the gradient of every row's loss

  template <typename acc_t>
  SCE_HD MeanStats<double> row(int64_t r) const {
    return {loss ? double(static_cast<const acc_t*>(loss)[r * loss_stride]) : 0.0,
            normalizer ? 0.0 : double(target.count<acc_t>(r))};
  }

  template <typename acc_t>
  SCE_HD void finish(MeanStats<double> stats) const {
    if (normalizer) stats.count = double(*static_cast<const acc_t*>(normalizer));
    const acc_t by = static_cast<acc_t>(stats.divisor());
    *static_cast<acc_t*>(divisor) = by;
    if (mean) *static_cast<acc_t*>(mean) = static_cast<acc_t>(stats.mean());
    if (grad_mean) *static_cast<acc_t*>(grad_loss) = *static_cast<const acc_t*>(grad_mean) / by;
  }
};

namespace cpu {
void mean(const MeanArgs& args);
void cross_entropy_forward(const ForwardArgs& args);
// `backward` reads what `forward` writes.
void cross_entropy_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward);
void cross_entropy_backward(const BackwardArgs& args);
void cross_entropy_backward_values(const BackwardArgs& args);
const char* instruction_set();  // "avx512", "avx2" or "default"
}  // namespace cpu

}  // namespace sparse_ce
