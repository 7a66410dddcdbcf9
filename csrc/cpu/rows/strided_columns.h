// strided_columns.h - Implements the loops over the logits of a block of adjacent rows, with vectors that span rows.
// Instantiated for every instruction set in strided_rows.cpp.
#pragma once

#include "../../core/math.h"
#include "../simd/exp_tile.h"

#include <algorithm>
#include <type_traits>

namespace sparse_ce {
namespace cpu {

// Each group of this many columns is summed separately from 0, because a single sum over a long row would have too
// large a rounding error. The number is fixed, so that results do not depend on the blocks.
constexpr int64_t kColumns = 64;

constexpr int64_t kMostRows = 512;  // of a block: its statistics and one column fit into the L1 cache
constexpr int64_t kLeastRows = 128;  // a column of a block spans several cache lines
constexpr int64_t kBlockBytes = 1 << 19;  // of a block's converted logits: with its gradient it fits into the L2 cache
constexpr int64_t kAhead = 12;  // prefetch distance in columns
constexpr int64_t kSome = 128;  // rows; a few columns of more rows exceed the number of outstanding prefetches

// Holds the data of a block's rows, one array per field.
template <typename acc_t>
struct BlockRows {
  alignas(64) acc_t scale[kMostRows];  // multiplies logit_scale
  alignas(64) acc_t max[kMostRows];
  alignas(64) acc_t rest[kMostRows];
  alignas(64) acc_t weighted[kMostRows];
  acc_t weight;  // RowStats::weight, equal for all rows
  alignas(64) acc_t a[kMostRows], b[kMostRows], lse[kMostRows], lse_residual[kMostRows];
  alignas(64) acc_t active[kMostRows];  // 0 if the gradient is 0, whatever the logits are

  RowStats<acc_t> stats(int64_t i) const { return {max[i], rest[i], weighted[i], weight}; }
};

// Views the logits of a block of rows. z is (columns, stride), of which the first `rows` of each column are used, or
// null.
template <typename scalar_t>
struct BlockColumns {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* logits;  // at the first row and column
  int64_t step, apart;  // strides of columns and of rows
  int64_t rows, begin, end;
  int64_t available;  // number of existing columns
  acc_t* z;
  int64_t stride;

