// loss_tiles.h - Computes the statistics and the gradient of a span of a row, with the loops of the instruction set. If
// these do not apply, it uses the loops of exp_tile.h.
#pragma once

#include "avx2.h"
#include "avx512_gradient.h"
#include "exp_tile.h"

namespace sparse_ce {
namespace cpu {

// Is true if forward and backward use the loops of avx512.h over the logits, where computing two exponentials is faster
// than storing one.
template <InstructionSet set, typename acc_t>
SCE_HD bool twice(const LogitTransform<acc_t>& transform) {
  if constexpr (kWithAvx512<set, acc_t>) return transform.softcap == 0 && transform.scale > 0;
  return false;
}

// Is true if they use the loops of avx512_softcap.h over a tile's tanh values, which are stored.
template <InstructionSet set, typename acc_t>
SCE_HD bool by_tanh(const LogitTransform<acc_t>& transform) {
  if constexpr (kWithAvx512<set, acc_t>) return transform.softcap > 0 && transform.scale > 0;
  return false;
}

#ifdef SCE_X86
// Returns true if they use the loops of avx2.h, for each tile to which these apply.
SCE_HD bool by_tiles(int64_t n, const LogitTransform<float>& transform, bool weighted, const float* class_weight) {
  return n >= avx2::kShortest && transform.softcap == 0 && transform.scale > 0 && !(weighted && class_weight);
}
#endif

// Processes the tile [begin, end) of n logits with exp_tile.h.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void push_tile(const scalar_t* logits, int64_t begin, int64_t end, int64_t n,
                      const LogitTransform<acc_t>& transform, bool weighted, const acc_t* class_weight,
                      const scalar_t* next, const Exps<acc_t>& stored, RowStats<acc_t>& stats) {
  const RowStats<acc_t> tile = Outlined<set>::call([&]() SCE_INLINE {
    return raise<set>(logits + begin, end - begin, transform, weighted, class_weight ? class_weight + begin : nullptr,
                      end < n ? logits + end : next, stored.exps, stored.slopes);
  });
  if (stored.maxima) *stored.maxima = tile.max;
  stats.merge(tile);
}

#ifdef SCE_X86
// These are separate functions, because short rows would otherwise have to save the registers that they use.
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) RowStats<float> stats_by_tiles(const scalar_t* logits, int64_t n,
                                                                  const LogitTransform<float>& transform, bool weighted,
                                                                  const scalar_t* next, const Exps<float>& stored) {
  RowStats<float> stats;
  avx2::push(
      logits, n, transform.scale, weighted, /*summed=*/true, next, stats,
      [&](int64_t begin) SCE_INLINE { return stored.from(begin); },
      [&](int64_t begin, int64_t end) SCE_INLINE {
        push_tile<InstructionSet::kAvx2>(logits, begin, end, n, transform, weighted, static_cast<const float*>(nullptr),
                                         next, stored.from(begin), stats);
      },
      [](int64_t, int64_t) SCE_INLINE {});
  return stats;
}
#endif

#ifdef SCE_X86
// Computes tanh of n logits, one tile at a time, and calls f(begin, end, values). Fills `stored` if it is present.
template <typename scalar_t, typename function_t>
SCE_AVX512 void for_tanh(const scalar_t* logits, int64_t n, const LogitTransform<float>& transform,
                         const scalar_t* next, const Exps<float>& stored, const function_t& f) {
  alignas(64) float buffer[kExpTile];
  for (int64_t begin = 0; begin < n; begin += kExpTile) {
    const int64_t end = std::min(n, begin + kExpTile);
    float* t = stored.exps ? stored.exps + begin : buffer;
    avx512::tanh_into(logits + begin, end - begin, transform, end < n ? logits + end : next, t);
    f(begin, end, t);
  }
}

// Returns the statistics of n logits, with or without label smoothing.
template <typename logits_t>
SCE_AVX512 RowStats<float> stats_of_plain(const logits_t& logits, int64_t n, const LogitTransform<float>& transform,
                                          const float* class_weight, const decltype(logits.x) next) {
  using Of = avx512::Smoothing<logits_t>;
  typename Of::Stats stats;
  avx512::push(logits, n, transform.scale, next, stats, [&](int64_t begin, int64_t end) SCE_INLINE {
    push_tile<InstructionSet::kAvx512>(logits.x, begin, end, n, transform, Of::kIs, class_weight, next, {}, stats);
  });
  return stats;
}

template <typename scalar_t>
SCE_AVX512 __attribute__((noinline)) RowStats<float> stats_of_tanh(const scalar_t* logits, int64_t n,
                                                                   const LogitTransform<float>& transform,
                                                                   bool smoothed, const float* class_weight,
                                                                   const scalar_t* next, const Exps<float>& stored) {
  RowStats<float> stats;
  for_tanh(logits, n, transform, next, stored, [&](int64_t begin, int64_t end, const float* t) SCE_AVX512 SCE_INLINE {
    const auto push = [&](const auto& tanh_values) SCE_AVX512 SCE_INLINE {
      typename avx512::Smoothing<std::decay_t<decltype(tanh_values)>>::Stats tile;
      avx512::push(tanh_values, end - begin, transform.softcap, t, tile, [&](int64_t first, int64_t last) SCE_INLINE {
        push_tile<InstructionSet::kAvx512>(logits, begin + first, begin + last, n, transform, smoothed, class_weight,
                                           next, {}, tile);
      });
      stats.merge(tile);
    };
    avx512::by_smoothing(avx512::TanhValues<scalar_t>{t}, smoothed, class_weight ? class_weight + begin : nullptr,
                         push);
  });
  return stats;
}
#endif

