// avx512_gradient.h - Implements the gradient for plain logits with the exponentials of avx512.h.
#pragma once

#include "avx512.h"

#ifdef SCE_X86
#include <algorithm>
#include <cmath>

namespace sparse_ce {
namespace cpu {
namespace avx512 {

// The loss multiplies each probability by a constant, which is part of the polynomial, and subtracts less_t.
template <typename less_t>
struct Times {
  SCE_AVX512_INLINE Times(const GradientCoefficients<float>& c, float scale, double, float)
      : factor(c.a), less(scale * c.b) {}

  template <int count, typename read_t>
  SCE_AVX512_INLINE void operator()(const read_t& read, const Columns<count>&, Columns<count>& x) const {
    less(read, x);
  }
  SCE_AVX512_INLINE bool usual() const { return true; }

  const float factor;
  const less_t less;
};

// If more than the loss is differentiated, each probability is multiplied by a linear function of its exponent and of
// itself, and a constant is added for every class. `where_one` is the exponent of probability 1. `log2` is the change
// of the logarithm if the exponent grows by 1.
template <bool kSquares>
class TimesLine {
 public:
  SCE_AVX512_INLINE TimesLine(const SelectCoefficients<float>& c, float scale, double where_one, float log2)
      : slope_(-c.of_entropy * log2),
        offset_(static_cast<float>(c.per_q + c.beside * std::exp(-static_cast<double>(c.log_tail)) -
                                   c.of_entropy * (c.entropy - where_one * log2))),
        square_(c.of_square / scale), each_(scale * (c.of_each - c.b)) {}

  template <int count, typename read_t>
  SCE_AVX512_INLINE void operator()(const read_t&, Columns<count> exponent, Columns<count>& x) const {
    const __m512 slope = _mm512_set1_ps(slope_), offset = _mm512_set1_ps(offset_), each = _mm512_set1_ps(each_);
    keep_finite(exponent);
    SCE_EACH(k, count) exponent.vector[k] = _mm512_fmadd_ps(exponent.vector[k], slope, offset);
    if constexpr (kSquares) {
      const __m512 square = _mm512_set1_ps(square_);
      SCE_EACH(k, count) exponent.vector[k] = _mm512_fmadd_ps(x.vector[k], square, exponent.vector[k]);
    }
    SCE_EACH(k, count) x.vector[k] = _mm512_fmadd_ps(x.vector[k], exponent.vector[k], each);
  }
  SCE_AVX512_INLINE bool usual() const {
    return std::fabs(slope_) < 1e30f && std::fabs(offset_) < 1e30f && std::fabs(square_) < 1e30f;
  }

  static constexpr float factor = 1;

 private:
  const float slope_, offset_, square_, each_;
};

// Computes the gradient of the logits that read(ItsLogits{}, x) reads.
template <int count, typename exponential_t, typename times_t, typename read_t>
SCE_AVX512_INLINE Columns<count> differentiate(const exponential_t& exponential, const times_t& times,
                                               const read_t& read) {
  Columns<count> x;
  read(ItsLogits{}, x);
  exponential.scale(x);
  Columns<count> power = exponential.raise(x);
  times(read, x, power);
  return power;
}

// Computes the gradient of the first n logits of several packs.
template <bool nontemporal, int packs, typename exponential_t, typename times_t, typename logits_t, typename scalar_t>
SCE_AVX512_INLINE void differentiate_first(const exponential_t& exponential, const times_t& times,
                                           const logits_t& logits, int64_t n, scalar_t* gradient) {
  constexpr int kColumns = packs * kNarrow;
  const auto read = [&](const auto& of, Columns<kColumns>& x)
                        SCE_AVX512 SCE_INLINE { read_first<packs>(of(logits), n, x); };
  store_first<nontemporal, packs>(differentiate<kColumns>(exponential, times, read), n, gradient);
}

// Computes the gradient of all logits.
template <bool nontemporal, typename exponential_t, typename times_t, typename logits_t, typename scalar_t>
SCE_AVX512_INLINE void differentiate_row(const exponential_t& exponential, const times_t& times, const logits_t& logits,
                                         int64_t n, const decltype(logits.x) next, scalar_t* gradient) {
  const int64_t first = nontemporal ? before_line(gradient, n) : 0;
  if (first > 0) differentiate_first<false, 1>(exponential, times, logits, first, gradient);
  for (int64_t begin = first; begin < n; begin += kBlock<scalar_t>) {
    const int64_t end = std::min(begin + kBlock<scalar_t>, n), step = stream_columns(end - begin);
    int64_t i = begin;
    for (; i < begin + step; i += kPack) {
      prefetch_streams(logits.x + i, next + i, step);
      if constexpr (!nontemporal) prefetch_stores(gradient + i, step);
      const auto read = [&](const auto& of, Columns<kWide>& x)
                            SCE_AVX512 SCE_INLINE { read_streams(of(logits.from(i)), step, x); };
      store_streams<nontemporal>(differentiate<kWide>(exponential, times, read), step, gradient + i);
    }
    i = begin + kStreams * step;
    prefetch_first(next + i, end - i);
    if (end - i > kPack)
      differentiate_first<nontemporal, kStreams>(exponential, times, logits.from(i), end - i, gradient + i);
    else if (i < end)
      differentiate_first<nontemporal, 1>(exponential, times, logits.from(i), end - i, gradient + i);
  }
}

// Computes gradient = dz/dx a exp(scale x - lse), or with the factor of SelectCoefficients instead of a, possibly in
// place; scale > 0. Writes nothing and returns false if only the plain formula is accurate: beyond the range of the
// exponent's fraction, and for factors close to the limits of float.
template <typename times_t, typename logits_t, typename scalar_t, typename coefficients_t>
SCE_AVX512 bool gradient(const logits_t& logits, int64_t n, float scale, const coefficients_t& c,
                         const decltype(logits.x) next, const Destination<scalar_t>& to) {
  const Line line(scale, c.lse);
  const double where_one = line.where_one(c.lse, c.lse_residual);
  const times_t times(c, scale, where_one, 1 / kLog2e);
  const float factor = times.factor * scale * static_cast<float>(std::exp2(-where_one));
  if (!(std::fabs(c.lse) < kLargest && std::fabs(factor) > 1e-30f && std::fabs(factor) < 1e30f && times.usual()))
    return false;
  const FlushSubnormals flush;
  by_product<logits_t>(line, [&](auto multiplies) SCE_AVX512 SCE_INLINE {
    const Exponential<kDegree<scalar_t>, decltype(multiplies)::value> exponential(line, factor);
    if (to.nontemporal)
      differentiate_row<true>(exponential, times, logits, n, next, to.gradient);
    else
      differentiate_row<false>(exponential, times, logits, n, next, to.gradient);
  });
  return true;
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
