// select_gradient.cuh - Computes the gradient of select for a part of a row.
#pragma once

#include "../../ops/select.h"
#include "entry_bitmap.cuh"
#include "row_passes.cuh"

namespace sparse_ce {
namespace cuda {

// Writes the gradient of the columns [begin, end) as if no column had an entry; `gradient` may be `row`. Returns the
// contribution of this thread's columns to dl/ds, without `most` and columns that have entries. See common_logit for
// `common`.
template <int kWidth, bool kScales, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ acc_t write_select(const SelectBackwardArgs& args, const SelectCoefficients<acc_t>& c,
                              const LogitTransform<acc_t>& transform, int64_t r, const scalar_t* row,
                              scalar_t* gradient, int64_t begin, int64_t end, acc_t common, int64_t most) {
  const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
  const int width = common_width(row, gradient);
  LongSum<acc_t> of_scale;
  const auto one = [&](const LogitTransform<acc_t>& of_logit, acc_t x, int64_t column, bool marked) {
    const auto [z, of_cap] = of_logit.with_slope(x);
    acc_t derivative = c.at(z, weight ? weight[column] : acc_t(1));
    if (c.beside != acc_t(0)) derivative += c.at_tail(z);
    if (kScales && !marked) of_scale.add(args.scale_term(derivative * of_cap, x, common));
    return derivative * (of_logit.scale * of_cap);
  };
  const auto range = [&] { return args.target.row(r); };
  for_windows<kWidth, acc_t>(kScales, args.target, range, begin, end, most, [&](int64_t from, int64_t to, auto bits) {
    for_columns<kWidth, kGeneralUnroll>(
        row, from, to, true,
        [&](int64_t column, auto count) {
          constexpr int n = decltype(count)::value, kSize = Pack<scalar_t>::kSize, kStride = kWidth * kSize;
          Pack<scalar_t> packs[n];
          load_packs<kStride>(row + column, count, packs);
#pragma unroll
          for (int u = 0; u < n; ++u) {
            if (!count.has(u)) break;
            const int64_t at = column + u * kStride;
            const unsigned marked = bits(at);
            acc_t x[kSize];
            to_numbers(packs[u], x);
            by_softcap(transform, [&](const auto& of_logit) {
#pragma unroll
              for (int i = 0; i < kSize; ++i) x[i] = one(of_logit, x[i], at + i, marked >> i & 1u);
            });
            from_numbers(x, packs[u]);
            packs[u].store(gradient + at, width);
          }
        },
        [&](int64_t column) {
          from_acc(one(transform, to_acc(row[column]), column, bits(column) & 1u), gradient[column]);
        });
  });
  return of_scale.sum;
}

// Returns the column of a class that holds most, if this thread finds it in the columns [begin, end), or -1.
template <int kWidth, typename scalar_t, typename acc_t>
__device__ int64_t column_of_most(const SelectCoefficients<acc_t>& c, const LogitTransform<acc_t>& transform,
                                  const scalar_t* row, int64_t begin, int64_t end) {
  const acc_t sign = transform.scale < acc_t(0) ? acc_t(-1) : acc_t(1);
  int64_t most = -1;
  const auto find = [&](int64_t column, const auto& x) {
    constexpr int n = sizeof(x) / sizeof(acc_t);
    acc_t largest = -acc_t(INFINITY);
#pragma unroll
    for (int i = 0; i < n; ++i) largest = larger(sign * x[i], largest);
    if (!c.holds_most(transform(sign * largest))) return;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (sign * x[i] == largest) most = column + i;
  };
  for_columns<kWidth, 1>(
      row, begin, end, true,
      [&](int64_t column, auto) {
        acc_t x[Pack<scalar_t>::kSize];
        to_numbers(Pack<scalar_t>::load(row + column), x);
        find(column, x);
      },
      [&](int64_t column) {
        const acc_t x[] = {to_acc(row[column])};
        find(column, x);
      });
  return most;
}

}  // namespace cuda
}  // namespace sparse_ce
