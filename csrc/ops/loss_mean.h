// loss_mean.h - what the bindings hand to a device: the mean of the rows' losses.
#pragma once

#include "../core/math.h"
#include "../core/target.h"

namespace sparse_ce {

// The losses of some rows and what these count for. A mean over nothing is 0.
template <typename acc_t>
struct LossMeanStats {
  acc_t total = 0, count = 0;

  SCE_HD void merge(const LossMeanStats& other) {
    total += other.total;
    count += other.count;
  }
  SCE_HD acc_t mean() const { return count == acc_t(0) ? acc_t(0) : total / count; }
  // Of a row's share in the gradient of the mean.
  SCE_HD acc_t divisor() const { return count == acc_t(0) ? acc_t(INFINITY) : count; }
};

struct LossMeanArgs {
  const void* loss;         // (rows,), any stride, or null: only the divisor is asked for
  int64_t loss_stride;
  DType dtype;              // float32 or float64, of all that is not the target's
  TargetView target;
  const void* normalizer;   // (1,), or null: the count of the rows
  const void* row_weight;   // (rows,), any stride, or null: what each loss is multiplied by
  int64_t row_weight_stride;
  const void* grad_mean;    // (1,), or null
  void* mean;               // (1,), or null without a loss
  void* divisor;            // (1,)
  void* grad_loss;          // (1,), or null without grad_mean: the gradient of every row's loss

  template <typename acc_t>
  SCE_HD LossMeanStats<double> row(int64_t r) const {
    return of(r, weight_of<acc_t>(r), loss_of<acc_t>(r), asks_whether_ignored() && target.ignored(r));
  }
  // The same in parts, for a device that reads what belongs to many rows before it waits for one.
  SCE_HD bool asks_whether_ignored() const { return row_weight || !normalizer; }
  template <typename acc_t>
  SCE_HD acc_t weight_of(int64_t r) const {
    return row_weight ? static_cast<const acc_t*>(row_weight)[r * row_weight_stride] : acc_t(1);
  }
  template <typename acc_t>
  SCE_HD acc_t loss_of(int64_t r) const {
    return loss ? static_cast<const acc_t*>(loss)[r * loss_stride] : acc_t(0);
  }
  template <typename acc_t>
  SCE_HD LossMeanStats<double> of(int64_t r, acc_t by, acc_t loss_of_row, bool ignored) const {
    // A choice, not a product: a row of weight 0 may have a loss of inf, and one that is ignored any weight.
    const bool counts = loss && by != acc_t(0) && !(row_weight && ignored);
    return {counts ? double(by) * double(loss_of_row) : 0.0,
            normalizer || ignored ? 0.0 : double(target.count<acc_t>(r))};
  }

  template <typename acc_t>
  SCE_HD void finish(LossMeanStats<double> stats) const {
    if (normalizer) stats.count = double(*static_cast<const acc_t*>(normalizer));
    const acc_t by = static_cast<acc_t>(stats.divisor());
    *static_cast<acc_t*>(divisor) = by;
    if (mean) *static_cast<acc_t*>(mean) = static_cast<acc_t>(stats.mean());
    if (grad_mean) *static_cast<acc_t*>(grad_loss) = *static_cast<const acc_t*>(grad_mean) / by;
  }
};

namespace cpu {
void loss_mean(const LossMeanArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
