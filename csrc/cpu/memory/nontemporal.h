// nontemporal.h - Implements non-temporal (streaming) stores for gradients that exceed the caches. A line that is
// written completely need not be read first, which saves a third of the memory traffic of logits and gradient.
#pragma once

#include "../../core/dtype.h"
#include "../instruction_set.h"

#include <algorithm>
#include <cstdint>

#ifdef SCE_X86
#include <immintrin.h>
#endif

namespace sparse_ce {
namespace cpu {

// Returns true if a gradient of n elements of `size` bytes uses non-temporal stores. It does if it would not stay in a
// cache and the loops are memory-bound. Logits that the gradient overwrites are in a cache already.
bool use_nontemporal(const void* logits, const void* gradient, int64_t n, int64_t size);

// Returns true if non-temporal stores pay off for a row of n elements. Entries are written after the row and fetch
// their lines again, which stalls subsequent stores. A row of 2 KiB took a quarter longer, one of 256 bytes three times
// as long.
template <typename scalar_t>
constexpr bool worth_it(int64_t n, size_t entries) {
  return n * static_cast<int64_t>(sizeof(scalar_t)) >= 4096 && static_cast<int64_t>(entries) * 64 <= n;
}

// Returns the same if exponentials were stored. The remaining work is then only stores, and for float32 on AVX2 no
// computation hides them.
template <typename scalar_t>
bool worth_it_of_stored() {
  return sizeof(scalar_t) == 2 || instruction_set_in_use() == InstructionSet::kAvx512;
}

// Makes all previous stores visible to other threads.
inline void finish_stores() {
#ifdef SCE_X86
  _mm_sfence();
#endif
}

constexpr int64_t kLine = 64;  // in bytes

template <typename scalar_t>
struct Destination {
  scalar_t* gradient;
  bool nontemporal;

  SCE_HD Destination from(int64_t i) const { return {gradient + i, nontemporal}; }
};

// Returns how many of n elements lie before the first complete line.
template <typename scalar_t>
SCE_HD int64_t before_line(const scalar_t* x, int64_t n) {
  return std::min<int64_t>(n, (-reinterpret_cast<uintptr_t>(x) % kLine) / sizeof(scalar_t));
}

#ifdef SCE_X86
// Copies with whole vectors: the store queue holds as many of them as of smaller stores.
SCE_AVX2 inline void copy_lines_avx2(const void* from, int64_t bytes, void* to) {
  for (int64_t i = 0; i < bytes; i += kLine) {
    const auto* x = reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + i);
    auto* out = reinterpret_cast<__m256i*>(static_cast<char*>(to) + i);
    const __m256i low = _mm256_loadu_si256(x), high = _mm256_loadu_si256(x + 1);
    _mm256_stream_si256(out, low);
    _mm256_stream_si256(out + 1, high);
  }
}
SCE_AVX512 inline void copy_lines_avx512(const void* from, int64_t bytes, void* to) {
  for (int64_t i = 0; i < bytes; i += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i),
                        _mm512_loadu_si512(static_cast<const char*>(from) + i));
}
#endif

// Copies complete lines with non-temporal stores and the rest with normal stores.
template <InstructionSet set, typename scalar_t>
SCE_HD void stream_copy(const scalar_t* from, int64_t n, scalar_t* to) {
#ifdef SCE_X86
  if constexpr (set != InstructionSet::kDefault) {
    constexpr int64_t kOfLine = kLine / sizeof(scalar_t);
    const int64_t begin = before_line(to, n), end = n - (n - begin) % kOfLine, bytes = (end - begin) * sizeof(scalar_t);
    for (int64_t i = 0; i < begin; ++i) to[i] = from[i];
    set == InstructionSet::kAvx512 ? copy_lines_avx512(from + begin, bytes, to + begin)
                                   : copy_lines_avx2(from + begin, bytes, to + begin);
    for (int64_t i = end; i < n; ++i) to[i] = from[i];
    return;
  }
#endif
  std::copy(from, from + n, to);
}

}  // namespace cpu
}  // namespace sparse_ce
