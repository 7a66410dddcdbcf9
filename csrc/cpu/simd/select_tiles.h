// select_tiles.h - Computes what select needs beside sums of exponentials: the argmax, the rank, and the sum of logits.
#pragma once

#include "loss_tiles.h"

namespace sparse_ce {
namespace cpu {

// Replaces numbers whose bit in `kept` is not set by `value`; does nothing if `kept` is null.
template <typename acc_t>
SCE_HD void leave_out(const uint32_t* kept, int64_t n, acc_t value, acc_t* z) {
  for (int64_t word = 0; kept && word < divide_up(n, 32); ++word)
    for (uint32_t left = ~kept[word]; left != 0; left &= left - 1) z[32 * word + __builtin_ctz(left)] = value;
}

// Returns a transformed tile without the excluded logits: in buffer (kTile,), or the logits if they are unchanged.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD const acc_t* kept_of(const scalar_t* logits, int64_t begin, int64_t n, const LogitTransform<acc_t>& transform,
                            const uint32_t* kept, acc_t* buffer) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    if (transform.identity() && !kept) return logits + begin;
  }
  Outlined<set>::call([&]() SCE_INLINE {
    transform_into<set>(logits + begin, n, transform, buffer, static_cast<acc_t*>(nullptr));
    leave_out(kept ? kept + begin / 32 : nullptr, n, -acc_t(INFINITY), buffer);
  });
  return buffer;
}

// Returns the first logit whose transform is at least `least`, or -1.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD int64_t first_from(acc_t least, const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                          const uint32_t* kept) {
  alignas(64) acc_t buffer[kTile];
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t m = n - begin < kTile ? n - begin : kTile;
    const acc_t* z = kept_of<set>(logits, begin, m, transform, kept, buffer);
    int64_t found = 0;
    SCE_SIMD(reduction(+ : found))
    for (int64_t i = 0; i < m; ++i) found += z[i] >= least;
    for (int64_t i = 0; found != 0; ++i)
      if (z[i] >= least) return begin + i;
  }
  return -1;
}

// Counts the logits that come before the ranked one. Compilers vectorize it only with a constant direction.
template <bool reverse, typename scalar_t, typename acc_t>
SCE_HD int64_t above_body(const scalar_t* logits, int64_t n, const acc_t ranked) {
  int32_t above = 0;  // as wide as a logit, so that a vector holds as many
  SCE_SIMD(reduction(+ : above))
  for (int64_t i = 0; i < n; ++i) above += Ranked<acc_t>::is_above(to_acc(logits[i]), ranked, reverse);
  return above;
}
// Does the same in ascending order, n <= kSpan, but does not count NaN. Floats of the same sign have the order of their
// bits. Comparing these also works while subnormal numbers count as 0.
template <typename bits_t, typename scalar_t>
SCE_HD int64_t above_bits(const scalar_t* logits, int64_t n, scalar_t ranked) {
  using signed_t = std::make_signed_t<bits_t>;
  constexpr bits_t kSign = bits_t(1) << (8 * sizeof(bits_t) - 1);
  const bits_t bits = bit_cast<bits_t>(ranked);
  bits_t above = 0;  // as wide as a logit, so that a vector holds as many
  if (bits > kSign) {
    SCE_SIMD(reduction(+ : above))
    for (int64_t i = 0; i < n; ++i) above += bit_cast<bits_t>(logits[i]) < bits;
  } else {
    const auto positive = static_cast<signed_t>(bits & ~kSign);  // -0 equals 0
    SCE_SIMD(reduction(+ : above))
    for (int64_t i = 0; i < n; ++i) above += bit_cast<signed_t>(logits[i]) > positive;
  }
  return above;
}

// Computes what select needs beside sums of exponentials, from parts of the logits that have just been read.
template <InstructionSet set, typename scalar_t>
struct Beside {
  using acc_t = acc_type<scalar_t>;
  const scalar_t* logits;
  const LogitTransform<acc_t>& transform;
  const RequestedStats& requested;
  const Ranked<acc_t>* ranked;
  acc_t total = 0, highest = -acc_t(INFINITY);
  int64_t above = 0, top = 0;  // where the first part with the highest z begins

  SCE_HD void see(int64_t begin, int64_t end) {
    if (requested.total) total += sum(begin, end);
    if (ranked) above += count(logits + begin, end - begin);
  }
  SCE_HD void see(int64_t begin, int64_t end, acc_t highest_z) {
    see(begin, end);
    if (highest_z > highest) highest = highest_z, top = begin;
  }
  // Returns the first of n logits whose z is `max`, or -1.
  SCE_HD int64_t argmax(acc_t max, int64_t n, const uint32_t* kept) const {
    const int64_t at = first_from<set>(max, logits + top, n - top, transform, kept ? kept + top / 32 : nullptr);
    return at < 0 ? at : top + at;
  }

 private:
  SCE_HD acc_t sum(int64_t begin, int64_t end) const {
#ifdef SCE_X86
    if constexpr (kWithAvx512<set, acc_t>) {
      if (transform.softcap == 0)
        return avx512::sum(avx512::Every<scalar_t>{logits + begin}, end - begin, transform.scale);
    }
#endif
    alignas(64) acc_t buffer[kTile];
    acc_t sum = 0;
    for (int64_t i = begin; i < end; i += kTile) {
      const int64_t m = end - i < kTile ? end - i : kTile;
      const acc_t* z = kept_of<set>(logits, i, m, transform, nullptr, buffer);
      sum += sum_in_lanes<acc_t>(0, m, [&](int64_t k) { return z[k]; });
    }
    return sum;
  }
  SCE_HD int64_t count(const scalar_t* x, int64_t n) const {
    if (ranked->reverse) return above_body<true>(x, n, ranked->logit);
    scalar_t logit;
    from_acc(ranked->logit, logit);
    using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t,
                                      std::conditional_t<sizeof(scalar_t) == 4, uint32_t, uint64_t>>;
    return ranked->logit == ranked->logit ? above_bits<bits_t>(x, n, logit) : above_body<false>(x, n, ranked->logit);
  }
};

}  // namespace cpu
}  // namespace sparse_ce
