// exp_tile.h - Computes a tile's exponentials relative to its maximum, for the sum of the row and then for the
// gradient. If they are stored in between, each logit needs one exponential. If they are recomputed, they have the same
// bits.
#pragma once

#include "avx2_softcap.h"
#include "avx512_softcap.h"
#include "convert.h"
#include "tile.h"

#include <algorithm>

namespace sparse_ce {
namespace cpu {

// Is true if avx2.h has loops for these types.
template <InstructionSet set, typename acc_t>
constexpr bool kWithAvx2 = set == InstructionSet::kAvx2 && std::is_same_v<acc_t, float>;

// Is true if avx512_softcap.h has loops for these types.
template <InstructionSet set, typename acc_t>
constexpr bool kWithAvx512 = set == InstructionSet::kAvx512 && std::is_same_v<acc_t, float>;

// Computes z (n,) of logits under a softcap and, with `sloped`, dz/d(scale x). The bits of a result do not depend on
// its position or on n. A row's sum and its entries therefore use equal logits, and p - 1 with p close to 1 keeps its
// digits.
template <InstructionSet set, bool sloped, typename source_t, typename acc_t>
SCE_HD void cap_into(const source_t* logits, int64_t n, const LogitTransform<acc_t> transform, acc_t* z,
                     [[maybe_unused]] acc_t* __restrict__ slopes) {
#ifdef SCE_X86
  if constexpr (kWithAvx2<set, acc_t>) return avx2::cap_into<sloped>(logits, n, transform, z, slopes);
#endif
  const acc_t* x = widened<set>(logits, n, z);
#ifdef SCE_X86
  if constexpr (kWithAvx512<set, acc_t>) {
    if (transform.scale > 0) return avx512::cap_into<sloped>(x, n, transform, z, slopes);
  }
#endif
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) {
    const auto t = transform.with_slope(x[i]);
    if constexpr (sloped) slopes[i] = t.of_cap;
    z[i] = t.z;
  }
}

// Computes z (n,) of logits and, under a softcap and if `slopes` is not null, dz/d(scale x).
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void transform_into(const scalar_t* logits, int64_t n, const LogitTransform<acc_t> transform, acc_t* z,
                           acc_t* slopes) {
  if (transform.softcap != acc_t(0))
    return slopes ? cap_into<set, true>(logits, n, transform, z, slopes)
                  : cap_into<set, false>(logits, n, transform, z, slopes);
  const acc_t* x = widened<set>(logits, n, z);
  if (transform.scale != acc_t(1)) {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) z[i] = transform.scale * x[i];
  } else if (x != z) {
    std::copy(x, x + n, z);
  }
}

// Computes z without slopes, in `buffer`, or returns the logits if they are unchanged.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD const acc_t* transformed(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                                acc_t* buffer) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    if (transform.identity()) return logits;
  }
  transform_into<set>(logits, n, transform, buffer, static_cast<acc_t*>(nullptr));
  return buffer;
}

// Returns the maximum; NaN never becomes the maximum. Short arrays do not use lanes, which take longer to fill and
// reduce.
template <typename acc_t>
SCE_HD acc_t maximum(const acc_t* z, int64_t n) {
  acc_t max = Limits<acc_t>::kLowest;
  int64_t i = 0;
  if (n >= kWideLanes) {
    acc_t lanes[kWideLanes];
    for (int64_t k = 0; k < kWideLanes; ++k) lanes[k] = max;
    for (; i + kWideLanes <= n; i += kWideLanes) {
      SCE_SIMD()
      for (int64_t k = 0; k < kWideLanes; ++k) lanes[k] = z[i + k] > lanes[k] ? z[i + k] : lanes[k];
    }
    SCE_SIMD_MAX(max)
    for (int64_t k = 0; k < kWideLanes; ++k) max = lanes[k] > max ? lanes[k] : max;
  }
  SCE_SIMD_MAX(max)
  for (int64_t k = i; k < n; ++k) max = z[k] > max ? z[k] : max;
  return max;
}

