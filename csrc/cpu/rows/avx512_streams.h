// avx512_streams.h - Implements the loops of strided_streams.h for plain logits with AVX-512 intrinsics. An exponential
// and its addition take 11 instructions; compiled C++ takes 17.
#pragma once

#include "../simd/avx512.h"
#include "strided_columns.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx512 {

constexpr int kRows = 16;  // of a vector

// These select the rows of a vector: all, or the first few.
struct All {};
using Few = __mmask16;
SCE_AVX512_INLINE Few few(int64_t n) { return static_cast<Few>((1u << n) - 1); }

// Rows that are not selected are 0.
SCE_AVX512_INLINE __m512 load_rows(const float* x, All) { return _mm512_loadu_ps(x); }
SCE_AVX512_INLINE __m512 load_rows(const float* x, Few rows) { return _mm512_maskz_loadu_ps(rows, x); }
SCE_AVX512_INLINE __m256i load_bits(const void* x, All) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
SCE_AVX512_INLINE __m256i load_bits(const void* x, Few rows) { return _mm256_maskz_loadu_epi16(rows, x); }
template <typename rows_t>
SCE_AVX512_INLINE __m512 load_rows(const BFloat16* x, rows_t rows) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_bits(x, rows)), 16));
}
template <typename rows_t>
SCE_AVX512_INLINE __m512 load_rows(const Half* x, rows_t rows) {
  return _mm512_cvtph_ps(load_bits(x, rows));
}

// `Nontemporal` uses non-temporal stores, which require aligned addresses.
struct Nontemporal {};
SCE_AVX512_INLINE void store_rows(__m512 x, All, float* out) { _mm512_storeu_ps(out, x); }
SCE_AVX512_INLINE void store_rows(__m512 x, Nontemporal, float* out) { _mm512_stream_ps(out, x); }
SCE_AVX512_INLINE void store_rows(__m512 x, Few rows, float* out) { _mm512_mask_storeu_ps(out, rows, x); }
SCE_AVX512_INLINE void store_bits(__m256i bits, All, void* out) {
  _mm256_storeu_si256(static_cast<__m256i*>(out), bits);
}
SCE_AVX512_INLINE void store_bits(__m256i bits, Nontemporal, void* out) {
  _mm256_stream_si256(static_cast<__m256i*>(out), bits);
}
SCE_AVX512_INLINE void store_bits(__m256i bits, Few rows, void* out) { _mm256_mask_storeu_epi16(out, rows, bits); }
template <typename rows_t>
SCE_AVX512_INLINE void store_rows(__m512 x, rows_t rows, BFloat16* out) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  store_bits(_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)), rows, out);
}
template <typename rows_t>
SCE_AVX512_INLINE void store_rows(__m512 x, rows_t rows, Half* out) {
  store_bits(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rows, out);
}

// Multiplies the logits of some rows by their scale.
template <bool scaled>
struct Scale {
  float all;
  const float* of_rows;

  template <typename rows_t>
  SCE_AVX512_INLINE __m512 at(int64_t i, rows_t rows) const {
    return _mm512_mul_ps(_mm512_set1_ps(all), load_rows(of_rows + i, rows));
  }
  template <int count, typename rows_t>
  SCE_AVX512_INLINE void apply(int64_t i, rows_t rows, Columns<count>& x) const {
    // Adding 0 gives the products a rounding of their own: see rounded_product in scalar_math.h.
    if constexpr (scaled)
      SCE_EACH(k, count) x.vector[k] = _mm512_fmadd_ps(at(i, rows), x.vector[k], _mm512_setzero_ps());
  }
};

