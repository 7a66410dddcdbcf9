// avx512.h - Implements the loops over plain logits with AVX-512 instructions that compilers do not generate: vreduceps
// extracts the fraction of an exponent, and vscalefps applies its integer part, for any exponent. 16 logits take 9 to
// 12 instructions, while plain C++ takes 17 to 24 (tile.cpp, which handles all other cases).
#pragma once

#include "avx512_smoothing.h"

#ifdef SCE_X86
#include <algorithm>
#include <cmath>

namespace sparse_ce {
namespace cpu {
namespace avx512 {

// Logits may exceed the reference of a sum by this much before it overflows.
constexpr float kNear = 60;

// With a spread or squares only by this much, or their terms would hide the digits of the other terms.
constexpr float kFar = 6 * kLn2;

// Selects the degree for a gradient: the error of its exponentials is a small part of the rounding error of scalar_t.
template <typename scalar_t>
constexpr int kDegree = std::is_same_v<scalar_t, BFloat16> ? 4
                        : std::is_same_v<scalar_t, Half>   ? 5
                                                           : 6;

// Computes the power of a line, times a factor, with a polynomial for the fraction of the exponent. The minimax fits on
// [0, 1] have a relative error of 1.9e-9 (degree 6), 7.5e-8 (degree 5) or 2.6e-6 (degree 4).
template <int degree, bool multiplies = false>
class Exponential {
 public:
  SCE_AVX512_INLINE Exponential(Line line, float factor)
      : scale_(_mm512_set1_ps(line.factor)), slope_(_mm512_set1_ps(line.slope)), offset_(_mm512_set1_ps(line.offset)) {
    constexpr float kFits[3][7] = {
        {1.0000026f, 0.69300383f, 0.24144275f, 0.052011464f, 0.013534168f},
        {0.99999994f, 0.6931531f, 0.24015361f, 0.055826318f, 0.008989341f, 0.0018775767f},
        {1.0f, 0.693147f, 0.24022983f, 0.05548334f, 0.009678841f, 0.0012439688f, 0.00021702256f}};
    SCE_EACH(k, degree + 1) coefficients_[k] = _mm512_set1_ps(factor * kFits[degree - 4][k]);
  }

  // Replaces logits by their exponents.
  template <int count>
  SCE_AVX512_INLINE void scale(Columns<count>& x) const {
    if constexpr (multiplies) SCE_EACH(k, count) x.vector[k] = _mm512_mul_ps(x.vector[k], scale_);
    SCE_EACH(k, count) x.vector[k] = _mm512_fmadd_ps(x.vector[k], slope_, offset_);
  }

  // Computes the power of an exponent. It is 0 for -inf and NaN for NaN.
  template <int count>
  SCE_AVX512_INLINE Columns<count> raise(const Columns<count>& exponent) const {
    constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    __m512 fraction[count];
    Columns<count> p;
    SCE_EACH(k, count) fraction[k] = _mm512_reduce_ps(exponent.vector[k], kFloor);
    SCE_EACH(k, count) p.vector[k] = _mm512_fmadd_ps(coefficients_[degree], fraction[k], coefficients_[degree - 1]);
    SCE_EACH(i, degree - 1)
    SCE_EACH(k, count) p.vector[k] = _mm512_fmadd_ps(p.vector[k], fraction[k], coefficients_[degree - 2 - i]);
    SCE_EACH(k, count) p.vector[k] = _mm512_scalef_ps(p.vector[k], exponent.vector[k]);
    return p;
  }

  // Return the exponent of one logit and the power of one exponent.
  SCE_AVX512_INLINE float exponent(float logit) const {
    Columns<1> x{{_mm512_set1_ps(logit)}};
    scale(x);
    return _mm512_cvtss_f32(x.vector[0]);
  }
  SCE_AVX512_INLINE float power(float exponent) const {
    return _mm512_cvtss_f32(raise(Columns<1>{{_mm512_set1_ps(exponent)}}).vector[0]);
  }

 private:
  const __m512 scale_, slope_, offset_;
  __m512 coefficients_[degree + 1];
};

// Limits exponents, so that a product with a power of 0 is 0. The limit is finite and so low that its power is 0.
template <int count>
SCE_AVX512_INLINE void keep_finite(Columns<count>& exponent) {
  const __m512 lowest = _mm512_set1_ps(-1500);
  SCE_EACH(k, count) exponent.vector[k] = _mm512_max_ps(lowest, exponent.vector[k]);  // NaN stays NaN
}

// Selects which statistics of SelectStats are computed.
template <bool spread, bool squares>
struct MoreStats : SelectStats<float> {};
template <typename stats_t>
struct Computes {
  static constexpr bool kSpread = false, kSquares = false;
};
template <bool spread, bool squares>
struct Computes<MoreStats<spread, squares>> {
  static constexpr bool kSpread = spread, kSquares = squares;
};

// Holds per-lane results for some logits: their maximum and the sum of exponentials relative to a reference. For
// MoreStats it also sums exponentials times exponents, or their squares.
template <typename stats_t>
struct Lanes {
  static constexpr bool kSpread = Computes<stats_t>::kSpread, kSquares = Computes<stats_t>::kSquares;
  static constexpr bool kSmoothed = std::is_same_v<stats_t, SmoothedStats>;
  __m512 max, sum, spread, squares;
  WeighedLanes weighed;  // of SmoothedStats

