// candidates.h - Defines the logits of a linear head at a few ids per row, their formulas and the arguments of the
// devices.
//
// Entry i of row r has the id c_i and the grad_output g_i:
//
//   z_i = transform(<x_r, W_{c_i}> + b_{c_i})          d_i = g_i dz_i/d(<x_r, W_{c_i}> + b_{c_i})
//   dx_r = sum_{i in r} d_i W_{c_i}                    dW_c = sum_{i: c_i = c} d_i x_{r_i}
//                                                      db_c = sum_{i: c_i = c} d_i
//
// Padding has z = -inf, and an entry whose id is out of range has z = NaN. Neither has a gradient, and neither does an
// entry with g = 0. Rows of x and W that only such entries use are not read.
#pragma once

#include "../core/math.h"
#include "../core/target.h"

namespace sparse_ce {

// Shapes: x (rows, width) and W (vocab, width), with unit column stride and any row stride. W and b have the dtype of
// x, or float32 if x has 16 bits.
struct CandidateArgs {
  const void* input;
  const void* weight;
  const void* bias;  // (vocab,), or null
  DType input_dtype, weight_dtype, bias_dtype;
  int64_t width, input_stride, weight_stride;
  TargetView target;  // without class weights; its values only determine padding
  LossOptions options;
  int64_t max_blocks;  // 0 means no limit; tests lower it, so that blocks process several rows

  template <typename input_t>
  SCE_HD const input_t* input_row(int64_t r) const {
    return static_cast<const input_t*>(input) + r * input_stride;
  }
  template <typename weight_t>
  SCE_HD const weight_t* weight_row(int64_t column) const {
    return static_cast<const weight_t*>(weight) + column * weight_stride;
  }
};

struct CandidateForwardArgs : CandidateArgs {
  void* logits;  // (entries,) arithmetic dtype

  // Writes the logit of an entry from `dot` = <x_r, W_column>.
  template <typename acc_t>
  SCE_HD void write(int64_t i, int64_t column, acc_t dot, const LogitTransform<acc_t>& transform) const {
    static_cast<acc_t*>(logits)[i] = transform.nearest(bias ? dot + load_float<acc_t>(bias, bias_dtype, column) : dot);
  }
  // Writes the logit of an entry without a class.
  template <typename acc_t>
  SCE_HD void write_none(int64_t i, int64_t column) const {
    static_cast<acc_t*>(logits)[i] = column == TargetView::kPadding ? -acc_t(INFINITY) : Limits<acc_t>::kNaN;
  }
};

// Represents an entry's contribution to the gradients. There is none if d is 0.
template <typename acc_t>
struct CandidateGradient {
  int64_t column;  // negative if the entry has no class
  acc_t d;
};

struct CandidateBackwardArgs : CandidateArgs {
  const void* grad;  // (entries,) arithmetic dtype
  const void* logits;  // (entries,), the output of forward; null without a softcap
  void* grad_input;  // (rows, width), dtype of input; or null
  void* grad_logits;  // (entries,) arithmetic dtype: d; or null, as are the next two
  int64_t* ids;  // (entries + 1,), vocab on entry: the id of each entry that has a gradient
  int64_t* rows;  // (entries,): its row

  template <typename acc_t>
  SCE_HD CandidateGradient<acc_t> gradient(int64_t i, const LogitTransform<acc_t>& transform) const {
    const int64_t column = target.column<acc_t>(i);
    const acc_t g = static_cast<const acc_t*>(grad)[i];
    if (column < 0 || g == acc_t(0)) return {-1, acc_t(0)};
    return {column, g * transform.slope(logits ? static_cast<const acc_t*>(logits)[i] : acc_t(0))};
  }
  // Stores the entry for the weight gradient.
  template <typename acc_t>
  SCE_HD void keep(int64_t i, int64_t r, const CandidateGradient<acc_t>& gradient) const {
    static_cast<acc_t*>(grad_logits)[i] = gradient.d;
    ids[i] = gradient.column;
    rows[i] = r;
  }
};

// Holds the arguments for the gradients of the head. Entries with the same id are adjacent in `ids` and are added in
// their order.
struct CandidateWeightArgs {
  const void* input;  // (rows, width)
  DType input_dtype, weight_dtype, bias_dtype;
  int64_t width, input_stride;
  int64_t entries, vocab;
  const int64_t* ids;  // (entries + 1,), ascending; vocab for entries without a gradient and at the end
  const int64_t* order;  // (entries + 1,): the entry at each position
  const int64_t* slots;  // (entries + 1,): the row of grad_weight for each position; null means the id
  const int64_t* rows;  // (entries,), in the original order
  const void* grad_logits;  // (entries,), in the original order
  void* grad_weight;  // (vocab or fewer, width), or null; rows without an id are not written
  void* grad_bias;  // (vocab,), or null; ids without entries are not written
  int64_t max_blocks;

  SCE_HD bool begins(int64_t p) const { return ids[p] < vocab && (p == 0 || ids[p - 1] != ids[p]); }
  SCE_HD int64_t gradient_row(int64_t p) const { return slots ? slots[p] : ids[p]; }
  template <typename acc_t>
  SCE_HD void write_bias(int64_t p, acc_t sum) const {
    store_float(sum, grad_bias, bias_dtype, ids[p]);
  }
};

// Calls f(input_t{}, weight_t{}) with the C++ types that store the input and the weight.
template <typename function_t>
auto with_head(DType input, DType weight, function_t f) {
  return with_storage(input, [&](auto x) {
    if constexpr (sizeof(x) == 2)
      if (weight == DType::kFloat32) return f(x, float{});
    return f(x, x);
  });
}

namespace cpu {
void candidate_logits(const CandidateForwardArgs& args);
void candidate_logits_backward(const CandidateBackwardArgs& args);
void candidate_weight_gradient(const CandidateWeightArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
