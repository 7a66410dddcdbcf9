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

namespace cpu {
void cross_entropy_forward(const ForwardArgs& args);
// `backward` reads what `forward` writes.
void cross_entropy_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward);
void cross_entropy_backward(const BackwardArgs& args);
void cross_entropy_backward_values(const BackwardArgs& args);
const char* instruction_set();  // "avx512", "avx2" or "default"
}  // namespace cpu

}  // namespace sparse_ce
