// strided_columns.h - the loops over the logits of a block of adjacent rows, in vectors of rows. Instantiated for every
// instruction set in strided_rows.cpp.
#pragma once

#include "../math.h"
#include "instruction_set.h"

namespace sparse_ce {
namespace cpu {

// Columns whose sums are made one by one, from 0: one sum over all of a long row would round too often. A fixed number:
// the result does not depend on how rows are put into blocks.
constexpr int64_t kColumns = 64;

constexpr int64_t kMostRows = 512;  // of a block: its statistics and a column stay in the first cache
constexpr int64_t kLeastRows = 128;  // a column of a block is several cache lines
constexpr int64_t kBlockBytes = 1 << 19;  // of a block's logits, converted: with its gradient in the second cache
constexpr int64_t kAhead = 12;  // columns asked for before they are needed

// What belongs to the rows of a block, an array for each field.
template <typename acc_t>
struct BlockRows {
  alignas(64) acc_t scale[kMostRows];  // by which logit_scale is multiplied
  alignas(64) acc_t part_max[2][kMostRows];  // of kColumns columns
  alignas(64) acc_t max[kMostRows];
  alignas(64) acc_t sum[kMostRows];
  alignas(64) acc_t weighted[kMostRows];
  acc_t weight;  // RowStats::weight, the same for all rows
  alignas(64) acc_t a[kMostRows], b[kMostRows], lse[kMostRows], lse_residual[kMostRows];
  alignas(64) acc_t live[kMostRows];  // 0: the gradient is 0, whatever the logits are

  RowStats<acc_t> stats(int64_t i) const { return {max[i], sum[i], weighted[i], weight}; }
};

// Logits of a block of rows, z (columns, stride) of which the first `rows` of each column count.
template <typename scalar_t>
struct Columns {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* logits;  // of the first row and column
  int64_t step;  // to the next column
  int64_t rows, begin, end;
  int64_t available;  // columns that there are
  acc_t* z;
  int64_t stride;

  SCE_HD const scalar_t* at(int64_t c) const { return logits + c * step; }
  SCE_HD acc_t* z_of(int64_t c) const { return z + (c - begin) * stride; }
};

// Into the second cache: where images are a power of two wide, few columns fill their place in the first.
template <typename scalar_t>
SCE_HD void prefetch_column(const scalar_t* column, int64_t rows) {
  constexpr int64_t kLine = 64 / sizeof(scalar_t);
  for (int64_t i = 0; i < rows; i += kLine) __builtin_prefetch(column + i, 0, 2);
}

template <typename scalar_t>
SCE_HD void prefetch_to_write(const scalar_t* column, int64_t rows) {
  constexpr int64_t kLine = 64 / sizeof(scalar_t);
  for (int64_t i = 0; i < rows; i += kLine) __builtin_prefetch(column + i, 1);
}

// z of the logits of a column. `max`, of the rows, goes up with them, where it is not null.
template <typename scalar_t, typename acc_t>
SCE_HD void load_column(const Columns<scalar_t>& columns, int64_t c, const LossOptions& options, bool scaled,
                        const BlockRows<acc_t>& rows, acc_t* max) {
  const LogitTransform<acc_t> all(options);
  const int64_t n = columns.rows;
  const scalar_t* x = columns.at(c);
  acc_t* __restrict__ z = columns.z_of(c);
  if (c + kAhead < columns.available) prefetch_column(columns.at(c + kAhead), n);
  if (!scaled && all.identity()) {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) z[i] = to_acc(x[i]);
  } else if (all.softcap == acc_t(0)) {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) z[i] = LogitTransform<acc_t>(options, rows.scale[i]).scale * to_acc(x[i]);
  } else {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) z[i] = LogitTransform<acc_t>(options, rows.scale[i])(to_acc(x[i]));
  }
  if (!max) return;
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) max[i] = z[i] > max[i] ? z[i] : max[i];  // NaN loses
}

