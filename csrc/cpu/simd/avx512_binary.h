// avx512_binary.h - Implements the loss of negative classes and its gradient with AVX-512 instructions. 16 logits take
// 31 instructions, while plain C++ takes 60 (binary_math.h, which handles all other cases).
#pragma once

#include "../../core/binary_math.h"
#include "avx512.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx512 {

// Accumulates products of factors 1 + u, less 1, so that small u keep their digits. One logarithm per product replaces
// one per factor.
struct Products {
  static constexpr int kCount = 4;
  static constexpr int kMost =
      60;  // factors of a product, which limits the rounding errors; all together do not overflow

  __m512 less_1[kCount];

  SCE_AVX512_INLINE Products() { SCE_EACH(k, kCount) less_1[k] = _mm512_setzero_ps(); }

  // Multiplies product k by 1 + u.
  SCE_AVX512_INLINE void multiply(int k, __m512 u) {
    less_1[k] = _mm512_fmadd_ps(less_1[k], u, _mm512_add_ps(less_1[k], u));
  }

  // Returns the sum of the logarithms.
  SCE_AVX512_INLINE double log() const {
    __m512d x = _mm512_setzero_pd();
    SCE_EACH(k, kCount) SCE_EACH(h, 2) {
      const __m512d more = _mm512_cvtps_pd(half(less_1[k], h));
      x = _mm512_add_pd(_mm512_fmadd_pd(x, more, more), x);
    }
    return _mm512_reduce_add_pd(log_of_1_plus(x));
  }

