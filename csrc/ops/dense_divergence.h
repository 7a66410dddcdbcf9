// dense_divergence.h - Defines the divergence of a student from a teacher whose logits are all known. This header does
// not depend on torch.
#pragma once

#include "../core/near_divergence.h"

namespace sparse_ce {

constexpr int kDenseStats = 5;  // numbers of a row

// Views logits (rows, classes) of a student or a teacher, and their transform.
struct DenseLogits {
  const void* data;
  DType dtype;
  int64_t row_stride, column_stride;
  LossOptions options;  // only the transform
  const void* row_scale;  // (rows,) or (1,), arithmetic dtype of the student; null means 1
  int64_t row_scale_stride;

  template <typename acc_t>
  SCE_HD LogitTransform<acc_t> transform(int64_t r) const {
    return LogitTransform<acc_t>(options,
                                 row_scale ? static_cast<const acc_t*>(row_scale)[r * row_scale_stride] : acc_t(1));
  }
};

// Selects what a call computes. kForward is kStatistics and then kSums. With sharded classes the caller merges the
// statistics of all shards before kSums, and their sums before kGradient.
enum class DenseStep : int32_t { kForward, kWithGradient, kStatistics, kSums, kGradient };

// Holds the factors of a row's gradient: grad_j = sum_k of_slope_k s_kj + of_q q_j, less of_label at the label.
template <typename acc_t>
struct DenseCoefficients {
  acc_t of_slope[kMostDivergences] = {}, of_q = 0, of_label = 0;

  SCE_HD bool zero() const {
    bool all = of_label == acc_t(0);
    for (int k = 0; k < kMostDivergences; ++k) all = all && of_slope[k] == acc_t(0);
    return all;
  }
  // Returns the sum of slopes times their factors. A factor of 0 hides slopes that are not finite.
  template <int count>
  SCE_HD acc_t weighed(const acc_t (&slope)[count]) const {
    acc_t sum = expected(of_slope[0], slope[0]);
    SCE_UNROLL
    for (int k = 1; k < count; ++k) sum += expected(of_slope[k], slope[k]);
    return sum;
  }
};

// Describes a call on logits (rows, columns) of both models. With K = divergence_count(kind):
//
//   stats (rows, 5): maximum, and sum of exponentials relative to it, of z and then of y; 0 in rows that are not read.
//     In rows that NearDivergence computes, the last one is log_ratio; in others it is inf.
//   sums (2 K + 2, rows): K divergences D, the cross entropy of the label, K sums C, which are not read under forward
//     KL, and the sum of q - p, which shows the error of log_ratio, in rows that NearDivergence computes
//   grad_j = [sum_k grad_sums_k (s_kj - q_j C_k) + grad_sums_K (q_j - (j == label))] dz_j/dx_j
struct DenseDivergenceArgs {
  DenseStep step;
  DenseLogits student, teacher;
  int64_t rows, columns;
  int64_t classes;  // the first ones of the columns; the gradient of the others is 0
  Divergence kind;
  double beta;
  const bool* row_mask;  // (rows,), false in rows without a divergence; null means that all rows have one
  const void* labels;  // (rows,), negative in rows without a label; null means no labels
  DType labels_dtype;
  int64_t first_class;  // of this shard
  void *stats, *sums;  // arithmetic dtype
  const void* grad_sums;  // (K + 1, rows); the last row is not read without labels
  void* grad;  // (rows, columns), dtype of the student, column stride 1; may be the logits of either model
  int64_t grad_row_stride;
  int64_t max_blocks;  // 0 means no limit

  SCE_HD bool writes_gradient() const { return step == DenseStep::kWithGradient || step == DenseStep::kGradient; }
  SCE_HD bool writes_stats() const { return step <= DenseStep::kStatistics; }
  SCE_HD bool writes_sums() const { return step != DenseStep::kStatistics && step != DenseStep::kGradient; }

  SCE_HD bool has_divergence(int64_t r) const { return !row_mask || row_mask[r]; }
  SCE_HD bool has_label(int64_t r) const { return labels && load_int(labels, labels_dtype, r) >= 0; }
  // Returns the column of the row's label, or -1 if it is none of this shard's.
  SCE_HD int64_t label(int64_t r) const {
    if (!labels) return -1;
    const int64_t column = load_int(labels, labels_dtype, r) - first_class;
    return column >= 0 && column < classes ? column : -1;
  }
  template <typename acc_t>
  SCE_HD acc_t& sum(int k, int64_t r) const {
    return static_cast<acc_t*>(sums)[k * rows + r];
  }
  template <typename acc_t>
  SCE_HD acc_t* stats_of(int64_t r) const {
    return static_cast<acc_t*>(stats) + kDenseStats * r;
  }
  // Returns true if the gradient takes the place of logits.
  SCE_HD bool overwrites() const { return grad == student.data || grad == teacher.data; }
  // Returns true if slopes are -p: their sum C is -1, even before it was computed.
  SCE_HD bool knows_slopes() const { return kind == Divergence::kForwardKl; }
  // `slope_sum(k)` returns C_k.
  template <typename acc_t, typename slope_sum_t>
  SCE_HD DenseCoefficients<acc_t> coefficients(int64_t r, bool near, const slope_sum_t& slope_sum) const {
    const int count = divergence_count(kind);
    const auto* grad = static_cast<const acc_t*>(grad_sums);
    const auto grad_of = [&](int k) { return grad[k * rows + r]; };
    DenseCoefficients<acc_t> by;
    if (has_label(r)) by.of_q = by.of_label = grad_of(count);
    if (!has_divergence(r)) return by;
    for (int k = 0; k < kMostDivergences; ++k) {  // the number is constant, so that a GPU keeps them in registers
      if (k >= count) break;
      by.of_slope[k] = grad_of(k);
      by.of_q -= expected(by.of_slope[k], knows_slopes() ? acc_t(near ? 0 : -1) : slope_sum(k));
    }
    return by;
  }
  template <typename acc_t>
  SCE_HD DenseCoefficients<acc_t> coefficients(int64_t r, bool near) const {
    return coefficients<acc_t>(r, near, [&](int k) { return sum<acc_t>(divergence_count(kind) + 1 + k, r); });
  }
};

namespace cpu {
void dense_divergence(const DenseDivergenceArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
