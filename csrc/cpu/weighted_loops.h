// weighted_loops.h - the loops over columns and their weights that take the time of a masked mean, plain C++ that each
// instruction set instantiates (tile.h).
#pragma once

#include "../math.h"
#include "tile.h"

#include <type_traits>

namespace sparse_ce {
namespace cpu {

template <typename acc_t>
struct Same {
  acc_t value;
  SCE_HD acc_t operator[](int64_t) const { return value; }
};

// The loops, for weights that are bytes, numbers or one number for the whole row.
template <typename scalar_t, typename weights_t>
struct WeightedLoops {
  using acc_t = acc_type<scalar_t>;
  MaskedSum<acc_t> (*sum)(const scalar_t* x, weights_t w, int64_t n);
  // Adds `rows` rows to sum (n,) and, of weights that differ along a row, to weight (n,).
  void (*add)(const scalar_t* const* x, const weights_t* w, int64_t rows, int64_t n, acc_t* sum, acc_t* weight);
  void (*gradient)(const acc_t* share, weights_t w, int64_t n, scalar_t* gradient);
  void (*gradient_of_one_share)(acc_t share, weights_t w, int64_t n, scalar_t* gradient);
};

template <typename scalar_t>
struct MaskKernels {
  using acc_t = acc_type<scalar_t>;
  WeightedLoops<scalar_t, const uint8_t*> bytes;
  WeightedLoops<scalar_t, const acc_t*> numbers;
  WeightedLoops<scalar_t, Same<acc_t>> same;

  const auto& of(const uint8_t*) const { return bytes; }
  const auto& of(const acc_t*) const { return numbers; }
  const auto& of(Same<acc_t>) const { return same; }
};

// Columns that are worked on side by side. The loops over them have a constant length: of a loop of any length g++ 12
// makes code that converts bytes six times slower (AVX-512).
constexpr int64_t kColumns = 64;

// Bytes from the columns that are added to those that are fetched: two streams, the input and the mask, are more than
// the processor fetches well by itself (8192 x 4096 float32, 2 threads of an EPYC, 2026-11: 4.3 ms instead of 5.4).
constexpr int64_t kAhead = 2048;

template <typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void sum_lanes(const scalar_t* x, const weights_t w, int64_t begin, int64_t lanes, acc_t* __restrict__ sum,
                      acc_t* __restrict__ weight) {
  SCE_SIMD()
  for (int64_t i = 0; i < lanes; ++i) {
    const acc_t a = static_cast<acc_t>(w[begin + i]);
    sum[i] += MaskedSum<acc_t>::term(to_acc(x[begin + i]), a);
    weight[i] += a;
  }
}

template <typename scalar_t, typename weights_t, typename acc_t = acc_type<scalar_t>>
SCE_HD MaskedSum<acc_t> sum_body(const scalar_t* x, const weights_t w, int64_t n) {
  acc_t sum[kColumns] = {}, weight[kColumns] = {};
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) {
    const char* ahead = reinterpret_cast<const char*>(x + i) + kAhead;
    for (int64_t line = 0; line < kColumns * int64_t(sizeof(scalar_t)); line += 64) __builtin_prefetch(ahead + line);
    sum_lanes(x, w, i, kColumns, sum, weight);
  }
  sum_lanes(x, w, i, n - i, sum, weight);
  MaskedSum<acc_t> total;
  for (int64_t lane = 0; lane < kColumns; ++lane) total.merge(MaskedSum<acc_t>{sum[lane], weight[lane]});
  return total;
}

template <typename weights_t>
constexpr bool kDiffer = std::is_pointer<weights_t>::value;

template <int rows, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_lanes(const scalar_t* const* x, const weights_t* w, int64_t begin, int64_t lanes,
                      acc_t* __restrict__ sum, acc_t* __restrict__ weight) {
  SCE_SIMD()
  for (int64_t i = begin; i < begin + lanes; ++i) {
    acc_t added = 0, total = 0;
    for (int r = 0; r < rows; ++r) {
      const acc_t a = static_cast<acc_t>(w[r][i]);
      added += MaskedSum<acc_t>::term(to_acc(x[r][i]), a);
      total += a;
    }
    sum[i] += added;
    if (kDiffer<weights_t>) weight[i] += total;
  }
}

template <int rows, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_some(const scalar_t* const* x, const weights_t* w, int64_t n, acc_t* sum, acc_t* weight) {
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) add_lanes<rows>(x, w, i, kColumns, sum, weight);
  add_lanes<rows>(x, w, i, n - i, sum, weight);
}

// Four rows at a time read and write the sums a quarter as often.
template <typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_body(const scalar_t* const* x, const weights_t* w, int64_t rows, int64_t n, acc_t* sum, acc_t* weight) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) add_some<4>(x + r, w + r, n, sum, weight);
  for (; r < rows; ++r) add_some<1>(x + r, w + r, n, sum, weight);
}

template <typename acc_t, typename share_t, typename weights_t, typename scalar_t>
SCE_HD void gradient_lanes(const share_t share, const weights_t w, int64_t begin, int64_t lanes,
                           scalar_t* __restrict__ gradient) {
  SCE_SIMD()
  for (int64_t i = begin; i < begin + lanes; ++i)
    from_acc(MaskedSum<acc_t>::term(share[i], static_cast<acc_t>(w[i])), gradient[i]);
}

template <typename acc_t, typename share_t, typename weights_t, typename scalar_t>
SCE_HD void gradient_body(const share_t share, const weights_t w, int64_t n, scalar_t* gradient) {
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) gradient_lanes<acc_t>(share, w, i, kColumns, gradient);
  gradient_lanes<acc_t>(share, w, i, n - i, gradient);
}

}  // namespace cpu
}  // namespace sparse_ce