  SCE_AVX512_INLINE Lanes()
      : max(_mm512_set1_ps(-INFINITY)), sum(_mm512_setzero_ps()), spread(_mm512_setzero_ps()),
        squares(_mm512_setzero_ps()) {}

  // weigh(exponents) accumulates the terms of label smoothing.
  template <int count, typename exponential_t, typename weigh_t>
  SCE_AVX512_INLINE void push(Columns<count> x, const exponential_t& exponential, const weigh_t& weigh) {
    SCE_EACH(k, count) max = _mm512_max_ps(x.vector[k], max);  // NaN in x loses
    exponential.scale(x);
    weigh(x);
    if constexpr (kSpread) keep_finite(x);
    Columns<count> power = exponential.raise(x);
    if constexpr (kSpread) SCE_EACH(k, count) spread = _mm512_fmadd_ps(power.vector[k], x.vector[k], spread);
    if constexpr (kSquares) SCE_EACH(k, count) squares = _mm512_fmadd_ps(power.vector[k], power.vector[k], squares);
    SCE_EACH(k, count / 2) power.vector[k] = _mm512_add_ps(power.vector[k], power.vector[k + count / 2]);
    SCE_EACH(k, count / 2) sum = _mm512_add_ps(sum, power.vector[k]);
  }

  SCE_AVX512_INLINE void leave_out(int lane) {
    const auto others = static_cast<__mmask16>(~(1u << lane));
    sum = _mm512_maskz_mov_ps(others, sum);
    spread = _mm512_maskz_mov_ps(others, spread);
    squares = _mm512_maskz_mov_ps(others, squares);
  }

