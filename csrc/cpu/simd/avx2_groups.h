// avx2_groups.h - Defines groups of four AVX2 vectors of logits: loads, stores, reductions and the building blocks of
// exponentials.
#pragma once

#include "convert.h"
#include "exp2_affine.h"
#include "tile.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx2 {

#define SCE_AVX2_INLINE SCE_AVX2 inline __attribute__((always_inline))

constexpr int kVectors = 4;
constexpr int64_t kGroup = 8 * kVectors;  // in columns
static_assert(kSpare >= kGroup - 1, "the last group of a row is stored as a whole");

struct Group {
  __m256 vector[kVectors];
};

SCE_AVX2_INLINE void load(const float* x, Group& out) {
  SCE_EACH(k, kVectors) out.vector[k] = _mm256_loadu_ps(x + 8 * k);
}
SCE_AVX2_INLINE void load(const Half* x, Group& out) {
  SCE_EACH(k, kVectors) out.vector[k] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 8 * k)));
}
// Loads the even and then the odd ones of 16 logits, with one instruction each. Exponentials are stored in this order.
SCE_AVX2_INLINE void load(const BFloat16* x, Group& out) {
  SCE_EACH(k, kVectors / 2) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * k));
    out.vector[2 * k] = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    out.vector[2 * k + 1] =
        _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
}

// Loads in memory order, which is that of class weights.
template <typename scalar_t>
SCE_AVX2_INLINE void load_in_order(const scalar_t* x, Group& out) {
  load(x, out);
}
SCE_AVX2_INLINE void load_in_order(const BFloat16* x, Group& out) {
  SCE_EACH(k, kVectors) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 8 * k));
    out.vector[k] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
}

// Stores the inverse of `load`, rounded to nearest. BFloat16 ties round away from zero (see round_to in convert.h).
SCE_AVX2_INLINE void store(const Group& x, float* out) {
  SCE_EACH(k, kVectors) _mm256_storeu_ps(out + 8 * k, x.vector[k]);
}
SCE_AVX2_INLINE void store(const Group& x, Half* out) {
  SCE_EACH(k, kVectors)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8 * k), _mm256_cvtps_ph(x.vector[k], _MM_FROUND_TO_NEAREST_INT));
}
SCE_AVX2_INLINE void store(const Group& x, BFloat16* out) {
  const __m256i half = _mm256_set1_epi32(0x8000);
  SCE_EACH(k, kVectors / 2) {
    const __m256i even = _mm256_add_epi32(_mm256_castps_si256(x.vector[2 * k]), half);
    const __m256i odd = _mm256_add_epi32(_mm256_castps_si256(x.vector[2 * k + 1]), half);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * k),
                        _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa));
  }
}

// Loads the first n < kGroup logits. The others are -inf, which changes neither a maximum nor a sum of exponentials.
template <typename scalar_t>
SCE_AVX2_INLINE void load_first(const scalar_t* x, int64_t n, Group& out) {
  alignas(32) scalar_t some[kGroup];
  for (int64_t i = 0; i < n; ++i) some[i] = x[i];
  for (int64_t i = n; i < kGroup; ++i) from_acc(-INFINITY, some[i]);
  load(some, out);
}
template <typename scalar_t>
SCE_AVX2_INLINE void store_first(const Group& x, int64_t n, scalar_t* out) {
  alignas(32) scalar_t some[kGroup];
  store(x, some);
  for (int64_t i = 0; i < n; ++i) out[i] = some[i];
}

SCE_AVX2_INLINE float highest_of(__m256 x) {
  __m128 max = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  max = _mm_max_ps(max, _mm_movehl_ps(max, max));
  return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
}
SCE_AVX2_INLINE float sum_of(__m256 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// A NaN never becomes the maximum.
SCE_AVX2_INLINE __m256 higher(const Group& x, __m256 max) {
  SCE_EACH(k, kVectors) max = _mm256_max_ps(x.vector[k], max);
  return max;
}

// Splits an exponent into an integer and a remainder of at most 1/2. The remainder replaces the exponent, and `power`
// is 2 to the integer, or 0 for integers of -127 and below. NaN stays NaN.
SCE_AVX2_INLINE void split(Group& exponent, Group& power) {
  // Adding 1.5 * 2^23 rounds to an integer n in the low bits of the mantissa. Adding 127 more turns them into the
  // exponent of 2^n.
  const __m256 round = _mm256_set1_ps(12582912.0f + 127.0f), lowest = _mm256_set1_ps(-127);
  SCE_EACH(k, kVectors) exponent.vector[k] = _mm256_max_ps(lowest, exponent.vector[k]);
  SCE_EACH(k, kVectors) power.vector[k] = _mm256_add_ps(exponent.vector[k], round);
  SCE_EACH(k, kVectors)
  exponent.vector[k] = _mm256_sub_ps(exponent.vector[k], _mm256_sub_ps(power.vector[k], round));
  SCE_EACH(k, kVectors)
  power.vector[k] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(power.vector[k]), 23));
}

// Evaluates the polynomial with the given terms, starting with the constant term.
SCE_AVX2_INLINE Group polynomial(const float (&terms)[6], const Group& x) {
  Group sum;
  SCE_EACH(k, kVectors)
  sum.vector[k] = _mm256_fmadd_ps(_mm256_set1_ps(terms[5]), x.vector[k], _mm256_set1_ps(terms[4]));
  SCE_EACH(i, 4)
  SCE_EACH(k, kVectors) sum.vector[k] = _mm256_fmadd_ps(sum.vector[k], x.vector[k], _mm256_set1_ps(terms[3 - i]));
  return sum;
}

}  // namespace avx2
}  // namespace cpu
}  // namespace sparse_ce
#endif
