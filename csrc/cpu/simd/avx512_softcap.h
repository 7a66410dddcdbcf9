// avx512_softcap.h - Computes softcap tanh(scale x / softcap) with AVX-512. The loops of avx512.h use tanh of a tile as
// plain logits, with the softcap as their scale.
#pragma once

#include "avx512_gradient.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx512 {

// Holds the tanh values of scalar_t logits, in the order of a loaded pack. A 16-bit pack always has 32 places.
template <typename scalar_t>
struct TanhValues {
  using Storage = scalar_t;
  static constexpr bool kCapped = true;
  const float* x;

  SCE_AVX512_INLINE TanhValues from(int64_t i) const { return {x + i}; }  // i is a multiple of kPack
  SCE_AVX512_INLINE void read(Columns<kNarrow>& out) const { load(x, out); }
  SCE_AVX512_INLINE void read_first(int64_t n, Columns<kNarrow>& out) const { load(x, first_lanes<scalar_t>(n), out); }
};

// Replaces x that is far from 0 by tanh(x), computed as 1 minus a small remainder with one rounding, and by its slope.
template <int count>
SCE_AVX512_INLINE void far_tanh(Columns<count>& x, Columns<count>& slope) {
  const __m512 sign = _mm512_set1_ps(-0.0f), one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
  const Exponential<5> twice_the_power(Line(-2, 0), 2);
  Columns<count> left;
  SCE_EACH(k, count) left.vector[k] = _mm512_andnot_ps(sign, x.vector[k]);
  twice_the_power.scale(left);
  left = twice_the_power.raise(left);
  // Computes 2 p / (1 + p) with a 14-bit reciprocal and a Newton step; a division takes a twelfth longer. The product
  // is not rounded before it is subtracted from 1: otherwise each function might round it or not, as compilers choose.
  Columns<count> value;
  SCE_EACH(k, count) {
    const __m512 below = _mm512_fmadd_ps(_mm512_set1_ps(0.5f), left.vector[k], one), about = _mm512_rcp14_ps(below);
    const __m512 one_less = _mm512_fnmadd_ps(below, about, one);
    const __m512 per_below = _mm512_fmadd_ps(about, one_less, about);
    value.vector[k] = _mm512_fnmadd_ps(left.vector[k], per_below, one);
    left.vector[k] = _mm512_mul_ps(left.vector[k], per_below);
  }
  constexpr int kChoice = 0xca;  // selects the second operand's bit if the first one's is set, else the third's
  SCE_EACH(k, count)
  x.vector[k] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
      _mm512_castps_si512(sign), _mm512_castps_si512(x.vector[k]), _mm512_castps_si512(value.vector[k]), kChoice));
  SCE_EACH(k, count) slope.vector[k] = _mm512_mul_ps(left.vector[k], _mm512_sub_ps(two, left.vector[k]));
}

// Replaces x by tanh(scale x) and computes its slope. Near 0, the usual case, tanh takes eight instructions.
template <int count>
SCE_AVX512_INLINE void tanh_values(float scale, Columns<count>& x, Columns<count>& slope) {
  const __m512 farthest = _mm512_set1_ps(kNearZero * kNearZero), one = _mm512_set1_ps(1);
  __m512 square[count], near[count];
  SCE_EACH(k, count) x.vector[k] = _mm512_mul_ps(x.vector[k], _mm512_set1_ps(scale));
  SCE_EACH(k, count) square[k] = _mm512_mul_ps(x.vector[k], x.vector[k]);
  SCE_EACH(k, count)
  near[k] = _mm512_fmadd_ps(_mm512_set1_ps(kTanh[4]), square[k], _mm512_set1_ps(kTanh[3]));
  SCE_EACH(i, 3)
  SCE_EACH(k, count) near[k] = _mm512_fmadd_ps(near[k], square[k], _mm512_set1_ps(kTanh[2 - i]));
  SCE_EACH(k, count) near[k] = _mm512_mul_ps(near[k], square[k]);
  SCE_EACH(k, count) near[k] = _mm512_fmadd_ps(near[k], x.vector[k], x.vector[k]);
  SCE_EACH(k, count) slope.vector[k] = _mm512_fnmadd_ps(near[k], near[k], one);
  __m512 most = square[0];
  SCE_EACH(k, count - 1) most = _mm512_max_ps(square[k + 1], most);  // NaN loses, or stays
  if (_mm512_cmp_ps_mask(most, farthest, _CMP_NLE_UQ)) {
    Columns<count> far_slope;
    far_tanh(x, far_slope);
    SCE_EACH(k, count) {
      const __mmask16 is_near = _mm512_cmp_ps_mask(square[k], farthest, _CMP_LE_OQ);
      near[k] = _mm512_mask_mov_ps(x.vector[k], is_near, near[k]);
      slope.vector[k] = _mm512_mask_mov_ps(far_slope.vector[k], is_near, slope.vector[k]);
    }
  }
  SCE_EACH(k, count) x.vector[k] = near[k];
}