  SCE_AVX512_INLINE void merge(const Lanes& other) {
    max = _mm512_max_ps(other.max, max);
    sum = _mm512_add_ps(other.sum, sum);
    if constexpr (kSpread) spread = _mm512_add_ps(other.spread, spread);
    if constexpr (kSquares) squares = _mm512_add_ps(other.squares, squares);
    if constexpr (kSmoothed) weighed.merge(other.weighed);
  }
};

// Adds the first n columns.
template <typename logits_t>
SCE_AVX512_INLINE float maximum(const logits_t& logits, int64_t n) {
  __m512 max = _mm512_set1_ps(-INFINITY);
  for (int64_t i = 0; i < n; i += kPack) {
    Columns<kNarrow> pack;
    if (n - i < kPack)
      logits.from(i).read_first(n - i, pack);
    else
      logits.from(i).read(pack);
    SCE_EACH(k, kNarrow) max = _mm512_max_ps(pack.vector[k], max);
  }
  return _mm512_reduce_max_ps(max);
}

// Adds a block, n <= kBlock.
template <typename stats_t, typename logits_t, typename exponential_t, typename scalar_t>
SCE_AVX512_INLINE Lanes<stats_t> push_block(const logits_t& logits, int64_t n, const exponential_t& exponential,
                                            const scalar_t* next) {
  constexpr bool kSmoothed = Lanes<stats_t>::kSmoothed;
  const int64_t step = stream_columns(n);
  Columns<kWide> wide;
  Columns<kNarrow> pack;
  Lanes<stats_t> block;
  int64_t i = 0;
  for (; i < step; i += kPack) {
    prefetch_streams(logits.x + i, next + i, step);
    read_streams(logits.from(i), step, wide);
    block.push(wide, exponential, [&](const Columns<kWide>& exponents) SCE_AVX512 SCE_INLINE {
      if constexpr (kSmoothed) block.weighed.push_streams(exponents, logits.weights.from(i), step);
    });
  }
  i = kStreams * step;  // fewer columns remain than the four streams process at a time
  prefetch_first(next + i, n - i);
  const auto weigh_first = [&](const auto& exponents) SCE_AVX512 SCE_INLINE {
    if constexpr (kSmoothed) block.weighed.push_first(exponents, logits.weights.from(i), n - i);
  };
  if (n - i > kPack) {
    read_first<kStreams>(logits.from(i), n - i, wide);
    block.push(wide, exponential, weigh_first);
  } else if (i < n) {
    read_first<1>(logits.from(i), n - i, pack);
    block.push(pack, exponential, weigh_first);
  }
  return block;
}

// Holds the sums of some exponentials, see Lanes.
struct LaneSums {
  float sum = 0, spread = 0, squares = 0;
};

// Adds the logits of one lane of a block, n <= kBlock, without the first one that equals `most`.
template <typename stats_t, typename logits_t, typename exponential_t>
SCE_AVX512 __attribute__((noinline)) LaneSums push_lane(const logits_t& logits, int64_t n, int lane, float most,
                                                        const exponential_t& exponential) {
  constexpr int kPacks = 16 / kNarrow;  // fill a vector
  const __m512i of_lane = _mm512_set1_epi32(lane);
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  bool found = false;
  __m512 sum = _mm512_setzero_ps(), spread = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kPacks * kPack) {
    Columns<1> x{{nothing}};
    SCE_EACH(k, kPacks) {
      Columns<kNarrow> pack;
      read_first<1>(logits.from(i + k * kPack), std::max<int64_t>(0, n - i - k * kPack), pack);
      SCE_EACH(j, kNarrow)
      x.vector[0] = _mm512_mask_permutexvar_ps(x.vector[0], static_cast<__mmask16>(1 << (kNarrow * k + j)), of_lane,
                                               pack.vector[j]);
    }
    if (!found) {
      const unsigned equal = _mm512_cmp_ps_mask(x.vector[0], _mm512_set1_ps(most), _CMP_EQ_OQ);
      x.vector[0] = _mm512_mask_mov_ps(x.vector[0], static_cast<__mmask16>(equal & -equal), nothing);
      found = equal != 0;
    }
    exponential.scale(x);
    if constexpr (Lanes<stats_t>::kSpread) keep_finite(x);
    const __m512 power = exponential.raise(x).vector[0];
    sum = _mm512_add_ps(sum, power);
    if constexpr (Lanes<stats_t>::kSpread) spread = _mm512_fmadd_ps(power, x.vector[0], spread);
    if constexpr (Lanes<stats_t>::kSquares) squares = _mm512_fmadd_ps(power, power, squares);
  }
  return {_mm512_reduce_add_ps(sum), _mm512_reduce_add_ps(spread), _mm512_reduce_add_ps(squares)};
}

// Calls f(multiplies) with a constant that is true if logits must be multiplied by the scale. A cap always multiplies.
template <typename logits_t, typename function_t>
SCE_AVX512_INLINE auto by_product(const Line& line, const function_t& f) {
  if constexpr (logits_t::kCapped)
    return f(std::true_type{});
  else
    return line.multiplies() ? f(std::true_type{}) : f(std::false_type{});
}

// Adds blocks of scale * logits to `row`, which is some RowStats or MoreStats, while they stay close to the first
// logits; for MoreStats it starts again if they rise. Returns the number of added columns. Calls seen(begin, end,
// maxima) after each block.
template <bool multiplies, typename logits_t, typename scalar_t, typename stats_t, typename seen_t>
SCE_AVX512 int64_t push_stretch(const logits_t& logits, int64_t n, float scale, const scalar_t* next, stats_t& row,
                                const seen_t& seen) {
  constexpr bool kMore = Computes<stats_t>::kSpread || Computes<stats_t>::kSquares;
  float first = maximum(logits, std::min(n, kMore ? 8 * kPack : kPack));
  int64_t begin = 0;
  for (bool again = true; again;) {
    const float reference = scale * first;
    if (!(std::fabs(reference) < kLargest)) break;
    const Line line(scale, reference);
    const Exponential<5, multiplies> exponential(line, 1.0f);
    const __m512 limit = _mm512_set1_ps(first + (kMore ? kFar : kNear) / scale);
    // The block with the maximum is kept apart. If the maximum hides the digits of the other exponentials, the lane
    // that contains it is added again without it.
    Lanes<stats_t> stretch, top;
    float most = -INFINITY;
    int64_t top_begin = 0, top_end = 0;
    const int64_t stretch_begin = begin;
    again = false;
    while (begin < n) {
      const int64_t end = std::min(begin + kBlock<scalar_t>, n);
      const auto block = push_block<stats_t>(logits.from(begin), end - begin, exponential, next + begin);
      if (_mm512_cmp_ps_mask(block.max, limit, _CMP_NLE_UQ)) {
        const float highest = _mm512_reduce_max_ps(block.max);
        again = kMore && highest > first;
        first = highest;
        break;
      }
      if (_mm512_cmp_ps_mask(block.max, _mm512_set1_ps(most), _CMP_GT_OQ)) {
        stretch.merge(top);
        top = block;
        most = _mm512_reduce_max_ps(block.max);
        top_begin = begin, top_end = end;
      } else {
        stretch.merge(block);
      }
      seen(begin, end, block.max);
      begin = end;
    }
    if (begin == stretch_begin) continue;
    // Use the exponential of the maximum exactly as it was added: a row with all its mass at one class then sums to 1.
    const float exponent = exponential.exponent(most);
    float power = exponential.power(exponent), one = 1;  // `one` is what the sums have of the maximum
    RowStats<float> sums;
    sums.max = scale * most;
    sums.rest = _mm512_reduce_add_ps(_mm512_add_ps(top.sum, stretch.sum)) / power - one;
    LaneSums of_lane;
    if (sums.hides_rest()) {
      const int lane = __builtin_ctz(_mm512_cmp_ps_mask(top.max, _mm512_set1_ps(most), _CMP_EQ_OQ));
      of_lane = push_lane<stats_t>(logits.from(top_begin), top_end - top_begin, lane, most, exponential);
      top.leave_out(lane);
      one = 0;
      // Without the maximum in the sum, a rounding error of its exponent, which may be 60 above the others, does not
      // cancel.
      const double to_most = (static_cast<double>(sums.max) - reference) * 1.4426950408889634;
      power = static_cast<float>(std::exp2(static_cast<double>(kLog2e) * reference + line.offset + to_most));
    }
    stretch.merge(top);
    sums.rest = (_mm512_reduce_add_ps(stretch.sum) + of_lane.sum) / power - one;
    if constexpr (kMore) {
      stats_t stats;
      stats.row = sums;
      const float spread = _mm512_reduce_add_ps(stretch.spread) + of_lane.spread;
      const float squares = _mm512_reduce_add_ps(stretch.squares) + of_lane.squares;
      stats.spread = kLn2 * (spread / power - exponent * (sums.rest + one));
      stats.squares = squares / power / power - one;
      row.merge(stats);
    } else {
      if constexpr (Lanes<stats_t>::kSmoothed) {
        stretch.weighed.write(static_cast<double>(line.slope) * (line.factor * most) + line.offset, sums);
      }
      row.merge(sums);
    }
  }
  return begin;
}

// Adds scale * logits to `row`; scale > 0. plain(begin, end) adds a tile if these loops do not apply, and seen(begin,
// end, maxima) is called after each block otherwise.
template <typename logits_t, typename scalar_t, typename stats_t, typename plain_t, typename seen_t>
SCE_AVX512 void push(const logits_t& logits, int64_t n, float scale, const scalar_t* next, stats_t& row,
                     const plain_t& plain, const seen_t& seen) {
  const FlushSubnormals flush;
  by_product<logits_t>(Line(scale, 0), [&](auto multiplies) SCE_AVX512 SCE_INLINE {
    for (int64_t begin = 0; begin < n;) {
      const int64_t first = begin;
      begin += push_stretch<decltype(multiplies)::value>(
          logits.from(begin), n - begin, scale, next + begin, row,
          [&](int64_t i, int64_t end, __m512 maxima) SCE_AVX512 SCE_INLINE { seen(first + i, first + end, maxima); });
      const int64_t end = std::min(begin + kTile, n);
      if (begin < end) plain(begin, end);
      begin = end;
    }
  });
}
template <typename logits_t, typename scalar_t, typename stats_t, typename plain_t>
SCE_AVX512 void push(const logits_t& logits, int64_t n, float scale, const scalar_t* next, stats_t& row,
                     const plain_t& plain) {
  push(logits, n, scale, next, row, plain, [](int64_t, int64_t, __m512) SCE_AVX512 SCE_INLINE {});
}

// Returns the sum of n products of the scale and a logit.
template <typename logits_t>
SCE_AVX512 __attribute__((noinline)) float sum(const logits_t& logits, int64_t n, float scale) {
  const __m512 by = _mm512_set1_ps(scale), none = _mm512_setzero_ps();
  __m512 lanes[kNarrow] = {none, none};
  int64_t i = 0;
  Columns<kNarrow> pack;
  for (; i + kPack <= n; i += kPack) {
    logits.from(i).read(pack);
    SCE_EACH(k, kNarrow) lanes[k] = _mm512_add_ps(lanes[k], _mm512_mul_ps(pack.vector[k], by));
  }
  if (i < n) {
    logits.from(i).read_first(n - i, pack);
    const uint32_t first = first_lanes<typename logits_t::Storage>(n - i);
    SCE_EACH(k, kNarrow)
    lanes[k] = _mm512_mask_add_ps(lanes[k], static_cast<__mmask16>(first >> 16 * k), lanes[k],
                                  _mm512_mul_ps(pack.vector[k], by));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(lanes[0], lanes[1]));
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