// Returns the statistics of transformed logits z (n,). Unless it is null, `exps` (n,) receives the exponentials; it
// may alias z. Prefetches `next`, the logits that are processed next.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD RowStats<acc_t> raise(const acc_t* z, int64_t n, bool weighted, const acc_t* class_weight, const scalar_t* next,
                             acc_t* exps) {
  RowStats<acc_t> stats;
  const acc_t max = stats.max = maximum(z, n);
  if (weighted) stats.push_weighted(z, class_weight, n);
#ifdef SCE_X86
  if constexpr (kWithAvx2<set, acc_t>) {
    if (avx2::raised_here(max, n)) {
      stats.rest = avx2::rest_beside(z, n, max, next, exps);
      return stats;
    }
  }
#endif
  const auto exp_of = [&](int64_t i) { return exponential_below<degree_for<scalar_t>>(z[i] - max); };
  const auto prefetch = [&](int64_t i) SCE_INLINE {
    for (int64_t byte = 0; byte < kLanes * int64_t(sizeof(scalar_t)); byte += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(next + i) + byte, /*write=*/0, /*locality=*/2);
  };
  const auto prefetch_to_own = [&](int64_t i) SCE_INLINE {
    prefetch(i);
    for (int64_t byte = 0; byte < kLanes * int64_t(sizeof(acc_t)); byte += kLine)
      __builtin_prefetch(reinterpret_cast<char*>(exps + i) + kSoon + byte, /*write=*/1);
  };
  const acc_t total = exps ? sum_in_lanes<acc_t>(
                                 0, n, [&](int64_t i) { return exps[i] = exp_of(i); }, prefetch_to_own)
                           : sum_in_lanes<acc_t>(0, n, exp_of, prefetch);
  // If the maximum hides the digits of the other exponentials, they are added again without it. Its exponential is 1.
  stats.rest = total - acc_t(1);
  if (stats.hides_rest()) {
    int64_t at = 0;
    while (exps ? exps[at] != acc_t(1) : z[at] != max) ++at;
    const auto stored = [&](int64_t i) { return exps[i]; };
    stats.rest = exps ? sum_in_lanes<acc_t>(0, at, stored) + sum_in_lanes<acc_t>(at + 1, n, stored)
                      : sum_in_lanes<acc_t>(0, at, exp_of) + sum_in_lanes<acc_t>(at + 1, n, exp_of);
  }
  return stats;
}

// Returns the statistics of n <= kExpTile logits. `slopes` (n,) receives dz/d(scale x) under a softcap and is otherwise
// null.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD RowStats<acc_t> raise(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                             const acc_t* class_weight, const scalar_t* next, acc_t* exps, acc_t* slopes) {
  alignas(64) acc_t buffer[kExpTile];
  acc_t* const own = exps ? exps : buffer;
  const acc_t* z = own;
  if (slopes)
    transform_into<set>(logits, n, transform, own, slopes);
  else
    z = transformed<set>(logits, n, transform, own);
  return raise<set>(z, n, weighted, class_weight, next, exps);
}

// Returns the factor that turns an exponential of a tile of n into a q_j.
template <InstructionSet set, typename acc_t>
SCE_HD acc_t per_exp(acc_t max, [[maybe_unused]] int64_t n, const GradientCoefficients<acc_t>& coefficients) {
#ifdef SCE_X86
  if constexpr (kWithAvx2<set, acc_t>) {
    if (avx2::raised_here(max, n)) return avx2::per_exp(max, 1, coefficients);
  }
#endif
  return coefficients.per_exp(max);
}

// Writes the gradient from the exponentials, as if no logit had an entry. They are relative to `max` and become scratch
// memory.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void gradient_of(acc_t* exps, const acc_t* slopes, acc_t max, int64_t n, acc_t scale,
                        const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                        const Destination<scalar_t>& to) {
  const acc_t by = per_exp<set>(max, n, coefficients) * scale, b = coefficients.b * scale;
  alignas(64) scalar_t rounded[kExpTile];
  const auto write = [&](const auto& term) SCE_INLINE {
    narrow<set>(n, term, exps, to.nontemporal ? rounded : to.gradient);
    if (to.nontemporal) stream_copy<set>(rounded, n, to.gradient);
  };
  const auto with = [&](const auto& slope) SCE_INLINE {
    if (b == acc_t(0)) return write([&](int64_t i) { return by * exps[i] * slope(i); });
    if (class_weight) return write([&](int64_t i) { return (by * exps[i] - b * class_weight[i]) * slope(i); });
    write([&](int64_t i) { return (by * exps[i] - b) * slope(i); });
  };
  if (slopes) return with([&](int64_t i) { return slopes[i]; });
  with([](int64_t) { return acc_t(1); });
}

}  // namespace cpu
}  // namespace sparse_ce
