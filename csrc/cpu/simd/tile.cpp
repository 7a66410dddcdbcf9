// Implements tile.h. Each member of Tile, at the end of the file, chooses the instruction set and calls a loop that is
// compiled for it, `<member>_body<set>`. The loops of the loss are in loss_tiles.h; those here are of select.
//
// A row is processed in tiles of kTile logits, which stay in the L1 cache. A tile passes through these steps:
//   kept_of      converts the logits to z in the arithmetic dtype, and sets those without a bit in `kept` to -inf
//   push_tile    adds z to the statistics
//   derivative   turns z into dl/dz, chain turns that into dl/dx, in the storage dtype
// With AVX-512 and float32 arithmetic, push_plain and select_gradient do all of it in registers, without a buffer.
#include "tile.h"

#include "select_tiles.h"

#include <cstdlib>
#include <cstring>

namespace sparse_ce {
namespace cpu {
namespace {

// Adds a tile. Exponentials are relative to the maximum of the logits before, so that one pass suffices. If it is too
// low, the tile is added again with its own maximum. The first few logits of a row provide the first maximum.
template <InstructionSet set, typename acc_t>
SCE_HD void push_tile(SelectStats<acc_t>& stats, const acc_t* z, int64_t n) {
  Outlined<set>::call([&]() SCE_INLINE {
    constexpr int64_t kFirst = 256;
    int64_t begin = 0;
    if (stats.empty()) {
      begin = n < kFirst ? n : kFirst;
      stats.push(z, 0, begin);
    }
    if (begin < n && !stats.push_near(z, begin, n)) stats.push(z, begin, n);
  });
}

#ifdef SCE_X86
template <typename stats_t>
SCE_AVX512 __attribute__((noinline)) void push_exactly(const float* z, int64_t n, stats_t& sums) {
  sums.push(z, 0, n);
}

// Reads memory once. `sums` is MoreStats or RowStats.
template <typename source_t, typename stats_t, typename beside_t>
SCE_AVX512 void push_plain(const source_t& source, int64_t n, const uint32_t* kept, const decltype(source.x) next,
                           beside_t& beside, stats_t& sums) {
  const auto plain = [&](int64_t begin, int64_t end) SCE_INLINE {
    alignas(64) float buffer[kTile];
    const float* z = kept_of<InstructionSet::kAvx512>(source.x, begin, end - begin, beside.transform, kept, buffer);
    push_exactly(z, end - begin, sums);
    beside.see(begin, end, maximum(z, end - begin));
  };
  avx512::push(source, n, beside.transform.scale, next, sums, plain,
               [&](int64_t begin, int64_t end, __m512 maxima) SCE_AVX512 SCE_INLINE {
                 beside.see(begin, end, beside.transform.scale * _mm512_reduce_max_ps(maxima));
               });
}
template <bool spread, bool squares, typename source_t, typename beside_t>
SCE_AVX512 void push_more(const source_t& source, int64_t n, const uint32_t* kept, const decltype(source.x) next,
                          beside_t& beside, SelectStats<float>& stats) {
  avx512::MoreStats<spread, squares> more;
  push_plain(source, n, kept, next, beside, more);
  stats = more;
}
template <typename source_t, typename beside_t>
SCE_AVX512 void push_requested(const source_t& source, int64_t n, const uint32_t* kept, const decltype(source.x) next,
                               beside_t& beside, SelectStats<float>& stats) {
  const bool spread = beside.requested.spread, squares = beside.requested.squares;
  if (spread && squares)
    push_more<true, true>(source, n, kept, next, beside, stats);
  else if (spread)
    push_more<true, false>(source, n, kept, next, beside, stats);
  else if (squares)
    push_more<false, true>(source, n, kept, next, beside, stats);
  else
    push_plain(source, n, kept, next, beside, stats.row);
}
#endif

// Takes the fastest loop that computes what is requested: AVX-512 in registers, else the loop of the loss, else tile by
// tile through a buffer. What the last two lack is read again, from a cache.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD SelectStats<acc_t> select_stats_body(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                                            const RequestedStats& requested, const acc_t* class_weight,
                                            const uint32_t* kept, const Ranked<acc_t>* ranked,
                                            [[maybe_unused]] const scalar_t* next) {
  SelectStats<acc_t> stats;
  Beside<set, scalar_t> beside{logits, transform, requested, ranked};
  const auto finish = [&](bool seen) SCE_INLINE {
    if (!seen) beside.see(0, n);
    stats.total = beside.total, stats.above = static_cast<int32_t>(beside.above);
    if (requested.argmax && stats.argmax < 0) stats.argmax = beside.argmax(stats.row.max, n, kept);
    return stats;
  };
#ifdef SCE_X86
  if constexpr (kWithAvx512<set, acc_t>) {
    if (transform.softcap == acc_t(0) && transform.scale > acc_t(0) && !requested.weighted) {
      kept ? push_requested(avx512::Kept<scalar_t>{logits, kept}, n, kept, next, beside, stats)
           : push_requested(avx512::Every<scalar_t>{logits}, n, kept, next, beside, stats);
      return finish(/*seen=*/true);
    }
  }
#endif
  const bool more = requested.spread || requested.squares;
  if (!kept && !more) {
    stats.row = Tile<scalar_t>::stats(logits, n, transform, requested.weighted, class_weight, next);
    return finish(/*seen=*/false);
  }
  alignas(64) acc_t buffer[kTile];
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t m = n - begin < kTile ? n - begin : kTile;
    const acc_t* z = kept_of<set>(logits, begin, m, transform, kept, buffer);
    const acc_t* weights = class_weight ? class_weight + begin : nullptr;
    if (!more) {
      stats.row.merge(raise<set>(z, m, requested.weighted, weights, next, static_cast<acc_t*>(nullptr)));
      continue;
    }
    push_tile<set>(stats, z, m);
    if (requested.weighted) stats.row.push_weighted(z, weights, m);
  }
  return finish(/*seen=*/false);
}

// Computes dl/dz in passes over the tile, each of which is one vector loop: the terms of every class, then those of the
// tail's classes, then 0 for excluded ones.
template <typename acc_t>
SCE_HD void derivative_body(const acc_t* z, int64_t n, const SelectCoefficients<acc_t>& coefficients,
                            const acc_t* class_weight, const uint32_t* kept, acc_t* __restrict__ derivative) {
  const SelectCoefficients<acc_t> c = coefficients;
  if (class_weight) {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) derivative[i] = c.at(z[i], class_weight[i]);
  } else {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) derivative[i] = c.at(z[i], acc_t(1));
  }
  if (c.beside != acc_t(0)) {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) derivative[i] += c.at_tail(z[i]);
  }
  leave_out(kept, n, acc_t(0), derivative);
}