template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD RowStats<acc_t> stats_body(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                                  bool weighted, const acc_t* class_weight, [[maybe_unused]] const scalar_t* next,
                                  const Exps<acc_t>& stored) {
  RowStats<acc_t> stats;
#ifdef SCE_X86
  if constexpr (kWithAvx512<set, acc_t>) {
    if (twice<set>(transform))
      return avx512::by_smoothing(avx512::Every<scalar_t>{logits}, weighted, class_weight,
                                  [&](const auto& plain) SCE_AVX512 SCE_INLINE {
                                    return stats_of_plain(plain, n, transform, class_weight, next);
                                  });
    if (by_tanh<set>(transform)) return stats_of_tanh(logits, n, transform, weighted, class_weight, next, stored);
  }
  if constexpr (kWithAvx2<set, acc_t>) {
    if (by_tiles(n, transform, weighted, class_weight))
      return stats_by_tiles(logits, n, transform, weighted, next, stored);
  }
#endif
  for (int64_t begin = 0; begin < n; begin += kExpTile)
    push_tile<set>(logits, begin, n - begin < kExpTile ? n : begin + kExpTile, n, transform, weighted, class_weight,
                   next, stored.from(begin), stats);
  return stats;
}

#ifdef SCE_X86
// Writes the gradient of the tile [begin, end) of plain logits from its stored exponentials.
template <typename scalar_t>
SCE_AVX2 void tile_gradient(const Exps<float>& stored, int64_t begin, int64_t end,
                            const LogitTransform<float>& transform, const GradientCoefficients<float>& coefficients,
                            const Destination<scalar_t>& to) {
  if (avx2::raised_here(*stored.maxima, end - begin))
    return avx2::gradient(stored.exps, *stored.maxima, end - begin, transform.scale, coefficients, to.from(begin));
  gradient_of<InstructionSet::kAvx2>(stored.exps, static_cast<const float*>(nullptr), *stored.maxima, end - begin,
                                     transform.scale, coefficients, static_cast<const float*>(nullptr), to.from(begin));
}
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void gradient_by_tiles(const Exps<float>& stored, int64_t n,
                                                          const LogitTransform<float>& transform,
                                                          const GradientCoefficients<float>& coefficients,
                                                          const Destination<scalar_t>& to) {
  for (int64_t begin = 0; begin < n; begin += kExpTile)
    tile_gradient(stored.from(begin), begin, std::min(n, begin + kExpTile), transform, coefficients, to);
}
#endif

#ifdef SCE_X86
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void gradient_by_tiles(const scalar_t* logits, int64_t n,
                                                          const LogitTransform<float>& transform,
                                                          const GradientCoefficients<float>& coefficients,
                                                          const scalar_t* next, const Destination<scalar_t>& to) {
  alignas(64) float exps[kExpTile];
  float max;
  RowStats<float> stats;
  const Exps<float> stored{exps, nullptr, &max};
  avx2::push(
      logits, n, transform.scale, /*smoothed=*/false, /*summed=*/false, next, stats,
      [&](int64_t) SCE_INLINE { return stored; },
      [&](int64_t begin, int64_t end) SCE_INLINE {
        push_tile<InstructionSet::kAvx2>(logits, begin, end, n, transform, false, static_cast<const float*>(nullptr),
                                         next, stored, stats);
      },
      [&](int64_t begin, int64_t end) SCE_INLINE { tile_gradient(stored, begin, end, transform, coefficients, to); });
}
#endif

#ifdef SCE_X86
// Returns false, and writes nothing, if the loop does not apply.
template <typename logits_t, typename scalar_t>
SCE_AVX512 bool gradient_of_plain(const logits_t& logits, int64_t n, const LogitTransform<float>& transform,
                                  const GradientCoefficients<float>& coefficients, const scalar_t* next,
                                  const Destination<scalar_t>& to) {
  using Less = typename avx512::Smoothing<logits_t>::Less;
  return avx512::gradient<avx512::Times<Less>>(logits, n, transform.scale, coefficients, next, to);
}
template <typename scalar_t>
SCE_AVX512 void gradient_of_tanh(const float* t, int64_t n, const LogitTransform<float>& transform, bool smoothed,
                                 const float* class_weight, const GradientCoefficients<float>& coefficients,
                                 const Destination<scalar_t>& to) {
  avx512::by_smoothing(avx512::TanhValues<scalar_t>{t}, smoothed, class_weight,
                       [&](const auto& tanh_values) SCE_AVX512 SCE_INLINE {
                         avx512::capped_gradient(tanh_values, n, transform, coefficients, to);
                       });
}
#endif