 private:
  SCE_AVX512_INLINE static __m256 half(__m512 x, int h) {
    return _mm256_castpd_ps(h == 0 ? _mm512_castpd512_pd256(_mm512_castps_pd(x))
                                   : _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  }

  // Returns log(1 + x) for x >= 0: the logarithm of the rounded sum, 2 atanh(s) + exponent log(2), and what its
  // rounding lost.
  SCE_AVX512_INLINE static __m512d log_of_1_plus(__m512d x) {
    constexpr double kFit[] = {2.0,      2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9,
                               2.0 / 11, 2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19};
    const __m512d one = _mm512_set1_pd(1), sum = _mm512_add_pd(x, one);
    const __m512d lost = _mm512_sub_pd(x, _mm512_sub_pd(sum, one));
    // Mantissas are in [0.75, 1.5).
    const __m512d m = _mm512_getmant_pd(sum, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    const __m512d exponent = _mm512_getexp_pd(_mm512_div_pd(sum, m));
    const __m512d f = _mm512_sub_pd(m, one), s = _mm512_div_pd(f, _mm512_add_pd(m, one)), square = _mm512_mul_pd(s, s);
    __m512d fit = _mm512_set1_pd(kFit[9]);
    SCE_EACH(i, 8) fit = _mm512_fmadd_pd(fit, square, _mm512_set1_pd(kFit[8 - i]));
    fit = _mm512_fmadd_pd(fit, square, _mm512_set1_pd(kFit[0]));
    const __m512d of_m = _mm512_fmadd_pd(s, fit, _mm512_div_pd(lost, sum));
    return _mm512_fmadd_pd(exponent, _mm512_set1_pd(0.69314718055994530942), of_m);
  }
};

// Computes softplus(z) and factor sigmoid(z) for z = scale x + shift.
class Negatives {
 public:
  SCE_AVX512_INLINE Negatives(float scale, float shift, float factor)
      : scale_(_mm512_set1_ps(scale)), shift_(_mm512_set1_ps(shift)), factor_(_mm512_set1_ps(factor)) {}

  // Adds max(z, 0) to `sum`, multiplies `products` by 1 + exp(-|z|), and replaces the logits by their gradient if
  // `differentiates`, with the precision of scalar_t.
  template <typename scalar_t, bool differentiates, int count>
  SCE_AVX512_INLINE void operator()(Columns<count>& x, __m512& sum, Products& products) const {
    constexpr const float* kExp = ExpPolynomial<float, 5>::kFit;
    const __m512 one = _mm512_set1_ps(1.0f), round = _mm512_set1_ps(kRound);
    Columns<count> u, p, r;
    __m512i exponent[count];
    __mmask16 below[count], normal[count];
    SCE_EACH(k, count) x.vector[k] = _mm512_fmadd_ps(x.vector[k], scale_, shift_);
    SCE_EACH(k, count) below[k] = _mm512_movepi32_mask(_mm512_castps_si512(x.vector[k]));
    SCE_EACH(k, count) u.vector[k] = _mm512_abs_ps(x.vector[k]);
    // The maximum returns its second operand if that is NaN.
    SCE_EACH(k, count) sum = _mm512_add_ps(sum, _mm512_max_ps(_mm512_setzero_ps(), x.vector[k]));
    SCE_EACH(k, count) normal[k] = _mm512_cmp_ps_mask(u.vector[k], _mm512_set1_ps(kMost), _CMP_NGE_UQ);
    // Adding 1.5 * 2^23 rounds to an integer n in the low bits of the mantissa, which are then added to the exponent.
    SCE_EACH(k, count) p.vector[k] = _mm512_fmadd_ps(u.vector[k], _mm512_set1_ps(-1.44269504f), round);
    SCE_EACH(k, count) exponent[k] = _mm512_slli_epi32(_mm512_castps_si512(p.vector[k]), 23);
    SCE_EACH(k, count) r.vector[k] = _mm512_sub_ps(p.vector[k], round);
    SCE_EACH(k, count) u.vector[k] = _mm512_fnmsub_ps(r.vector[k], _mm512_set1_ps(0.693359375f), u.vector[k]);
    SCE_EACH(k, count) r.vector[k] = _mm512_fnmadd_ps(r.vector[k], _mm512_set1_ps(-2.12194440e-4f), u.vector[k]);
    SCE_EACH(k, count) p.vector[k] = _mm512_fmadd_ps(r.vector[k], _mm512_set1_ps(kExp[5]), _mm512_set1_ps(kExp[4]));
    SCE_EACH(i, 4)
    SCE_EACH(k, count) p.vector[k] = _mm512_fmadd_ps(p.vector[k], r.vector[k], _mm512_set1_ps(kExp[3 - i]));
    SCE_EACH(k, count)
    u.vector[k] = _mm512_castsi512_ps(_mm512_maskz_add_epi32(normal[k], _mm512_castps_si512(p.vector[k]), exponent[k]));

    SCE_EACH(k, count) products.multiply(k % Products::kCount, u.vector[k]);
    if (!differentiates) return;

    SCE_EACH(k, count) p.vector[k] = _mm512_add_ps(u.vector[k], one);
    SCE_EACH(k, count) r.vector[k] = _mm512_rcp14_ps(p.vector[k]);
    if constexpr (sizeof(scalar_t) == 4) {  // one Newton step makes the reciprocal exact to rounding
      SCE_EACH(k, count) p.vector[k] = _mm512_fnmadd_ps(p.vector[k], r.vector[k], one);
      SCE_EACH(k, count) r.vector[k] = _mm512_fmadd_ps(p.vector[k], r.vector[k], r.vector[k]);
    }
    SCE_EACH(k, count) r.vector[k] = _mm512_mask_mul_ps(r.vector[k], below[k], r.vector[k], u.vector[k]);
    SCE_EACH(k, count) x.vector[k] = _mm512_mul_ps(r.vector[k], factor_);
  }

 private:
  static constexpr float kMost = 87;  // smaller exponentials are close to the subnormal ones, and taken as 0
  static constexpr float kRound = 0x1.8p23f;

  __m512 scale_, shift_, factor_;
};

// Processes n columns, a multiple of kStreams packs. With a gradient, `to` starts a line if it is nontemporal.
template <bool differentiates, bool nontemporal, typename scalar_t>
SCE_AVX512_INLINE double add_negatives(const scalar_t* x, int64_t n, const Negatives& of, const scalar_t* next,
                                       scalar_t* to) {
  constexpr int kHalf = kWide / 2;
  constexpr int64_t kMostSteps = Products::kMost * Products::kCount / kWide;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock<scalar_t>) {
    const int64_t step = stream_columns(std::min(kBlock<scalar_t>, n - begin)), end = begin + step;
    for (int64_t i = begin; i < end;) {
      __m512 sum = _mm512_setzero_ps();
      Products products;
      for (const int64_t stop = std::min(end, i + kMostSteps * kPack); i < stop; i += kPack) {
        prefetch_streams(x + i, next + i, step);
        if constexpr (differentiates && !nontemporal) prefetch_stores(to + i, step);
        SCE_EACH(h, 2) {
          Columns<kHalf> z;
          SCE_EACH(k, kHalf / 2) {
            Columns<kNarrow> part;
            load(x + i + (2 * h + k) * step, part);
            z.vector[2 * k] = part.vector[0], z.vector[2 * k + 1] = part.vector[1];
          }
          of.template operator()<scalar_t, differentiates>(z, sum, products);
          if constexpr (differentiates) {
            SCE_EACH(k, kHalf / 2)
            store<nontemporal>(Columns<kNarrow>{{z.vector[2 * k], z.vector[2 * k + 1]}}, to + i + (2 * h + k) * step);
          }
        }
      }
      total += _mm512_reduce_add_ps(sum) + products.log();
    }
  }
  return total;
}

// Returns how many of n columns are full packs in all streams.
constexpr int64_t whole_packs(int64_t n) { return n / (kStreams * kPack) * (kStreams * kPack); }

// Returns the sum of the losses of n columns, a number of whole packs, and writes their gradient unless it is null.
// `next` are the logits that are prefetched into the L2 cache.
template <typename scalar_t>
SCE_AVX512 double negatives(const scalar_t* x, int64_t n, float scale, float shift, float factor, const scalar_t* next,
                            const Destination<scalar_t>& to) {
  const FlushSubnormals flush;
  const Negatives of(scale, shift, factor);
  if (!to.gradient) return add_negatives<false, false>(x, n, of, next, to.gradient);
  return to.nontemporal ? add_negatives<true, true>(x, n, of, next, to.gradient)
                        : add_negatives<true, false>(x, n, of, next, to.gradient);
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
