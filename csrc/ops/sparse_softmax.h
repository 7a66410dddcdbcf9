// sparse_softmax.h - Defines softmax over the entries of each row of a sparse matrix, and the arguments of the devices.
#pragma once

#include "../core/math.h"

namespace sparse_ce {

// Computes softmax over the entries of a row of a sparse matrix, as if all other elements were -inf:
//
//   log_softmax   y_k = z_k - lse           dloss/dz_k = g_k - exp(y_k) sum_i g_i
//   softmax       y_k = exp(z_k - lse)      dloss/dz_k = y_k (g_k - sum_i g_i y_i)
template <typename acc_t>
struct SoftmaxRow {
  acc_t max;
  acc_t of_sum;  // of s = sum_i exp(z_i - max): log_softmax has log(s), softmax has 1 / s

  // If all entries of a row are -inf, every result is NaN.
  template <bool log>
  SCE_HD static SoftmaxRow of(const RowStats<acc_t>& row) {
    return {row.max, log ? row.log_total() : acc_t(1) / row.total()};
  }
  template <bool log>
  SCE_HD acc_t at(acc_t z) const {
    return log ? (z - max) - of_sum : exponential(z - max) * of_sum;
  }
};

template <typename acc_t>
struct SoftmaxGradient {
  acc_t sum = 0;
  acc_t own = 0;  // softmax: `sum` has g_i - own in place of g_i, so that an element with this g_i adds nothing

  template <bool log>
  SCE_HD static acc_t term(acc_t grad, acc_t y, acc_t own = 0) {
    return log ? grad : y * (grad - own);
  }
  template <bool log>
  SCE_HD acc_t at(acc_t grad, acc_t y) const {
    return log ? grad - exponential(y) * sum : y * ((grad - own) - sum);
  }

  // Returns true for an element that has most of its row. The results of `at` then lose digits, unless `own` is the g_i
  // of that element (softmax), or at_most computes the result for it (log_softmax).
  template <bool log>
  SCE_HD static bool has_most(acc_t y) {
    return y > acc_t(log ? -0.5 : 0.5);
  }
  // Returns the result for that element of log_softmax, where `others` is the sum of the other g_i.
  SCE_HD static acc_t at_most(acc_t grad, acc_t y, acc_t others) {
    return -(grad * exponential_less_1(y) + exponential(y) * others);
  }
};

// Row r has the entries [offsets[r], offsets[r + 1]) of `order`. Each of the `width` positions, which are the dense
// dimensions of a hybrid tensor, is an independent matrix.
struct SparseSoftmaxArgs {
  const void* offsets;  // (rows + 1,), ascending from 0 to entries
  const int64_t* order;  // (entries,), a permutation; null means that rows are contiguous
  DType offsets_dtype, dtype;
  int64_t rows, entries, width;
  bool log;
  const void* values;  // (entries, width); forward only
  const void* grad;  // (entries, width); backward only
  const void* output;  // (entries, width), output of forward; backward only
  void* result;  // (entries, width)
  int64_t max_blocks;  // 0 means no limit; tests lower it, so that blocks process several rows

  // These stay within the entries, even if offsets or order are invalid.
  SCE_HD int64_t row_begin(int64_t r) const {
    const int64_t begin = load_int(offsets, offsets_dtype, r);
    return begin < 0 ? 0 : begin > entries ? entries : begin;
  }
  SCE_HD int64_t at(int64_t i) const {
    if (!order) return i;
    return static_cast<uint64_t>(order[i]) < static_cast<uint64_t>(entries) ? order[i] : i;
  }
};

namespace cpu {
void sparse_softmax(const SparseSoftmaxArgs& args);
void sparse_softmax_backward(const SparseSoftmaxArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