template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void gradient_body(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                          [[maybe_unused]] bool weighted, const GradientCoefficients<acc_t>& coefficients,
                          const acc_t* class_weight, [[maybe_unused]] const scalar_t* next,
                          const Destination<scalar_t>& to) {
#ifdef SCE_X86
  if constexpr (kWithAvx512<set, acc_t>) {
    if (twice<set>(transform) && avx512::by_smoothing(avx512::Every<scalar_t>{logits}, weighted, class_weight,
                                                      [&](const auto& plain) SCE_AVX512 SCE_INLINE {
                                                        return gradient_of_plain(plain, n, transform, coefficients,
                                                                                 next, to);
                                                      }))
      return;
    if (by_tanh<set>(transform))
      return for_tanh(logits, n, transform, next, {},
                      [&](int64_t begin, int64_t end, const float* t) SCE_AVX512 SCE_INLINE {
                        gradient_of_tanh(t, end - begin, transform, weighted,
                                         class_weight ? class_weight + begin : nullptr, coefficients, to.from(begin));
                      });
  }
  if constexpr (kWithAvx2<set, acc_t>) {
    if (by_tiles(n, transform, weighted, class_weight))
      return gradient_by_tiles(logits, n, transform, coefficients, next, to);
  }
#endif
  alignas(64) acc_t exps[kExpTile], slopes[kExpTile];
  const bool capped = transform.softcap != acc_t(0);
  for (int64_t begin = 0; begin < n; begin += kExpTile) {
    const int64_t m = n - begin < kExpTile ? n - begin : kExpTile;
    const acc_t max = raise<set>(logits + begin, m, transform, false, static_cast<const acc_t*>(nullptr),
                                 begin + m < n ? logits + begin + m : next, exps, capped ? slopes : nullptr)
                          .max;
    gradient_of<set>(exps, capped ? slopes : nullptr, max, m, transform.scale, coefficients,
                     class_weight ? class_weight + begin : nullptr, to.from(begin));
  }
}

template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void stored_gradient_body(const Exps<acc_t>& stored, int64_t n, const LogitTransform<acc_t>& transform,
                                 [[maybe_unused]] bool weighted, const GradientCoefficients<acc_t>& coefficients,
                                 const acc_t* class_weight, const Destination<scalar_t>& to) {
#ifdef SCE_X86
  if constexpr (kWithAvx512<set, acc_t>) {
    if (by_tanh<set>(transform))
      return gradient_of_tanh(stored.exps, n, transform, weighted, class_weight, coefficients, to);
  }
  if constexpr (kWithAvx2<set, acc_t>) {
    if (by_tiles(n, transform, weighted, class_weight))
      return gradient_by_tiles(stored, n, transform, coefficients, to);
  }
#endif
  for (int64_t begin = 0; begin < n; begin += kExpTile)
    gradient_of<set>(stored.exps_at(begin), stored.slopes_at(begin), stored.maxima[begin / kExpTile],
                     n - begin < kExpTile ? n - begin : kExpTile, transform.scale, coefficients,
                     class_weight ? class_weight + begin : nullptr, to.from(begin));
}

template <InstructionSet set, typename acc_t>
SCE_HD void entries_body(acc_t* x, int64_t n, const LogitTransform<acc_t>& transform,
                         const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                         const acc_t* target_weight, double elsewhere) {
  const GradientCoefficients<acc_t> c = coefficients;
  const acc_t scale = transform.scale;
  alignas(64) acc_t slopes[kTile];
  int64_t most = -1;  // the entry that holds most
  acc_t z_of_most = 0, slope_of_most = 0;
  for (int64_t begin = 0; begin < n; begin += kTile) {
    acc_t* const z = x + begin;
    const int64_t m = n - begin < kTile ? n - begin : kTile;
    const bool capped = transform.softcap != acc_t(0);
    transform_into<set>(z, m, transform, z, capped ? slopes : nullptr);
    int64_t found = 0;
    SCE_SIMD(reduction(+ : found))
    for (int64_t i = 0; i < m; ++i) found += c.holds_most(z[i]);
    for (int64_t i = 0; found != 0 && i < m; ++i)
      if (c.holds_most(z[i])) most = begin + i, z_of_most = z[i], slope_of_most = capped ? scale * slopes[i] : scale;
    SCE_SIMD()
    for (int64_t i = 0; i < m; ++i)
      z[i] = (c.at(z[i], class_weight ? class_weight[begin + i] : acc_t(1)) - c.d * target_weight[begin + i]) *
             (capped ? scale * slopes[i] : scale);
  }
  if (most < 0) return;
  // Adds the other weights up without that of this entry, because their sum may be much smaller.
  const auto weight = [&](int64_t i) { return static_cast<double>(target_weight[i]); };
  const double others = sum_in_lanes<double>(0, most, weight) + sum_in_lanes<double>(most + 1, n, weight);
  x[most] = slope_of_most * c.at(z_of_most, class_weight ? class_weight[most] : acc_t(1), target_weight[most],
                                 static_cast<acc_t>(elsewhere + others));
}

}  // namespace cpu
}  // namespace sparse_ce