// Adds `count` columns of a vector of rows, with stride `step`, to the maxima and to the sums of what is below them,
// relative to `reference`.
template <int count, typename scalar_t, typename scale_t, typename exponential_t, typename rows_t>
SCE_AVX512_INLINE void push_vector(const scalar_t* x, int64_t step, int64_t i, rows_t rows, const scale_t& scale,
                                   const exponential_t& exponential, const float* reference, float* max, float* sum) {
  const __m512 base = load_rows(reference + i, rows);
  __m512 high = load_rows(max + i, rows), added = load_rows(sum + i, rows);
  Columns<count> z;
  SCE_EACH(k, count) z.vector[k] = load_rows(x + k * step + i, rows);
  scale.apply(i, rows, z);
  SCE_EACH(k, count) {
    const __m512 low = _mm512_min_ps(high, z.vector[k]);  // a NaN is added, but does not become the maximum
    high = _mm512_max_ps(z.vector[k], high);
    z.vector[k] = _mm512_sub_ps(low, base);
  }
  exponential.scale(z);
  z = exponential.raise(z);
  SCE_EACH(k, count / 2) z.vector[k] = _mm512_add_ps(z.vector[k], z.vector[k + count / 2]);
  SCE_EACH(k, (count + 1) / 2) added = _mm512_add_ps(added, z.vector[k]);
  store_rows(high, rows, max + i);
  store_rows(added, rows, sum + i);
}

// Adds the columns of the rows [begin, end).
template <int count, typename scalar_t, typename scale_t, typename exponential_t>
SCE_AVX512_INLINE void push_rows(const scalar_t* x, int64_t step, int64_t begin, int64_t end, const scale_t& scale,
                                 const exponential_t& exponential, const float* reference, float* max, float* sum) {
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows) push_vector<count>(x, step, i, All{}, scale, exponential, reference, max, sum);
  if (i < end) push_vector<count>(x, step, i, few(end - i), scale, exponential, reference, max, sum);
}

// Adds the columns of all rows.
template <bool scaled, typename scalar_t>
SCE_AVX512 void push_columns(const BlockColumns<scalar_t>& columns, const LossOptions& options, const float* scale,
                             const float* reference, float* max, float* sum) {
  const FlushSubnormals flush;
  const Exponential<5> exponential(Line(1, 0), 1);
  const Scale<scaled> of_rows{static_cast<float>(options.logit_scale), scale};
  for (int64_t c = columns.begin, next; c < columns.end; c = next) {
    next = c + kWide <= columns.end ? c + kWide : c + 1;
    for (int64_t i = 0; i < columns.rows; i += kSome) {
      const int64_t end = std::min(i + kSome, columns.rows);
      prefetch_columns(columns, c, next, i, end - i);
      if (next - c == kWide)
        push_rows<kWide>(columns.at(c), columns.step, i, end, of_rows, exponential, reference, max, sum);
      else
        push_rows<1>(columns.at(c), columns.step, i, end, of_rows, exponential, reference, max, sum);
    }
  }
}

// Computes exp(max - reference) (n,), bitwise equal to the term that was added.
SCE_AVX512 inline void exponentials(int64_t n, const float* max, const float* reference, float* power) {
  alignas(64) float highest[kMostRows];
  std::fill_n(highest, n, INFINITY);
  std::fill_n(power, n, 0.0f);
  push_rows<1>(max, 0, 0, n, Scale<false>{}, Exponential<5>(Line(1, 0), 1), reference, highest, power);
}