template <typename scalar_t, typename acc_t>
SCE_HD void load_columns(const Columns<scalar_t>& columns, const LossOptions& options, bool scaled,
                         const BlockRows<acc_t>& rows, acc_t* max) {
  for (int64_t i = 0; max && i < columns.rows; ++i) max[i] = RowStats<acc_t>().max;
  for (int64_t c = columns.begin; c < columns.end; ++c) load_column(columns, c, options, scaled, rows, max);
}

// Statistics of at most kColumns columns, added to those of the rows. `max` (rows,): of these columns. class_weight: of
// all columns, or null. Meanwhile the columns `next` are loaded, whose maxima become `next_max`: while they arrive from
// memory, exponentials are made.
template <typename scalar_t, typename acc_t>
SCE_HD void push_columns(const Columns<scalar_t>& columns, const acc_t* max, const Columns<scalar_t>& next,
                         acc_t* next_max, const LossOptions& options, bool scaled, const acc_t* class_weight,
                         BlockRows<acc_t>& rows) {
  alignas(64) acc_t sum[kMostRows], smoothed[kMostRows];
  const int64_t n = columns.rows;
  for (int64_t i = 0; i < n; ++i) {
    next_max[i] = RowStats<acc_t>().max;
    sum[i] = smoothed[i] = acc_t(0);
  }
  for (int64_t c = columns.begin; c < columns.end; ++c) {
    const acc_t* z = columns.z_of(c);
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) sum[i] += exponential_below<degree_for<scalar_t>>(z[i] - max[i]);  // with NaN
    const int64_t ahead = c - columns.begin + next.begin;
    if (ahead < next.end) load_column(next, ahead, options, scaled, rows, next_max);
  }
  acc_t weight = 0;
  for (int64_t c = columns.begin; options.label_smoothing != 0 && c < columns.end; ++c) {
    const acc_t* z = columns.z_of(c);
    const acc_t o = class_weight ? class_weight[c] : acc_t(1);
    weight += o;
    if (o == acc_t(0)) continue;  // a class of weight 0 adds 0 even at -inf
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) smoothed[i] += o * (z[i] - max[i]);
  }
  const acc_t before = rows.weight;
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) {
    RowStats<acc_t> stats{rows.max[i], rows.sum[i], rows.weighted[i], before};
    stats.merge({max[i], sum[i], smoothed[i], weight});
    rows.max[i] = stats.max;
    rows.sum[i] = stats.sum;
    rows.weighted[i] = stats.weighted;
  }
  rows.weight += weight;
}

// The gradient as if no column had an entry; it may be the logits, whose z are there already.
template <typename scalar_t, typename acc_t>
SCE_HD void write_columns(const Columns<scalar_t>& columns, const LossOptions& options, bool scaled,
                          const acc_t* class_weight, const BlockRows<acc_t>& rows, scalar_t* gradient, int64_t step) {
  const LogitTransform<acc_t> all(options);
  const bool plain = !scaled && all.identity() && options.label_smoothing == 0;
  const int64_t n = columns.rows;
  const auto coefficients = [&](int64_t i) SCE_INLINE {
    return GradientCoefficients<acc_t>(rows.a[i], rows.b[i], acc_t(0), rows.lse[i], rows.lse_residual[i]);
  };
  for (int64_t c = columns.begin; c < columns.end; ++c) {
    const acc_t* z = columns.z_of(c);
    scalar_t* out = gradient + c * step;
    if (c + kAhead < columns.available) prefetch_to_write(out + kAhead * step, n);
    if (plain) {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const acc_t g = coefficients(i).at(z[i]);
        from_acc(rows.live[i] != acc_t(0) ? g : acc_t(0), out[i]);
      }
    } else {
      const acc_t o = class_weight ? class_weight[c] : acc_t(1);
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const acc_t g = coefficients(i).at(z[i], o) * LogitTransform<acc_t>(options, rows.scale[i]).slope(z[i]);
        from_acc(rows.live[i] != acc_t(0) ? g : acc_t(0), out[i]);
      }
    }
  }
}

}  // namespace cpu
}  // namespace sparse_ce
