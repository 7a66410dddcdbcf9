// exp_tile.h - a tile's exponentials relative to its maximum, which serve the sum of the row and then the gradient: one
// exponential a logit where they are kept in between. Where they are not, making them again gives the same bits.
#pragma once

#include "avx2_softcap.h"
#include "avx512_softcap.h"
#include "convert.h"
#include "tile.h"

#include <algorithm>

namespace sparse_ce {
namespace cpu {

// Whether loops of avx2.h are there.
template <InstructionSet set, typename acc_t>
constexpr bool kWithAvx2 = set == InstructionSet::kAvx2 && std::is_same_v<acc_t, float>;

// Or of avx512_softcap.h.
template <InstructionSet set, typename acc_t>
constexpr bool kWithAvx512 = set == InstructionSet::kAvx512 && std::is_same_v<acc_t, float>;

// z (n,) of logits that have a softcap and, with `sloped`, dz/d(scale x). Each has the same bits wherever it is among
// however many, so that a row's sum and its entries have the same logits: p - 1 near p = 1 has digits.
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

// z (n,) of logits and, where they have a softcap and `slopes` is not null, dz/d(scale x).
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

// The same without, in `buffer` or, where nothing becomes of the logits, the logits.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD const acc_t* transformed(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                                acc_t* buffer) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    if (transform.identity()) return logits;
  }
  transform_into<set>(logits, n, transform, buffer, static_cast<acc_t*>(nullptr));
  return buffer;
}

// The largest; NaN is never the larger one. Of few logits without lanes, which take longer to fill and to reduce.
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
    SCE_SIMD(reduction(max : max))
    for (int64_t k = 0; k < kWideLanes; ++k) max = lanes[k] > max ? lanes[k] : max;
  }
  SCE_SIMD(reduction(max : max))
  for (int64_t k = i; k < n; ++k) max = z[k] > max ? z[k] : max;
  return max;
}

// Statistics of transformed logits z (n,). `powers` (n,), which may be z, receives the exponentials unless it is null;
// meanwhile `next`, the logits that are worked on after these, come nearer.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD RowStats<acc_t> raise(const acc_t* z, int64_t n, bool weighted, const acc_t* class_weight, const scalar_t* next,
                             acc_t* powers) {
  RowStats<acc_t> stats;
  const acc_t max = stats.max = maximum(z, n);
  if (weighted) stats.push_weighted(z, class_weight, n);
#ifdef SCE_X86
  if constexpr (kWithAvx2<set, acc_t>) {
    if (avx2::raised_here(max, n)) {
      stats.sum = avx2::sum_beside(z, n, max, next, powers);
      return stats;
    }
  }
#endif
  const auto power = [&](int64_t i) { return exponential_below<degree_for<scalar_t>>(z[i] - max); };
  const auto ask = [&](int64_t i) SCE_INLINE {
    for (int64_t byte = 0; byte < kLanes * int64_t(sizeof(scalar_t)); byte += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(next + i) + byte, /*write=*/0, /*locality=*/2);
  };
  const auto ask_to_own = [&](int64_t i) SCE_INLINE {
    ask(i);
    for (int64_t byte = 0; byte < kLanes * int64_t(sizeof(acc_t)); byte += kLine)
      __builtin_prefetch(reinterpret_cast<char*>(powers + i) + kSoon + byte, /*write=*/1);
  };
  stats.sum = powers ? sum_in_lanes<acc_t>(
                           0, n, [&](int64_t i) { return powers[i] = power(i); }, ask_to_own)
                     : sum_in_lanes<acc_t>(0, n, power, ask);
  return stats;
}

// The same of n <= kPowers logits. `slopes` (n,): dz/d(scale x) where there is a softcap, null without.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD RowStats<acc_t> raise(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                             const acc_t* class_weight, const scalar_t* next, acc_t* powers, acc_t* slopes) {
  alignas(64) acc_t buffer[kPowers];
  acc_t* const own = powers ? powers : buffer;
  const acc_t* z = own;
  if (slopes)
    transform_into<set>(logits, n, transform, own, slopes);
  else
    z = transformed<set>(logits, n, transform, own);
  return raise<set>(z, n, weighted, class_weight, next, powers);
}

// By this an exponential of a tile of n is multiplied to become a q_j.
template <InstructionSet set, typename acc_t>
SCE_HD acc_t per_power(acc_t max, [[maybe_unused]] int64_t n, const GradientCoefficients<acc_t>& coefficients) {
#ifdef SCE_X86
  if constexpr (kWithAvx2<set, acc_t>) {
    if (avx2::raised_here(max, n)) return avx2::per_power(max, 1, coefficients);
  }
#endif
  return coefficients.per_power(max);
}

// The gradient from them, as if no logit had an entry. `max` is what they are relative to; they become scratch.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void gradient_of(acc_t* powers, const acc_t* slopes, acc_t max, int64_t n, acc_t scale,
                        const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                        const Destination<scalar_t>& to) {
  const acc_t by = per_power<set>(max, n, coefficients) * scale, b = coefficients.b * scale;
  alignas(64) scalar_t rounded[kPowers];
  const auto write = [&](const auto& term) SCE_INLINE {
    narrow<set>(n, term, powers, to.around ? rounded : to.gradient);
    if (to.around) copy_around<set>(rounded, n, to.gradient);
  };
  const auto with = [&](const auto& slope) SCE_INLINE {
    if (b == acc_t(0)) return write([&](int64_t i) { return by * powers[i] * slope(i); });
    if (class_weight) return write([&](int64_t i) { return (by * powers[i] - b * class_weight[i]) * slope(i); });
    write([&](int64_t i) { return (by * powers[i] - b) * slope(i); });
  };
  if (slopes) return with([&](int64_t i) { return slopes[i]; });
  with([](int64_t) { return acc_t(1); });
}

}  // namespace cpu
}  // namespace sparse_ce
