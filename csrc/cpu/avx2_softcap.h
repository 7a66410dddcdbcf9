// avx2_softcap.h - softcap tanh(scale x / softcap) and its slope with AVX2, four vectors at a time as in avx2.h.
#pragma once

#include "avx2.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx2 {

// tanh in place of x, whatever it is: by exp(-2 |x|) - 1, which keeps its digits near 0, as in scalar_math.h: relative
// error 4e-7.
SCE_AVX2_INLINE void any_tangents(Group& x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1);
  Group r, power;
  SCE_EACH(k, kVectors)
  r.vector[k] = _mm256_mul_ps(_mm256_andnot_ps(sign, x.vector[k]), _mm256_set1_ps(-2 * kLog2e));
  split(r, power);
  Group fit = polynomial(kLessOne, r);
  SCE_EACH(k, kVectors) fit.vector[k] = _mm256_mul_ps(fit.vector[k], r.vector[k]);
  SCE_EACH(k, kVectors)
  fit.vector[k] = _mm256_fmadd_ps(power.vector[k], fit.vector[k], _mm256_sub_ps(power.vector[k], one));
  SCE_EACH(k, kVectors)
  fit.vector[k] = _mm256_div_ps(fit.vector[k], _mm256_add_ps(fit.vector[k], _mm256_set1_ps(2)));
  SCE_EACH(k, kVectors)
  x.vector[k] = _mm256_or_ps(_mm256_andnot_ps(sign, fit.vector[k]), _mm256_and_ps(sign, x.vector[k]));
}

// tanh(scale x) in place of x. Mostly all are near 0, where eight instructions make one.
SCE_AVX2_INLINE void tangents(float scale, Group& x) {
  const __m256 farthest = _mm256_set1_ps(kNearZero * kNearZero);
  Group square, near;
  SCE_EACH(k, kVectors) x.vector[k] = _mm256_mul_ps(x.vector[k], _mm256_set1_ps(scale));
  SCE_EACH(k, kVectors) square.vector[k] = _mm256_mul_ps(x.vector[k], x.vector[k]);
  SCE_EACH(k, kVectors)
  near.vector[k] = _mm256_fmadd_ps(_mm256_set1_ps(kTangent[4]), square.vector[k], _mm256_set1_ps(kTangent[3]));
  SCE_EACH(i, 3)
  SCE_EACH(k, kVectors)
  near.vector[k] = _mm256_fmadd_ps(near.vector[k], square.vector[k], _mm256_set1_ps(kTangent[2 - i]));
  SCE_EACH(k, kVectors) near.vector[k] = _mm256_mul_ps(near.vector[k], square.vector[k]);
  SCE_EACH(k, kVectors) near.vector[k] = _mm256_fmadd_ps(near.vector[k], x.vector[k], x.vector[k]);
  __m256 most = square.vector[0];
  SCE_EACH(k, kVectors - 1) most = _mm256_max_ps(square.vector[k + 1], most);  // a NaN loses, or stays
  if (_mm256_movemask_ps(_mm256_cmp_ps(most, farthest, _CMP_NLE_UQ)) != 0) {
    any_tangents(x);
    SCE_EACH(k, kVectors)
    near.vector[k] =
        _mm256_blendv_ps(x.vector[k], near.vector[k], _mm256_cmp_ps(square.vector[k], farthest, _CMP_LE_OQ));
  }
  x = near;
}

// z (n,) of logits and, unless it is null, dz/dx (n,); z may be the logits.
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void cap_into(const scalar_t* logits, int64_t n,
                                                 const LogitTransform<float>& transform, float* z, float* slopes) {
  const __m256 cap = _mm256_set1_ps(transform.softcap);
  const __m256 scale = _mm256_set1_ps(transform.scale), one = _mm256_set1_ps(1);
  alignas(32) scalar_t some[kGroup] = {};
  Group tangent, slope;
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t m = std::min(kGroup, n - i);
    if (m < kGroup) std::copy(logits + i, logits + n, some);
    load_in_order(m < kGroup ? some : logits + i, tangent);
    tangents(transform.scale_per_cap, tangent);
    SCE_EACH(k, kVectors) {
      const __m256 t = tangent.vector[k];
      slope.vector[k] = _mm256_mul_ps(scale, _mm256_fnmadd_ps(t, t, one));
      tangent.vector[k] = _mm256_mul_ps(cap, t);
    }
    m < kGroup ? store_first(tangent, m, z + i) : store(tangent, z + i);
    if (slopes) m < kGroup ? store_first(slope, m, slopes + i) : store(slope, slopes + i);
  }
}

}  // namespace avx2
}  // namespace cpu
}  // namespace sparse_ce
#endif
