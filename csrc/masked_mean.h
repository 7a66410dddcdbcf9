// masked_mean.h - what the bindings hand to a device: the mean under a mask along some dimensions of a tensor.
//
// Dimensions that lie behind one another are merged. What is left is a nest: axes that are kept (`outer`), axes that
// are reduced (`rows`), and the innermost axis, the columns, which is either. Columns lie side by side in the input
// and, if they are kept, in the outputs; in the mask they do too, or share one weight. What is not so is copied before.
#pragma once

#include "math.h"

namespace sparse_ce {

constexpr int kMostAxes = 4;

// Elements between two neighbours along an axis, or from the first element, in each of the tensors.
struct Place {
  int64_t input = 0, mask = 0, out = 0;

  SCE_HD void move(const Place& stride, int64_t steps) {
    input += stride.input * steps;
    mask += stride.mask * steps;
    out += stride.out * steps;
  }
  SCE_HD Place moved(const Place& stride, int64_t steps) const {
    Place place = *this;
    place.move(stride, steps);
    return place;
  }
};

struct Axes {
  int64_t count = 1;  // product of the sizes
  int dims = 0;
  int64_t size[kMostAxes];
  Place stride[kMostAxes];  // `out` is 0 along axes that are reduced

  SCE_HD Place at(int64_t i) const {
    Place place;
    for (int d = dims - 1; d > 0; --d) {
      place.move(stride[d], i % size[d]);
      i /= size[d];
    }
    if (dims > 0) place.move(stride[0], i);
    return place;
  }
};

struct MaskedMeanArgs {
  Axes outer, rows;
  int64_t columns;
  Place column;  // the strides along the columns: 1; 1 or 0; 1 if they are kept, else 0
  bool columns_kept;
  DType dtype, mask_dtype;
  const void* input;  // forward only
  const void* mask;  // weights; bool is kUInt8
  void* mean;  // by `out`; forward only
  void* divisor;  // by `out`, arithmetic dtype; forward only
  const void* share;  // by `out`, arithmetic dtype, the upstream gradient over the divisor; backward only
  void* grad_input;  // by `input`; backward only
  int64_t max_blocks;  // 0: no limit. Tests lower it, so that blocks take several items

  // Outputs of one outer place.
  SCE_HD int64_t width() const { return columns_kept ? columns : 1; }

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