  SCE_HD const scalar_t* at(int64_t c) const { return logits + c * step; }
  SCE_HD acc_t* z_of(int64_t c) const { return z + (c - begin) * stride; }
};

// Prefetches into the L2 cache. If an image's width is a power of two, few columns fit into their L1 sets.
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

// Prefetches some rows of the columns that are kAhead after [c, end).
template <typename scalar_t>
SCE_HD void prefetch_columns(const BlockColumns<scalar_t>& columns, int64_t c, int64_t end, int64_t row, int64_t n) {
  for (int64_t k = c + kAhead; k < end + kAhead && k < columns.available; ++k) prefetch_column(columns.at(k) + row, n);
}

// Calls f(Count<k>{}, column) for the columns [begin, end) in groups of k, so that the data of a row is loaded once per
// group, or `singly`. Processors without AVX2 are rare, and each k takes long to compile.
#ifdef SCE_X86
template <InstructionSet set>
constexpr int kTogether = set == InstructionSet::kDefault ? 1 : 4;
#else
template <InstructionSet set>
constexpr int kTogether = 4;
#endif
template <int count>
using Count = std::integral_constant<int, count>;
template <InstructionSet set, typename function_t>
SCE_HD void for_columns(int64_t begin, int64_t end, bool singly, const function_t& f) {
  constexpr int kGroup = kTogether<set>;
  for (; !singly && begin + kGroup <= end; begin += kGroup) f(Count<kGroup>{}, begin);
  for (; begin < end; ++begin) f(Count<1>{}, begin);
}
#define SCE_EACH_COLUMN(k, count) _Pragma("GCC unroll 4") for (int k = 0; k < count; ++k)

// Returns true if logits without a softcap are multiplied by a scale.
SCE_HD bool multiplies(const LossOptions& options, bool scaled) {
  return scaled || !LogitTransform<double>(options).identity();
}

// Calls f(transform), compiled for options without a softcap. transform(logit, i) returns z of row i. scale is (rows,).
template <typename acc_t, typename function_t>
SCE_HD void with_scale(const LossOptions& options, bool scaled, const acc_t* scale, const function_t& f) {
  if (multiplies(options, scaled))
    f([&](acc_t logit, int64_t i)
          SCE_INLINE { return rounded_product(LogitTransform<acc_t>(options, scale[i]).scale, logit); });
  else
    f([&](acc_t logit, int64_t) SCE_INLINE { return logit; });
}

// Returns true for a softcap with a scale of each row, which is rare. Its loops are compiled for single columns only.
SCE_HD bool caps_singly(const LossOptions& options, bool scaled) { return options.softcap != 0 && scaled; }

// Calls f(transform) for any options that `count` columns may have.
template <int count, typename acc_t, typename function_t>
SCE_HD void with_transform(const LossOptions& options, bool scaled, const acc_t* scale, const function_t& f) {
  if (count == 1 && options.softcap != 0)
    return f([&](acc_t logit, int64_t i) SCE_INLINE { return LogitTransform<acc_t>(options, scale[i])(logit); });
  with_scale(options, scaled, scale, f);
}

// Returns true if all rows have the same scale under a softcap, so that tanh can be computed by columns.
SCE_HD bool caps_columns(const LossOptions& options, bool scaled) { return options.softcap != 0 && !scaled; }

// Computes z for `count` columns of logits x with stride `step`, n rows each, and with `sloped` also dz/d(scale x).
template <InstructionSet set, bool sloped, typename source_t, typename acc_t>
SCE_HD void cap_columns(int count, const source_t* x, int64_t step, int64_t n, const LossOptions& options, acc_t* z,
                        int64_t stride, [[maybe_unused]] acc_t* slopes) {
  // Copies, because a reference would let float64 gradients alias the caller's options.
  const LogitTransform<acc_t> transform(options);
  Outlined<set>::call([=]() SCE_INLINE {
    for (int k = 0; k < count; ++k)
      cap_into<set, sloped>(x + k * step, n, transform, z + k * stride, sloped ? slopes + k * stride : nullptr);
  });
}

// Computes z for `count` columns of logits x with stride `step`, n rows each, and updates the rows' maxima `max`.
template <InstructionSet set, int count, typename source_t, typename acc_t>
SCE_HD void transform_columns(const source_t* x, int64_t step, int64_t n, const LossOptions& options, bool scaled,
                              const acc_t* scale, acc_t* z, int64_t stride, acc_t* max) {
  if (caps_columns(options, scaled)) {
    cap_columns<set, false>(count, x, step, n, options, z, stride, static_cast<acc_t*>(nullptr));
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) {
      SCE_EACH_COLUMN(k, count) max[i] = z[k * stride + i] > max[i] ? z[k * stride + i] : max[i];  // NaN loses
    }
    return;
  }
  with_transform<count>(options, scaled, scale, [&](const auto& transform) SCE_INLINE {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) {
      acc_t highest = max[i];
      SCE_EACH_COLUMN(k, count) {
        const acc_t of_row = transform(to_acc(x[k * step + i]), i);
        z[k * stride + i] = of_row;
        highest = of_row > highest ? of_row : highest;  // NaN loses
      }
      max[i] = highest;
    }
  });
}