// Computes tanh of n logits in the order of TanhValues<scalar_t>. `next` are the logits that are processed next.
template <typename scalar_t>
SCE_AVX512 __attribute__((noinline)) void tanh_into(const scalar_t* logits, int64_t n,
                                                    const LogitTransform<float>& transform, const scalar_t* next,
                                                    float* t) {
  constexpr int kPacks = 2;
  Columns<kPacks * kNarrow> some, slopes;
  int64_t i = 0;
  for (; i + kPacks * kPack <= n; i += kPacks * kPack) {
    prefetch_first(next + i, kPacks * kPack);
    read_first<kPacks>(Every<scalar_t>{logits + i}, kPacks * kPack, some);
    tanh_values(transform.scale_per_cap, some, slopes);
    SCE_EACH(k, kPacks * kNarrow) _mm512_storeu_ps(t + i + 16 * k, some.vector[k]);
  }
  for (; i < n; i += kPack) {
    const int64_t m = std::min(kPack, n - i);
    Columns<kNarrow> pack, slope;
    read_first<1>(Every<scalar_t>{logits + i}, m, pack);
    tanh_values(transform.scale_per_cap, pack, slope);
    if (sizeof(scalar_t) == sizeof(float))
      store_first(pack, m, t + i);
    else
      SCE_EACH(k, kNarrow) _mm512_storeu_ps(t + i + 16 * k, pack.vector[k]);
  }
}

// Computes z (n,) of the logits, possibly in place, and with `sloped` also dz/d(scale x) (n,).
template <bool sloped>
SCE_AVX512 __attribute__((noinline)) void cap_into(const float* logits, int64_t n,
                                                   const LogitTransform<float>& transform, float* z,
                                                   [[maybe_unused]] float* slopes) {
  constexpr int kPacks = 2;
  const __m512 cap = _mm512_set1_ps(transform.softcap);
  for (int64_t i = 0; i < n; i += kPacks * kPack) {
    const int64_t m = std::min(kPacks * kPack, n - i);
    Columns<kPacks * kNarrow> tanh_x, slope;
    read_first<kPacks>(Every<float>{logits + i}, m, tanh_x);
    tanh_values(transform.scale_per_cap, tanh_x, slope);
    SCE_EACH(k, kPacks * kNarrow) tanh_x.vector[k] = _mm512_mul_ps(cap, tanh_x.vector[k]);
    store_first<false, kPacks>(tanh_x, m, z + i);
    if constexpr (sloped) store_first<false, kPacks>(slope, m, slopes + i);
  }
}

// Holds the coefficients of a loss of tanh values. Each probability is also multiplied by 1 - t^2.
struct CappedCoefficients : GradientCoefficients<float> {
  float scale_per_cap;
  CappedCoefficients(const GradientCoefficients<float>& c, float scale_per_cap)
      : GradientCoefficients<float>(c), scale_per_cap(scale_per_cap) {}
};
template <typename less_t>
struct TimesSlope {
  SCE_AVX512_INLINE TimesSlope(const CappedCoefficients& c, float scale, double, float)
      : factor(c.a * c.scale_per_cap), less(c.b * scale * c.scale_per_cap) {}

  template <int count, typename read_t>
  SCE_AVX512_INLINE void operator()(const read_t& read, const Columns<count>&, Columns<count>& x) const {
    const __m512 one = _mm512_set1_ps(1);
    Columns<count> t;
    read(ItsLogits{}, t);
    less(read, x);
    SCE_EACH(k, count)
    x.vector[k] = _mm512_mul_ps(x.vector[k], _mm512_fnmadd_ps(t.vector[k], t.vector[k], one));
  }
  SCE_AVX512_INLINE bool usual() const { return true; }

  const float factor;
  const less_t less;
};

// Writes the gradient from the tanh values of a tile or a row, possibly in place.
template <typename tanh_t, typename scalar_t>
SCE_AVX512 void capped_gradient(const tanh_t& t, int64_t n, const LogitTransform<float>& transform,
                                const GradientCoefficients<float>& c, const Destination<scalar_t>& to) {
  using Of = Smoothing<tanh_t>;
  const CappedCoefficients capped(c, transform.scale_per_cap);
  Destination<scalar_t> by_packs = to;  // non-temporal stores write whole lines
  if (sizeof(scalar_t) < sizeof(float)) by_packs.nontemporal = to.nontemporal && before_line(to.gradient, n) == 0;
  if (gradient<TimesSlope<typename Of::Less>>(t, n, transform.softcap, capped, t.x, by_packs)) return;
  for (int64_t i = 0; i < n; i += kPack) {
    const int64_t m = std::min(kPack, n - i);
    Columns<kNarrow> pack;
    read_first<1>(t.from(i), m, pack);
    alignas(64) float some[kPack], o[kPack] = {};
    SCE_EACH(k, kNarrow) _mm512_store_ps(some + 16 * k, pack.vector[k]);
    if constexpr (Of::kIs) {
      t.weights.from(i).read_first(m, pack);
      SCE_EACH(k, kNarrow) _mm512_store_ps(o + 16 * k, pack.vector[k]);
    }
    SCE_SIMD()
    for (int64_t k = 0; k < kPack; ++k)
      some[k] = c.at(rounded_product(transform.softcap, some[k]), o[k]) * transform.slope_at(some[k]);
    load(some, pack);
    store_first(pack, m, to.gradient + i);
  }
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
