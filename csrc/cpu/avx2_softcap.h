// avx2_softcap.h - softcap tanh(scale x / softcap) and its slope with AVX2, four vectors at a time as in avx2.h.
#pragma once

#include "avx2.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx2 {

// tanh in place of x: by exp(-2 |x|) - 1, which keeps its digits near 0, as in scalar_math.h: relative error 4e-7.
SCE_AVX2_INLINE void tangents(Group& x) {
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

// z (n,) of logits and, unless it is null, dz/dx (n,); z may be the logits.
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void cap_into(const scalar_t* logits, int64_t n,
                                                 const LogitTransform<float>& transform, float* z, float* slopes) {
  const __m256 inside = _mm256_set1_ps(transform.scale_per_cap), cap = _mm256_set1_ps(transform.softcap);
  const __m256 scale = _mm256_set1_ps(transform.scale), one = _mm256_set1_ps(1);
  alignas(32) scalar_t some[kGroup] = {};
  Group tangent, slope;
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t m = std::min(kGroup, n - i);
    if (m < kGroup) std::copy(logits + i, logits + n, some);
    load_in_order(m < kGroup ? some : logits + i, tangent);
    SCE_EACH(k, kVectors) tangent.vector[k] = _mm256_mul_ps(tangent.vector[k], inside);
    tangents(tangent);
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
