// masked_mean.h - what the bindings hand to a device: the mean under a mask along some dimensions of a tensor.
//
// Its elements lie along three axes: one that is kept (`outer`), one that is reduced (`rows`), and the columns, which
// are either. Dimensions are merged into these; a tensor that has more of them is copied before.
#pragma once

#include "math.h"

namespace sparse_ce {

// Elements between two neighbours along an axis, or from the first element, in each of the tensors.
struct Place {
  int64_t input = 0, mask = 0, out = 0;

  SCE_HD Place moved(const Place& stride, int64_t steps) const {
    return {input + stride.input * steps, mask + stride.mask * steps, out + stride.out * steps};
  }
};

struct Axis {
  int64_t size = 1;
  Place stride;  // `out` is 0 along an axis that is reduced
};

struct MaskedMeanArgs {
  Axis outer, rows, columns;  // the columns' strides: 1; 1, or 0 of a weight that they share; 1, or 0 if reduced
  DType dtype, mask_dtype;
  const void* input;  // forward only
  const void* mask;  // weights: kUInt8, which bool is too, or the arithmetic dtype
  void* mean;  // by `out`; forward only
  void* divisor;  // by `out`, arithmetic dtype; forward only
  const void* share;  // by `out`, arithmetic dtype, the upstream gradient over the divisor; backward only
  void* grad_input;  // by `input`; backward only
  int64_t max_blocks;  // 0: no limit. Tests lower it, so that blocks take several items

  SCE_HD bool columns_kept() const { return columns.stride.out != 0; }
  // Outputs of one outer place.
  SCE_HD int64_t width() const { return columns_kept() ? columns.size : 1; }

  template <typename scalar_t>
  SCE_HD void finish(int64_t out, const MaskedSum<double>& total) const {
    using acc_t = acc_type<scalar_t>;
    from_acc(static_cast<acc_t>(total.mean()), static_cast<scalar_t*>(mean)[out]);
    static_cast<acc_t*>(divisor)[out] = static_cast<acc_t>(total.divisor());
  }
};

namespace cpu {
void masked_mean(const MaskedMeanArgs& args);
void masked_mean_backward(const MaskedMeanArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
