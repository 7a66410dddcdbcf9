// masked_mean.h - Defines the masked mean along some dimensions of a tensor, and the arguments of the devices.
//
// The dimensions are merged into three axes: a kept one (`outer`), a reduced one (`rows`), and the columns, which are
// either kept or reduced. Tensors with more axes are copied first.
#pragma once

#include "../core/math.h"

#include <algorithm>

namespace sparse_ce {

// Holds an offset, or the stride of an axis, in elements of each tensor.
struct Place {
  int64_t input = 0, mask = 0, out = 0;

  SCE_HD Place moved(const Place& stride, int64_t steps) const {
    return {input + stride.input * steps, mask + stride.mask * steps, out + stride.out * steps};
  }
  bool operator!=(const Place& other) const { return input != other.input || mask != other.mask || out != other.out; }
};

struct Axis {
  int64_t size = 1;
  Place stride;  // `out` is 0 along a reduced axis
};

struct MaskedMeanArgs {
  Axis outer, rows, columns;  // column strides: input 1; mask 1, or 0 if shared; out 1, or 0 if reduced
  DType dtype, mask_dtype;
  const void* input;  // forward only
  const void* mask;  // weights: kUInt8 (also for bool) or the arithmetic dtype
  bool selects;  // true if the mask is bool: weights are 0 and 1; forward only
  void* mean;  // indexed by `out`; forward only
  void* divisor;  // indexed by `out`, arithmetic dtype; forward only
  const void* share;  // indexed by `out`, arithmetic dtype: grad_output / divisor; backward only
  void* grad_input;  // indexed by `input`; backward only
  int64_t max_blocks;  // 0 means no limit; tests lower it, so that blocks process several items

  SCE_HD bool columns_kept() const { return columns.stride.out != 0; }
  SCE_HD int64_t outputs() const { return outer.size * (columns_kept() ? columns.size : 1); }

  template <typename scalar_t>
  SCE_HD void finish(int64_t out, const MaskedSum<double>& total) const {
    using acc_t = acc_type<scalar_t>;
    from_acc(static_cast<acc_t>(total.mean()), static_cast<scalar_t*>(mean)[out]);
    static_cast<acc_t*>(divisor)[out] = static_cast<acc_t>(total.divisor());
  }
};

// Divides the work into items of `height` rows and `width` columns at one outer position. Items at the ends are
// smaller.
struct MaskedMeanPlan {
  struct Item {
    Place place;
    int64_t rows, columns, part;
  };
  int64_t height, width, down, across;  // down, across: number of items along the rows and along the columns
  int64_t parts, items;  // parts: number of items that contribute to one output

  MaskedMeanPlan(const MaskedMeanArgs& args, int64_t most_rows, int64_t most_columns)
      : height(std::min(args.rows.size, most_rows)), width(std::min(args.columns.size, most_columns)),
        down(divide_up(args.rows.size, height)), across(divide_up(args.columns.size, width)),
        parts(args.columns_kept() ? down : down * across), items(args.outer.size * down * across) {}

  SCE_HD Item item(const MaskedMeanArgs& args, int64_t i) const {
    const int64_t beside = i % across, below = i / across % down, row = below * height, column = beside * width;
    const int64_t rows = args.rows.size - row, columns = args.columns.size - column;
    const Place place = Place{}.moved(args.outer.stride, i / across / down).moved(args.rows.stride, row);
    return {place.moved(args.columns.stride, column), rows < height ? rows : height, columns < width ? columns : width,
            args.columns_kept() ? below : below * across + beside};
  }
  // Writes an item's sum of output c: as a mean, or to partial (parts, outputs), which is merged later.
  template <typename scalar_t, typename acc_t>
  SCE_HD void put(const MaskedMeanArgs& args, const Item& item, int64_t c, const MaskedSum<double>& total,
                  MaskedSum<acc_t>* partial) const {
    const int64_t out = item.place.out + c;
    if (parts == 1) return args.finish<scalar_t>(out, total);
    partial[item.part * args.outputs() + out] = {static_cast<acc_t>(total.sum), static_cast<acc_t>(total.weight)};
  }
};

namespace cpu {
void masked_mean(const MaskedMeanArgs& args);
void masked_mean_backward(const MaskedMeanArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
