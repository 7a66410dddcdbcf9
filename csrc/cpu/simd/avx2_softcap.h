// avx2_softcap.h - Computes softcap tanh(scale x / softcap) and its slope with AVX2, four vectors at a time as in
// avx2.h.
#pragma once

#include "avx2.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx2 {

// Replaces x that is far from 0 by tanh(x), computed as 1 minus a small remainder with one rounding, and by its slope.
SCE_AVX2_INLINE void far_tanh(Group& x, Group& slope) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1), two = _mm256_set1_ps(2);
  const Exponential<> exponential(Line(-2, 0));
  Group left, power;
  SCE_EACH(k, kVectors) left.vector[k] = _mm256_andnot_ps(sign, x.vector[k]);
  exponential.raise(left, power);
  SCE_EACH(k, kVectors) power.vector[k] = _mm256_mul_ps(left.vector[k], power.vector[k]);
  SCE_EACH(k, kVectors)
  left.vector[k] = _mm256_div_ps(_mm256_add_ps(power.vector[k], power.vector[k]), _mm256_add_ps(power.vector[k], one));
  SCE_EACH(k, kVectors)
  x.vector[k] = _mm256_or_ps(_mm256_sub_ps(one, left.vector[k]), _mm256_and_ps(sign, x.vector[k]));
  SCE_EACH(k, kVectors) slope.vector[k] = _mm256_mul_ps(left.vector[k], _mm256_sub_ps(two, left.vector[k]));
}

// Replaces x by tanh(scale x) and computes its slope. Near 0, the usual case, tanh takes eight instructions.
SCE_AVX2_INLINE void tanh_values(float scale, Group& x, Group& slope) {
  const __m256 farthest = _mm256_set1_ps(kNearZero * kNearZero), one = _mm256_set1_ps(1);
  Group square, near;
  SCE_EACH(k, kVectors) x.vector[k] = _mm256_mul_ps(x.vector[k], _mm256_set1_ps(scale));
  SCE_EACH(k, kVectors) square.vector[k] = _mm256_mul_ps(x.vector[k], x.vector[k]);
  SCE_EACH(k, kVectors)
  near.vector[k] = _mm256_fmadd_ps(_mm256_set1_ps(kTanh[4]), square.vector[k], _mm256_set1_ps(kTanh[3]));
  SCE_EACH(i, 3)
  SCE_EACH(k, kVectors)
  near.vector[k] = _mm256_fmadd_ps(near.vector[k], square.vector[k], _mm256_set1_ps(kTanh[2 - i]));
  SCE_EACH(k, kVectors) near.vector[k] = _mm256_mul_ps(near.vector[k], square.vector[k]);
  SCE_EACH(k, kVectors) near.vector[k] = _mm256_fmadd_ps(near.vector[k], x.vector[k], x.vector[k]);
  SCE_EACH(k, kVectors) slope.vector[k] = _mm256_fnmadd_ps(near.vector[k], near.vector[k], one);
  __m256 most = square.vector[0];
  SCE_EACH(k, kVectors - 1) most = _mm256_max_ps(square.vector[k + 1], most);  // NaN loses, or stays
  if (_mm256_movemask_ps(_mm256_cmp_ps(most, farthest, _CMP_NLE_UQ)) != 0) {
    Group far_slope;
    far_tanh(x, far_slope);
    SCE_EACH(k, kVectors) {
      const __m256 is_near = _mm256_cmp_ps(square.vector[k], farthest, _CMP_LE_OQ);
      near.vector[k] = _mm256_blendv_ps(x.vector[k], near.vector[k], is_near);
      slope.vector[k] = _mm256_blendv_ps(far_slope.vector[k], slope.vector[k], is_near);
    }
  }
  x = near;
}

// Computes z (n,) of the logits, possibly in place, and with `sloped` also dz/d(scale x) (n,).
template <bool sloped, typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void cap_into(const scalar_t* logits, int64_t n,
                                                 const LogitTransform<float>& transform, float* z,
                                                 [[maybe_unused]] float* slopes) {
  const __m256 cap = _mm256_set1_ps(transform.softcap);
  alignas(32) scalar_t some[kGroup] = {};
  Group tanh_x, slope;
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t m = std::min(kGroup, n - i);
    if (m < kGroup) std::copy(logits + i, logits + n, some);
    load_in_order(m < kGroup ? some : logits + i, tanh_x);
    tanh_values(transform.scale_per_cap, tanh_x, slope);
    SCE_EACH(k, kVectors) tanh_x.vector[k] = _mm256_mul_ps(cap, tanh_x.vector[k]);
    m < kGroup ? store_first(tanh_x, m, z + i) : store(tanh_x, z + i);
    if constexpr (sloped) m < kGroup ? store_first(slope, m, slopes + i) : store(slope, slopes + i);
  }
}

}  // namespace avx2
}  // namespace cpu
}  // namespace sparse_ce
#endif
