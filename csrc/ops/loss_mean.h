// loss_mean.h - Defines the mean of the rows' losses and the arguments of the devices.
#pragma once

#include "../core/math.h"
#include "../core/target.h"

namespace sparse_ce {

// Accumulates losses and the weights that they are divided by. The mean is 0 if there are no rows.
template <typename acc_t>
struct LossMeanStats {
  acc_t total = 0, count = 0;

  SCE_HD void merge(const LossMeanStats& other) {
    total += other.total;
    count += other.count;
  }
  SCE_HD acc_t mean() const { return count == acc_t(0) ? acc_t(0) : total / count; }
  // Returns the divisor for the gradients of the losses.
  SCE_HD acc_t divisor() const { return count == acc_t(0) ? acc_t(INFINITY) : count; }
};

struct LossMeanArgs {
  const void* loss;         // (rows,), any stride; null if only the divisor is requested
  int64_t loss_stride;
  DType dtype;              // float32 or float64, of all arrays except the target
  TargetView target;
  const void* normalizer;   // (1,) replaces the count of rows; or null
  const void* row_weight;   // (rows,), any stride, multiplies each loss; or null
  int64_t row_weight_stride;
  const void* grad_mean;    // (1,), or null
  void* mean;               // (1,); null without a loss
  void* divisor;            // (1,)
  void* grad_loss;          // (1,) gradient of every row's loss; null without grad_mean

  template <typename acc_t>
  SCE_HD LossMeanStats<double> row(int64_t r) const {
    return of(r, weight_of<acc_t>(r), loss_of<acc_t>(r), checks_ignored() && target.ignored(r));
  }
  // These evaluate `row` in parts, for devices that load the data of many rows before they use it.
  SCE_HD bool checks_ignored() const { return row_weight || !normalizer; }
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
    // Selects instead of multiplying: a row of weight 0 may have a loss of inf, and an ignored row any weight.
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