// Writes the gradients of `count` columns of a vector of rows, to columns with stride `apart`. class_weight is
// (count,).
template <int count, typename scalar_t, typename scale_t, typename exponential_t, typename rows_t, typename store_t>
SCE_AVX512_INLINE void differentiate_vector(const scalar_t* x, int64_t step, int64_t i, rows_t rows, store_t how,
                                            const scale_t& scale, const exponential_t& exponential,
                                            const BlockRows<float>& of, const float* class_weight, scalar_t* out,
                                            int64_t apart) {
  const __m512 lse = load_rows(of.lse + i, rows), residual = load_rows(of.lse_residual + i, rows);
  const __m512 slope = scale.at(i, rows);
  const __m512 a = _mm512_mul_ps(load_rows(of.a + i, rows), slope);
  const __m512 b = _mm512_mul_ps(load_rows(of.b + i, rows), slope);
  const __mmask16 active = _mm512_cmp_ps_mask(load_rows(of.active + i, rows), _mm512_setzero_ps(), _CMP_NEQ_OQ);
  Columns<count> z;
  SCE_EACH(k, count) z.vector[k] = load_rows(x + k * step + i, rows);
  scale.apply(i, rows, z);
  SCE_EACH(k, count) z.vector[k] = _mm512_sub_ps(_mm512_sub_ps(z.vector[k], lse), residual);
  exponential.scale(z);
  z = exponential.raise(z);
  SCE_EACH(k, count) {
    z.vector[k] = class_weight
                      ? _mm512_maskz_fmsub_ps(active, a, z.vector[k], _mm512_mul_ps(b, _mm512_set1_ps(class_weight[k])))
                      : _mm512_maskz_mul_ps(active, a, z.vector[k]);
    store_rows(z.vector[k], how, out + k * apart + i);
  }
}

// Writes the gradients of the rows [begin, end).
template <int count, typename store_t, typename scalar_t, typename scale_t, typename exponential_t>
SCE_AVX512_INLINE void differentiate_rows(const scalar_t* x, int64_t step, int64_t begin, int64_t end,
                                          const scale_t& scale, const exponential_t& exponential,
                                          const BlockRows<float>& of, const float* class_weight, scalar_t* out,
                                          int64_t apart) {
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows)
    differentiate_vector<count>(x, step, i, All{}, store_t{}, scale, exponential, of, class_weight, out, apart);
  const Few last = few(end - i);
  if (i < end) differentiate_vector<count>(x, step, i, last, last, scale, exponential, of, class_weight, out, apart);
}

// Writes the gradients of all rows.
template <bool scaled, typename store_t, typename scalar_t>
SCE_AVX512 void differentiate_columns(const BlockColumns<scalar_t>& columns, const LossOptions& options,
                                      const float* class_weight, const BlockRows<float>& rows, scalar_t* gradient,
                                      int64_t step) {
  const FlushSubnormals flush;
  const Exponential<kDegree<scalar_t>> exponential(Line(1, 0), 1);
  const Scale<scaled> scale{static_cast<float>(options.logit_scale), rows.scale};
  constexpr float kOnes[kWide] = {1, 1, 1, 1, 1, 1, 1, 1};
  const bool smoothed = options.label_smoothing != 0;
  for (int64_t c = columns.begin, next; c < columns.end; c = next) {
    next = c + kWide <= columns.end ? c + kWide : c + 1;
    const float* const o = !smoothed ? nullptr : class_weight ? class_weight + c : kOnes;
    scalar_t* const out = gradient + c * step;
    for (int64_t i = 0; i < columns.rows; i += kSome) {
      const int64_t end = std::min(i + kSome, columns.rows);
      prefetch_columns(columns, c, next, i, end - i);
      if (next - c == kWide)
        differentiate_rows<kWide, store_t>(columns.at(c), columns.step, i, end, scale, exponential, rows, o, out, step);
      else
        differentiate_rows<1, store_t>(columns.at(c), columns.step, i, end, scale, exponential, rows, o, out, step);
    }
  }
}
template <bool scaled, typename scalar_t>
SCE_AVX512 void differentiate_columns(const BlockColumns<scalar_t>& columns, const LossOptions& options,
                                      const float* class_weight, const BlockRows<float>& rows,
                                      const Destination<scalar_t>& to, int64_t step) {
  const bool nontemporal =
      to.nontemporal && before_line(to.gradient, step) == 0 && step * sizeof(scalar_t) % kLine == 0;
  nontemporal ? differentiate_columns<scaled, Nontemporal>(columns, options, class_weight, rows, to.gradient, step)
              : differentiate_columns<scaled, All>(columns, options, class_weight, rows, to.gradient, step);
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
