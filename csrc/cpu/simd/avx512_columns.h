// avx512_columns.h - Loads, converts, prefetches and stores logits in AVX-512 registers.
#pragma once

#include "convert.h"
#include "exp2_affine.h"
#include "tile.h"

#ifdef SCE_X86
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // caused by the headers of the intrinsics (GCC bug 105593)
#endif
#include <immintrin.h>

#include <algorithm>
#include <cmath>

namespace sparse_ce {
namespace cpu {
namespace avx512 {

#define SCE_AVX512_INLINE SCE_AVX512 inline __attribute__((always_inline))

// Holds `count` vectors of 16 columns. An exponential is a chain of 40 cycles, while the CPU looks 97 instructions
// ahead. Each step is therefore written for eight vectors before the next step.
template <int count>
struct Columns {
  __m512 vector[count];
};
constexpr int kWide = 8;
constexpr int kNarrow = 2;  // the minimum that a load of 16-bit logits fills
constexpr int64_t kPack = 16 * kNarrow;

// The eight vectors come from four places of a block, so that the hardware prefetches four streams. It follows each
// stream only to the end of a page. An offset of a page and two lines keeps the streams out of the same L1 sets.
constexpr int kStreams = kWide / kNarrow;
template <typename scalar_t>
constexpr int64_t kBlock = kStreams * (4096 + 128) / sizeof(scalar_t);  // in columns

// Returns the columns of a stream in a block of n. The remaining columns follow the streams.
SCE_AVX512_INLINE int64_t stream_columns(int64_t n) { return n / (kStreams * kPack) * kPack; }

// Returns a mask of the first n <= 32 columns of a pack.
SCE_AVX512_INLINE uint32_t first_columns(int64_t n) { return static_cast<uint32_t>((uint64_t(1) << n) - 1); }

// Returns the masks of these columns in the two vectors of a loaded pack. For BFloat16 even columns precede odd ones.
template <typename scalar_t>
SCE_AVX512_INLINE uint32_t first_lanes(int64_t n) {
  if (std::is_same_v<scalar_t, BFloat16>) return first_columns((n + 1) / 2) | first_columns(n / 2) << 16;
  return first_columns(n);
}

// Returns how many of n columns are in pack k.
SCE_AVX512_INLINE int64_t in_pack(int64_t n, int k) { return std::clamp<int64_t>(n - k * kPack, 0, kPack); }

// Converts 32 logits of 16 bits. For BFloat16 `a` gets the even ones and `b` the odd ones, which takes one instruction
// each instead of two.
SCE_AVX512_INLINE void widen(__m512i bits, BFloat16, __m512& a, __m512& b) {
  a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
SCE_AVX512_INLINE void widen(__m512i bits, Half, __m512& a, __m512& b) {
  a = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
  b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}

// Implements the inverse, rounding to nearest. BFloat16 ties round away from zero, because the exponentials are not
// exact enough to detect ties.
SCE_AVX512_INLINE __m512i narrow(__m512 a, __m512 b, BFloat16) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i even = _mm512_add_epi32(_mm512_castps_si512(a), half);
  const __m512i odd = _mm512_add_epi32(_mm512_castps_si512(b), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
}
SCE_AVX512_INLINE __m512i narrow(__m512 a, __m512 b, Half) {
  const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

template <typename scalar_t>
constexpr int kLines = kPack * sizeof(scalar_t) / kLine;  // of a stream

// Prefetches the lines of each stream half a kilobyte ahead, and the lines of the next span into the L2 cache.
template <typename scalar_t>
SCE_AVX512_INLINE void prefetch_streams(const scalar_t* x, const scalar_t* next, int64_t step) {
  SCE_EACH(k, kStreams) {
    const char* soon = reinterpret_cast<const char*>(x + k * step) + kSoon;
    const char* later = reinterpret_cast<const char*>(next + k * step);
    SCE_EACH(i, kLines<scalar_t>) _mm_prefetch(soon + kLine * i, _MM_HINT_T0);
    SCE_EACH(i, kLines<scalar_t>) _mm_prefetch(later + kLine * i, _MM_HINT_T1);
  }
}

// Prefetches the first n columns of the next span.
template <typename scalar_t>
SCE_AVX512_INLINE void prefetch_first(const scalar_t* next, int64_t n) {
  for (int64_t i = 0; i < n; i += kLine / static_cast<int64_t>(sizeof(scalar_t)))
    _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T1);
}

// Prefetches the lines that are written half a kilobyte ahead for ownership, because a store that waits for its line
// stalls the following stores. Saves 8 % of forward and backward (256 x 128256 float32, two Cascade Lake cores,
// 2026-11-21).
template <typename scalar_t>
SCE_AVX512_INLINE void prefetch_stores(scalar_t* out, int64_t step) {
  SCE_EACH(k, kStreams) {
    char* soon = reinterpret_cast<char*>(out + k * step) + kSoon;
    SCE_EACH(i, kLines<scalar_t>) __builtin_prefetch(soon + kLine * i, /*write=*/1, /*locality=*/3);
  }
}

SCE_AVX512_INLINE void load(const float* x, Columns<kNarrow>& out) {
  SCE_EACH(k, kNarrow) out.vector[k] = _mm512_loadu_ps(x + 16 * k);
}
template <typename scalar_t>
SCE_AVX512_INLINE void load(const scalar_t* x, Columns<kNarrow>& out) {
  widen(_mm512_loadu_si512(x), scalar_t{}, out.vector[0], out.vector[1]);
}

// Loads the columns whose bit is set. The others are -inf, which changes neither a maximum nor a sum of exponentials.
SCE_AVX512_INLINE void load(const float* x, uint32_t columns, Columns<kNarrow>& out) {
  const __m512 fill = _mm512_set1_ps(-INFINITY);
  SCE_EACH(k, kNarrow)
  out.vector[k] = _mm512_mask_loadu_ps(fill, static_cast<__mmask16>(columns >> 16 * k), x + 16 * k);
}
template <typename scalar_t>
SCE_AVX512_INLINE void load(const scalar_t* x, uint32_t columns, Columns<kNarrow>& out) {
  constexpr short kMinusInfinity = static_cast<short>(std::is_same_v<scalar_t, Half> ? 0xfc00 : 0xff80);
  const __m512i bits = _mm512_mask_loadu_epi16(_mm512_set1_epi16(kMinusInfinity), columns, x);
  widen(bits, scalar_t{}, out.vector[0], out.vector[1]);
}

// These read all columns of a row, or those with a bit in `kept` (columns / 32,).
template <typename scalar_t>
struct Every {
  using Storage = scalar_t;
  static constexpr bool kCapped = false;
  const scalar_t* x;

  SCE_AVX512_INLINE Every from(int64_t i) const { return {x + i}; }
  SCE_AVX512_INLINE void read(Columns<kNarrow>& out) const { load(x, out); }
  SCE_AVX512_INLINE void read_first(int64_t n, Columns<kNarrow>& out) const { load(x, first_columns(n), out); }
};
template <typename scalar_t>
struct Kept {
  using Storage = scalar_t;
  static constexpr bool kCapped = false;
  const scalar_t* x;
  const uint32_t* kept;

  SCE_AVX512_INLINE Kept from(int64_t i) const { return {x + i, kept + i / kPack}; }  // i is a multiple of kPack
  SCE_AVX512_INLINE void read(Columns<kNarrow>& out) const { load(x, *kept, out); }
  SCE_AVX512_INLINE void read_first(int64_t n, Columns<kNarrow>& out) const { load(x, *kept & first_columns(n), out); }
};

// Loads 32 columns of each stream; streams are `step` columns apart.
template <typename logits_t>
SCE_AVX512_INLINE void read_streams(const logits_t& logits, int64_t step, Columns<kWide>& out) {
  SCE_EACH(k, kStreams) {
    Columns<kNarrow> part;
    logits.from(k * step).read(part);
    out.vector[2 * k] = part.vector[0];
    out.vector[2 * k + 1] = part.vector[1];
  }
}

// `nontemporal` uses non-temporal stores, which write whole lines.
template <bool nontemporal>
SCE_AVX512_INLINE void store(const Columns<kNarrow>& x, float* out) {
  SCE_EACH(k, kNarrow)
  nontemporal ? _mm512_stream_ps(out + 16 * k, x.vector[k]) : _mm512_storeu_ps(out + 16 * k, x.vector[k]);
}
template <bool nontemporal, typename scalar_t>
SCE_AVX512_INLINE void store(const Columns<kNarrow>& x, scalar_t* out) {
  const __m512i bits = narrow(x.vector[0], x.vector[1], scalar_t{});
  nontemporal ? _mm512_stream_si512(reinterpret_cast<__m512i*>(out), bits) : _mm512_storeu_si512(out, bits);
}

// Loads the first n columns of several packs; the others are -inf.
template <int packs, typename logits_t>
SCE_AVX512_INLINE void read_first(const logits_t& logits, int64_t n, Columns<packs * kNarrow>& out) {
  SCE_EACH(k, packs) {
    Columns<kNarrow> part{{_mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY)}};
    if (in_pack(n, k) == kPack)
      logits.from(k * kPack).read(part);
    else if (in_pack(n, k) > 0)
      logits.from(k * kPack).read_first(in_pack(n, k), part);
    out.vector[2 * k] = part.vector[0];
    out.vector[2 * k + 1] = part.vector[1];
  }
}

template <bool nontemporal, typename scalar_t>
SCE_AVX512_INLINE void store_streams(const Columns<kWide>& x, int64_t step, scalar_t* out) {
  SCE_EACH(k, kStreams) store<nontemporal>(Columns<kNarrow>{{x.vector[2 * k], x.vector[2 * k + 1]}}, out + k * step);
}

// Stores the first n columns.
SCE_AVX512_INLINE void store_first(const Columns<kNarrow>& x, int64_t n, float* out) {
  SCE_EACH(k, kNarrow)
  _mm512_mask_storeu_ps(out + 16 * k, static_cast<__mmask16>(first_columns(n) >> 16 * k), x.vector[k]);
}
template <typename scalar_t>
SCE_AVX512_INLINE void store_first(const Columns<kNarrow>& x, int64_t n, scalar_t* out) {
  _mm512_mask_storeu_epi16(out, first_columns(n), narrow(x.vector[0], x.vector[1], scalar_t{}));
}

template <bool nontemporal, int packs, typename scalar_t>
SCE_AVX512_INLINE void store_first(const Columns<packs * kNarrow>& x, int64_t n, scalar_t* out) {
  SCE_EACH(k, packs) {
    const Columns<kNarrow> part{{x.vector[2 * k], x.vector[2 * k + 1]}};
    if (in_pack(n, k) == kPack)
      store<nontemporal>(part, out + k * kPack);
    else if (in_pack(n, k) > 0)
      store_first(part, in_pack(n, k), out + k * kPack);
  }
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