// Does the same for the logits from column c on.
template <InstructionSet set, int count, typename scalar_t, typename acc_t>
SCE_HD void load_some(const BlockColumns<scalar_t>& columns, int64_t c, const LossOptions& options, bool scaled,
                      const BlockRows<acc_t>& rows, acc_t* max) {
  Outlined<set>::call([&]() SCE_INLINE {
    const int64_t n = columns.rows, stride = columns.stride, step = columns.step, apart = columns.apart;
    const scalar_t* x = columns.at(c);
    acc_t* z = columns.z_of(c);
    if (apart != 1) {
      for (int k = 0; k < count; ++k)
        for (int64_t i = 0; i < n; ++i) z[k * stride + i] = to_acc(x[k * step + i * apart]);
      return transform_columns<set, count>(z, stride, n, options, scaled, rows.scale, z, stride, max);
    }
    for (int64_t i = 0; i < n; i += kSome) {
      const int64_t m = n - i < kSome ? n - i : kSome;
      prefetch_columns(columns, c, c + count, i, m);
      transform_columns<set, count>(x + i, step, m, options, scaled, rows.scale + i, z + i, stride, max + i);
    }
  });
}

template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void load_columns(const BlockColumns<scalar_t>& columns, const LossOptions& options, bool scaled,
                         const BlockRows<acc_t>& rows, acc_t* max) {
  for (int64_t i = 0; i < columns.rows; ++i) max[i] = RowStats<acc_t>().max;
  for_columns<set>(columns.begin, columns.end, caps_singly(options, scaled), [&](auto count, int64_t c) SCE_INLINE {
    load_some<set, decltype(count)::value>(columns, c, options, scaled, rows, max);
  });
}

// Replaces z by exp(z - max) if there is no softcap, whose slope needs z. Calls `also(count, column)` in between. `sum`
// (rows,) receives the sums of those below the maximum, and `ties` (rows,) the number of the others, unless they are
// null.
template <InstructionSet set, typename scalar_t, typename acc_t, typename also_t>
SCE_HD void raise_columns(const BlockColumns<scalar_t>& columns, const acc_t* max, bool in_place, acc_t* sum,
                          acc_t* ties, const also_t& also) {
  const int64_t n = columns.rows, stride = columns.stride;
  for_columns<set>(columns.begin, columns.end, /*singly=*/false, [&](auto count, int64_t c) SCE_INLINE {
    constexpr int kCount = decltype(count)::value;
    acc_t* z = columns.z_of(c);
    const auto exp_of = [&](int k, int64_t i) SCE_INLINE {
      return exponential_below<degree_for<scalar_t>>(z[k * stride + i] - max[i]);  // valid for NaN
    };
    if (in_place) {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        acc_t total = sum[i], equal = ties[i];
        SCE_EACH_COLUMN(k, kCount) {
          const bool is_max = z[k * stride + i] == max[i];
          const acc_t e = z[k * stride + i] = exp_of(k, i);
          total += is_max ? acc_t(0) : e;
          equal += is_max ? acc_t(1) : acc_t(0);
        }
        sum[i] = total, ties[i] = equal;
      }
    } else {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        acc_t total = sum[i], equal = ties[i];
        SCE_EACH_COLUMN(k, kCount) {
          const bool is_max = z[k * stride + i] == max[i];
          total += is_max ? acc_t(0) : exp_of(k, i);
          equal += is_max ? acc_t(1) : acc_t(0);
        }
        sum[i] = total, ties[i] = equal;
      }
    }
    also(count, c);
  });
}