// Computes dl/dx = dl/dz dz/dx. The gradient may overwrite the logits, which the derivative of the scale reads before.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void chain_body(const scalar_t* logits, const acc_t* slopes, const acc_t* derivative, int64_t n,
                       const LogitTransform<acc_t>& transform, acc_t* of_scale, acc_t common,
                       const Destination<scalar_t>& to) {
  const acc_t scale = transform.scale;
  alignas(64) scalar_t rounded[kTile];
  scalar_t* const out = to.nontemporal ? rounded : to.gradient;
  const auto with = [&](const auto& of_cap) SCE_INLINE {
    if (of_scale)
      *of_scale += sum_in_lanes<acc_t>(0, n, [&](int64_t i) {
        return SelectBackwardArgs::scale_term(derivative[i] * of_cap(i), to_acc(logits[i]), common);
      });
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) from_acc(derivative[i] * (scale * of_cap(i)), out[i]);
  };
  slopes ? with([&](int64_t i) { return slopes[i]; }) : with([](int64_t) { return acc_t(1); });
  if (to.nontemporal) stream_copy<set>(rounded, n, to.gradient);
}

// SPARSE_CE_CPU selects a path, so that each one can be tested. A path that the CPU does not support is ignored.
InstructionSet choose() {
#ifdef SCE_X86
  const char* wish = std::getenv("SPARSE_CE_CPU");
  const bool any = !wish || !*wish;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512 && (any || !std::strcmp(wish, "avx512"))) return InstructionSet::kAvx512;
  if (avx2 && (any || !std::strcmp(wish, "avx2"))) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kDefault;
}

}  // namespace

InstructionSet instruction_set_in_use() {
  static const InstructionSet set = choose();
  return set;
}

template <typename scalar_t>
bool Tile<scalar_t>::keeps(const LogitTransform<acc_t>& transform) {
  return instruction_set_in_use() != InstructionSet::kAvx512 || !twice<InstructionSet::kAvx512>(transform);
}

template <typename scalar_t>
RowStats<acc_type<scalar_t>> Tile<scalar_t>::stats(const scalar_t* logits, int64_t n,
                                                   const LogitTransform<acc_t>& transform, bool weighted,
                                                   const acc_t* class_weight, const scalar_t* next,
                                                   const Exps<acc_t>& stored) {
  return with_instruction_set([&](auto set) SCE_INLINE {
    return stats_body<decltype(set)::value>(logits, n, transform, weighted, class_weight, next, stored);
  });
}

template <typename scalar_t>
void Tile<scalar_t>::gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                              const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                              const scalar_t* next, const Destination<scalar_t>& to) {
  with_instruction_set([&](auto set) SCE_INLINE {
    gradient_body<decltype(set)::value>(logits, n, transform, weighted, coefficients, class_weight, next, to);
  });
}

