// convert.h - Converts tiles of stored logits to the arithmetic dtype, and results to a stored gradient.
#pragma once

#include "../../core/dtype.h"
#include "../../core/math.h"
#include "../memory/nontemporal.h"

#ifdef SCE_X86
#include <immintrin.h>
#endif

namespace sparse_ce {
namespace cpu {

constexpr int64_t kSoon = 512;  // in bytes

#ifdef SCE_X86
// Uses F16C, which every CPU with AVX2 has. Without it a float16 conversion takes 15 instructions.
SCE_AVX2 inline void widen_f16c(const Half* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < n; ++i) out[i] = to_acc(x[i]);
}
SCE_AVX2 inline void narrow_f16c(const float* x, int64_t n, Half* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) from_acc(x[i], out[i]);
}
#endif

// These convert without an instruction for float16. They are not inlined, because they are long.
SCE_RARE __attribute__((noinline)) inline void widen_half(const Half* x, int64_t n, float* out) {
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) out[i] = to_acc(x[i]);
}
SCE_RARE __attribute__((noinline)) inline void narrow_half(const float* x, int64_t n, Half* out) {
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) from_acc(x[i], out[i]);
}

// Returns the converted logits in `buffer` (n,), or x itself if it already has the arithmetic dtype.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD const acc_t* widened(const scalar_t* x, [[maybe_unused]] int64_t n,
                            [[maybe_unused]] acc_t* __restrict__ buffer) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    return x;
  } else if constexpr (std::is_same_v<scalar_t, Half>) {
#ifdef SCE_X86
    if constexpr (set != InstructionSet::kDefault) return widen_f16c(x, n, buffer), buffer;
#endif
    return widen_half(x, n, buffer), buffer;
  } else {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) buffer[i] = to_acc(x[i]);
    return buffer;
  }
}

// Rounds to nearest. BFloat16 ties round away from zero, because results come from exponentials that are not exact
// enough to detect ties. An arithmetic NaN stays NaN.
template <typename scalar_t, typename acc_t>
SCE_HD void round_to(acc_t x, scalar_t& out) {
  if constexpr (std::is_same_v<scalar_t, BFloat16>)
    out.bits = static_cast<uint16_t>((bit_cast<uint32_t>(x) + 0x8000u) >> 16);
  else
    from_acc(x, out);
}

// Stores the numbers term(i), rounded. `buffer` (n,) is scratch memory, which `term` may read.
template <InstructionSet set, typename scalar_t, typename acc_t, typename term_t>
SCE_HD void narrow(int64_t n, const term_t& term, [[maybe_unused]] acc_t* buffer, scalar_t* out) {
  if constexpr (std::is_same_v<scalar_t, Half>) {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) buffer[i] = term(i);
#ifdef SCE_X86
    if constexpr (set != InstructionSet::kDefault) return narrow_f16c(buffer, n, out);
#endif
    return narrow_half(buffer, n, out);
  }
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) round_to(term(i), out[i]);
}

}  // namespace cpu
}  // namespace sparse_ce