// Adds the statistics of at most kColumns columns to those of the rows. `max` (rows,) is the maximum of these columns.
// class_weight covers all columns, or is null. With `keep`, exponentials replace z. The columns `next` and their maxima
// `next_max` are loaded at the same time, so that exponentials are computed while memory is read.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void push_columns(const BlockColumns<scalar_t>& columns, const acc_t* max, const BlockColumns<scalar_t>& next,
                         acc_t* next_max, const LossOptions& options, bool scaled, const acc_t* class_weight, bool keep,
                         BlockRows<acc_t>& rows) {
  alignas(64) acc_t sum[kMostRows], ties[kMostRows], smoothed[kMostRows];
  const int64_t n = columns.rows;
  for (int64_t i = 0; i < n; ++i) {
    next_max[i] = RowStats<acc_t>().max;
    sum[i] = ties[i] = smoothed[i] = acc_t(0);
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
  raise_columns<set>(columns, max, keep, sum, ties, [&](auto count, int64_t c) SCE_INLINE {
    constexpr int kCount = decltype(count)::value;
    const int64_t ahead = c - columns.begin + next.begin, end = std::min<int64_t>(ahead + kCount, next.end);
    if (ahead + kCount == end && !caps_singly(options, scaled))
      return load_some<set, kCount>(next, ahead, options, scaled, rows, next_max);
    for (int64_t k = ahead; k < end; ++k) load_some<set, 1>(next, k, options, scaled, rows, next_max);
  });
  const acc_t before = rows.weight;
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) {
    RowStats<acc_t> stats{rows.max[i], rows.rest[i], rows.weighted[i], before};
    // An infinite maximum makes the sum NaN.
    stats.merge({max[i], (ties[i] - acc_t(1)) + sum[i] + (max[i] - max[i]), smoothed[i], weight});
    rows.max[i] = stats.max;
    rows.rest[i] = stats.rest;
    rows.weighted[i] = stats.weighted;
  }
  rows.weight += weight;
}

// Writes the gradient as if no column had an entry. It may overwrite the logits. The source is z, or the exponentials
// relative to `max` (rows,) that replaced it; `z` becomes scratch memory.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void write_columns(const BlockColumns<scalar_t>& columns, const acc_t* max, const LossOptions& options,
                          const acc_t* class_weight, const BlockRows<acc_t>& rows, const Destination<scalar_t>& to,
                          int64_t step, int64_t apart) {
  const bool capped = options.softcap != 0, smoothed = options.label_smoothing != 0;
  const int64_t n = columns.rows;
  const auto of_row = [&](int64_t i) SCE_INLINE {
    return GradientCoefficients<acc_t>(rows.a[i], rows.b[i], acc_t(0), rows.lse[i], rows.lse_residual[i]);
  };
  alignas(64) acc_t per_exp[kMostRows], scale[kMostRows];
  bool all_active = true;
  for (int64_t i = 0; i < n; ++i) all_active &= rows.active[i] != acc_t(0);
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = LogitTransform<acc_t>(options, rows.scale[i]).scale;
    per_exp[i] = capped ? acc_t(0) : of_row(i).per_exp(max[i]) * scale[i];
  }
  for (int64_t c = columns.begin; c < columns.end; ++c) {
    acc_t* const z = columns.z_of(c);
    alignas(64) scalar_t together[kMostRows];
    const bool at_once = apart == 1 && !(to.nontemporal && n * sizeof(scalar_t) >= 4 * kLine);
    scalar_t* const gradient = to.gradient + c * step;
    scalar_t* const out = at_once ? gradient : together;
    if (at_once && c + kAhead < columns.available) prefetch_to_write(out + kAhead * step, n);
    const acc_t o = !smoothed ? acc_t(0) : class_weight ? class_weight[c] : acc_t(1);  // avoids inf times 0
    if (capped) {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i)
        z[i] = of_row(i).at(z[i], o) * LogitTransform<acc_t>(options, rows.scale[i]).slope(z[i]);
    } else if (smoothed) {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) z[i] = per_exp[i] * z[i] - rows.b[i] * o * scale[i];
    }
    const bool adjusted = capped || smoothed;
    const auto write = [&](const auto& term) SCE_INLINE { narrow<set>(n, term, z, out); };
    if (all_active && !adjusted)
      write([&](int64_t i) SCE_INLINE { return per_exp[i] * z[i]; });
    else if (adjusted)
      write([&](int64_t i) SCE_INLINE { return rows.active[i] != acc_t(0) ? z[i] : acc_t(0); });
    else
      write([&](int64_t i) SCE_INLINE { return rows.active[i] != acc_t(0) ? per_exp[i] * z[i] : acc_t(0); });
    if (apart == 1 && !at_once) stream_copy<set>(together, n, gradient);
    for (int64_t i = 0; apart != 1 && i < n; ++i) gradient[i * apart] = together[i];
  }
}

}  // namespace cpu
}  // namespace sparse_ce