template <typename scalar_t>
void Tile<scalar_t>::gradient(const Exps<acc_t>& stored, int64_t n, const LogitTransform<acc_t>& transform,
                              bool weighted, const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                              const Destination<scalar_t>& to) {
  with_instruction_set([&](auto set) SCE_INLINE {
    stored_gradient_body<decltype(set)::value>(stored, n, transform, weighted, coefficients, class_weight, to);
  });
}

template <typename scalar_t>
void Tile<scalar_t>::entries(acc_t* x, int64_t n, const LogitTransform<acc_t>& transform,
                             const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                             const acc_t* target_weight, double elsewhere) {
  if constexpr (!std::is_same_v<scalar_t, acc_t>)
    return Tile<acc_t>::entries(x, n, transform, coefficients, class_weight, target_weight, elsewhere);
  with_instruction_set([&](auto set) SCE_INLINE {
    entries_body<decltype(set)::value>(x, n, transform, coefficients, class_weight, target_weight, elsewhere);
  });
}

template <typename scalar_t>
SelectStats<acc_type<scalar_t>> Tile<scalar_t>::select_stats(const scalar_t* logits, int64_t n,
                                                             const LogitTransform<acc_t>& transform,
                                                             const RequestedStats& requested, const acc_t* class_weight,
                                                             const uint32_t* kept, const Ranked<acc_t>* ranked,
                                                             const scalar_t* next) {
  return with_instruction_set([&](auto set) SCE_INLINE {
    return select_stats_body<decltype(set)::value>(logits, n, transform, requested, class_weight, kept, ranked, next);
  });
}

template <typename scalar_t>
int64_t Tile<scalar_t>::first_from(acc_t least, const scalar_t* logits, int64_t n,
                                   const LogitTransform<acc_t>& transform) {
  return with_instruction_set(
      [&](auto set) SCE_INLINE { return cpu::first_from<decltype(set)::value>(least, logits, n, transform, nullptr); });
}

template <typename scalar_t>
int64_t Tile<scalar_t>::above(const scalar_t* logits, int64_t n, const Ranked<acc_t>& ranked) {
  return with_instruction_set([&](auto) SCE_INLINE {
    return ranked.reverse ? above_body<true>(logits, n, ranked.logit) : above_body<false>(logits, n, ranked.logit);
  });
}

template <typename scalar_t>
bool Tile<scalar_t>::select_gradient([[maybe_unused]] const scalar_t* logits, [[maybe_unused]] int64_t n,
                                     const LogitTransform<acc_t>& transform, const SelectCoefficients<acc_t>& c,
                                     const acc_t* class_weight, [[maybe_unused]] const scalar_t* next,
                                     [[maybe_unused]] const Destination<scalar_t>& to) {
  if (transform.softcap != acc_t(0) || !(transform.scale > acc_t(0)) || (class_weight && c.b != acc_t(0))) return false;
#ifdef SCE_X86
  if constexpr (std::is_same_v<acc_t, float>) {
    const avx512::Every<scalar_t> all{logits};
    if (instruction_set_in_use() == InstructionSet::kAvx512)
      return c.of_square != 0 ? avx512::gradient<avx512::TimesLine<true>>(all, n, transform.scale, c, next, to)
                              : avx512::gradient<avx512::TimesLine<false>>(all, n, transform.scale, c, next, to);
  }
#endif
  return false;
}

template <typename scalar_t>
void Tile<scalar_t>::transform(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, acc_t* z,
                               acc_t* slopes) {
  with_instruction_set([&](auto set)
                           SCE_INLINE { transform_into<decltype(set)::value>(logits, n, transform, z, slopes); });
}

template <typename scalar_t>
void Tile<scalar_t>::derivative(const acc_t* z, int64_t n, const SelectCoefficients<acc_t>& coefficients,
                                const acc_t* class_weight, const uint32_t* kept, acc_t* derivative) {
  if constexpr (!std::is_same_v<scalar_t, acc_t>)
    return Tile<acc_t>::derivative(z, n, coefficients, class_weight, kept, derivative);
  with_instruction_set([&](auto) SCE_INLINE { derivative_body(z, n, coefficients, class_weight, kept, derivative); });
}

template <typename scalar_t>
void Tile<scalar_t>::chain(const scalar_t* logits, const acc_t* slopes, const acc_t* derivative, int64_t n,
                           const LogitTransform<acc_t>& transform, acc_t* of_scale, acc_t common,
                           const Destination<scalar_t>& to) {
  with_instruction_set([&](auto set) SCE_INLINE {
    chain_body<decltype(set)::value>(logits, slopes, derivative, n, transform, of_scale, common, to);
  });
}

template struct Tile<float>;
template struct Tile<double>;
template struct Tile<Half>;
template struct Tile<BFloat16>;

}  // namespace cpu
}  // namespace sparse_ce
