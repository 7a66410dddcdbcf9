// strided_streams.h - Implements the loops for so many columns that nothing can be stored. Logits are read in place,
// and nothing is written in between. This takes half the time of the loops that copy to the L2 cache.
//
// The rows of a block are adjacent in memory, the columns of a row are not. So a vector holds the same column of
// several rows. Each number of a row is in an array over the rows: a reference, a maximum, a sum. A few columns at a
// time are added to all rows (stream_columns), and in backward differentiated for all rows (differentiate_columns).
#pragma once

#include "avx512_streams.h"

namespace sparse_ce {
namespace cpu {

// Logits may exceed the reference of their sum by this much without a loss of digits.
constexpr int kNear = 8;

// Calls use(x, step, first), where x[k * step + i] is the logit of column c + k and row first + i < first + m, for some
// rows at a time. Prefetches later columns meanwhile.
template <InstructionSet set, int count, typename scalar_t, typename use_t>
SCE_HD void for_some_rows(const BlockColumns<scalar_t>& columns, int64_t c, const use_t& use) {
  using acc_t = acc_type<scalar_t>;
  for (int64_t first = 0; first < columns.rows; first += kSome) {
    const int64_t m = columns.rows - first < kSome ? columns.rows - first : kSome;
    const scalar_t* x = columns.at(c) + first * columns.apart;
    int64_t step = columns.step;
    alignas(64) scalar_t together[count * kSome];
    if (columns.apart == 1) {
      prefetch_columns(columns, c, c + count, first, m);
    } else {
      for (int k = 0; k < count; ++k)
        for (int64_t i = 0; i < m; ++i) together[k * kSome + i] = x[k * step + i * columns.apart];
      x = together, step = kSome;
    }
    if constexpr (std::is_same_v<scalar_t, Half>) {
      alignas(64) acc_t wide[count * kSome];
      for (int k = 0; k < count; ++k) widened<set>(x + k * step, m, wide + k * kSome);
      use(wide, kSome, first, m);
    } else {
      use(x, step, first, m);
    }
  }
}

// Adds the columns to the maxima of the rows and to the sums of the exponentials below these maxima, relative to
// `reference`: of a logit and the maximum so far, the lower one is added.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void push_stream(const BlockColumns<scalar_t>& columns, const LossOptions& options, bool scaled,
                        const acc_t* scale, const acc_t* reference, acc_t* max, acc_t* sum) {
  const bool singly = caps_singly(options, scaled);
  for_columns<set>(columns.begin, columns.end, singly, [&](auto counted, int64_t c) SCE_INLINE {
    constexpr int kCount = decltype(counted)::value;
    for_some_rows<set, kCount>(columns, c, [&](const auto* x, int64_t step, int64_t first, int64_t m) SCE_INLINE {
      const auto add = [&](const auto& z_of) SCE_INLINE {
        SCE_SIMD()
        for (int64_t i = 0; i < m; ++i) {
          acc_t high = max[first + i], added = sum[first + i];
          const acc_t base = reference[first + i];
          SCE_EACH_COLUMN(k, kCount) {
            const acc_t z = z_of(k, i);
            const acc_t low = z > high ? high : z;  // NaN does not become the maximum, but enters the sum
            high = z > high ? z : high;
            added += exponential_below<degree_for<scalar_t>>(low - base);
          }
          max[first + i] = high, sum[first + i] = added;
        }
      };
      if (caps_columns(options, scaled)) {
        alignas(64) acc_t z[kCount * kSome];
        cap_columns<set, false>(kCount, x, step, m, options, z, kSome, static_cast<acc_t*>(nullptr));
        return add([&](int k, int64_t i) SCE_INLINE { return z[k * kSome + i]; });
      }
      with_transform<kCount>(options, scaled, scale + first, [&](const auto& transform) SCE_INLINE {
        add([&](int k, int64_t i) SCE_INLINE { return transform(to_acc(x[k * step + i]), i); });
      });
    });
  });
}

// Adds o (z - reference) of the columns to `smoothed` and returns the sum of o.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD acc_t smooth_stream(const BlockColumns<scalar_t>& columns, const LossOptions& options, bool scaled,
                           const acc_t* scale, const acc_t* class_weight, const acc_t* reference, acc_t* smoothed) {
  acc_t weight = 0;
  for (int64_t c = columns.begin; c < columns.end; ++c) {
    const acc_t o = class_weight ? class_weight[c] : acc_t(1);
    weight += o;
    if (o == acc_t(0)) continue;  // a class of weight 0 adds 0 even at -inf
    for_some_rows<set, 1>(columns, c, [&](const auto* x, int64_t, int64_t first, int64_t m) SCE_INLINE {
      if (caps_columns(options, scaled)) {
        alignas(64) acc_t z[kSome];
        cap_columns<set, false>(1, x, 0, m, options, z, kSome, static_cast<acc_t*>(nullptr));
        SCE_SIMD()
        for (int64_t i = 0; i < m; ++i) smoothed[first + i] += o * (z[i] - reference[first + i]);
        return;
      }
      with_transform<1>(options, scaled, scale + first, [&](const auto& transform) SCE_INLINE {
        SCE_SIMD()
        for (int64_t i = 0; i < m; ++i) smoothed[first + i] += o * (transform(to_acc(x[i]), i) - reference[first + i]);
      });
    });
  }
  return weight;
}

// Returns true if avx512_streams.h implements the loops for these logits.
template <InstructionSet set, typename scalar_t>
SCE_HD bool quick(const LossOptions& options, int64_t apart) {
  return set == InstructionSet::kAvx512 && std::is_same_v<acc_type<scalar_t>, float> && options.softcap == 0 &&
         apart == 1;
}

// Adds the statistics of at most kColumns columns to those of the rows. class_weight covers all columns, or is null.
// Sums are relative to the previous maximum of each row. If the columns far exceed it, they are recomputed relative to
// their own maximum, which leaves the bits of the other rows unchanged.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void stream_columns(const BlockColumns<scalar_t>& columns, const LossOptions& options, bool scaled,
                           const acc_t* class_weight, BlockRows<acc_t>& rows) {
  alignas(64) acc_t reference[kMostRows], max[kMostRows], sum[kMostRows], smoothed[kMostRows], power[kMostRows];
  const int64_t n = columns.rows;
  const bool is_quick = quick<set, scalar_t>(options, columns.apart);
  // 1. The maximum of each row's columns, and the sum of what is below it, relative to the reference. If a maximum
  //    exceeds its reference by far, the sum has lost digits, and the columns are read again.
  for (int64_t i = 0; i < n; ++i) reference[i] = rows.max[i];
  for (bool again = true; again;) {
    for (int64_t i = 0; i < n; ++i) {
      max[i] = -acc_t(INFINITY);
      sum[i] = acc_t(0);
    }
    if (!is_quick) push_stream<set>(columns, options, scaled, rows.scale, reference, max, sum);
#ifdef SCE_X86
    if constexpr (set == InstructionSet::kAvx512 && std::is_same_v<acc_t, float>) {
      if (is_quick)
        multiplies(options, scaled) ? avx512::push_columns<true>(columns, options, rows.scale, reference, max, sum)
                                    : avx512::push_columns<false>(columns, options, rows.scale, reference, max, sum);
    }
#endif
    again = false;
    for (int64_t i = 0; i < n; ++i) {
      if (!(max[i] > reference[i] + acc_t(kNear))) continue;
      reference[i] = max[i];
      again = true;
    }
  }
  // 2. The weighted sum for label smoothing.
  for (int64_t i = 0; i < n; ++i) smoothed[i] = acc_t(0);
  const acc_t weight = options.label_smoothing == 0 ? acc_t(0)
                                                    : smooth_stream<set>(columns, options, scaled, rows.scale,
                                                                         class_weight, reference, smoothed);
  // 3. The merge with the columns before. It uses the exponential of the maximum exactly as it was added: a row with
  //    all its mass at one class then sums to 1.
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) power[i] = exponential_below<degree_for<scalar_t>>(max[i] - reference[i]);
#ifdef SCE_X86
  if constexpr (set == InstructionSet::kAvx512 && std::is_same_v<acc_t, float>) {
    if (is_quick) avx512::exponentials(n, max, reference, power);
  }
#endif
  const acc_t before = rows.weight;
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) {
    RowStats<acc_t> stats{rows.max[i], rows.rest[i], rows.weighted[i], before};
    // Unless there is a new maximum, the reference is the old one, and that of the columns is one of the other logits.
    const bool is_new = max[i] > rows.max[i];
    const acc_t to = is_new ? max[i] : reference[i];
    stats.merge({to, is_new ? sum[i] / power[i] : acc_t(-1), smoothed[i] - weight * (to - reference[i]), weight});
    stats.rest += is_new ? acc_t(0) : sum[i] + power[i];
    rows.max[i] = stats.max;
    rows.rest[i] = stats.rest;
    rows.weighted[i] = stats.weighted;
  }
  rows.weight += weight;
}

// Stores term(k, i) of n <= kSome rows and `count` columns, rounded, to `out`, whose columns have stride `apart`.
template <InstructionSet set, int count, typename scalar_t, typename term_t>
SCE_HD void narrow_columns(int64_t n, const term_t& term, scalar_t* out, int64_t apart) {
  if constexpr (std::is_same_v<scalar_t, Half>) {
    alignas(64) acc_type<scalar_t> buffer[kSome];
    for (int k = 0; k < count; ++k)
      narrow<set>(n, [&](int64_t i) SCE_INLINE { return term(k, i); }, buffer, out + k * apart);
  } else {
    SCE_SIMD()
    for (int64_t i = 0; i < n; ++i) {
      SCE_EACH_COLUMN(k, count) round_to(term(k, i), out[k * apart + i]);
    }
  }
}

// Writes the gradient as if no column had an entry. It may overwrite the logits. Only the loops of avx512_streams.h use
// non-temporal stores; with AVX2, copies took a tenth longer. The options are passed by value: a float64 gradient could
// otherwise alias them, and they would be reloaded for each element.
template <InstructionSet set, typename scalar_t, typename acc_t>
SCE_HD void differentiate_columns(const BlockColumns<scalar_t>& columns, LossOptions options, bool scaled,
                                  const acc_t* class_weight, const BlockRows<acc_t>& rows,
                                  const Destination<scalar_t>& to, int64_t step, int64_t apart) {
#ifdef SCE_X86
  if constexpr (set == InstructionSet::kAvx512 && std::is_same_v<acc_t, float>) {
    if (quick<set, scalar_t>(options, columns.apart) && apart == 1)
      return multiplies(options, scaled)
                 ? avx512::differentiate_columns<true>(columns, options, class_weight, rows, to, step)
                 : avx512::differentiate_columns<false>(columns, options, class_weight, rows, to, step);
  }
#endif
  const bool smoothed = options.label_smoothing != 0;
  bool all_active = true;
  for (int64_t i = 0; i < columns.rows; ++i) all_active &= rows.active[i] != acc_t(0);
  const bool singly = caps_singly(options, scaled);
  for_columns<set>(columns.begin, columns.end, singly, [&](auto counted, int64_t c) SCE_INLINE {
    constexpr int kCount = decltype(counted)::value;
    acc_t o[kCount];
    SCE_EACH_COLUMN(k, kCount) o[k] = !smoothed ? acc_t(0) : class_weight ? class_weight[c + k] : acc_t(1);
    for_some_rows<set, kCount>(columns, c, [&](const auto* x, int64_t apart_x, int64_t first, int64_t m) SCE_INLINE {
      alignas(64) scalar_t together[kCount * kSome];
      scalar_t* const gradient = to.gradient + c * step + first * apart;
      scalar_t* const out = apart == 1 ? gradient : together;
      const int64_t apart_out = apart == 1 ? step : kSome;
      const auto of_row = [&](int64_t i) SCE_INLINE {
        return GradientCoefficients<acc_t>(rows.a[i], rows.b[i], acc_t(0), rows.lse[i], rows.lse_residual[i]);
      };
      const auto of_scale = [&](int64_t i) SCE_INLINE { return LogitTransform<acc_t>(options, rows.scale[i]); };
      const auto active = [&](int64_t i, acc_t x) SCE_INLINE { return rows.active[i] != acc_t(0) ? x : acc_t(0); };
      const auto write = [&](const auto& term) SCE_INLINE { narrow_columns<set, kCount>(m, term, out, apart_out); };
      const auto capped = [&](const auto& with_slope) SCE_INLINE {
        write([&](int k, int64_t i) SCE_INLINE {
          const int64_t row = first + i;
          const auto t = with_slope(k, i);
          return active(row, of_row(row).at(t.z, o[k]) * (of_scale(row).scale * t.of_cap));
        });
      };
      if (caps_columns(options, scaled)) {
        using WithSlope = typename LogitTransform<acc_t>::WithSlope;
        alignas(64) acc_t z[kCount * kSome], slopes[kCount * kSome];
        cap_columns<set, true>(kCount, x, apart_x, m, options, z, kSome, slopes);
        capped([&](int k, int64_t i) SCE_INLINE { return WithSlope{z[k * kSome + i], slopes[k * kSome + i]}; });
      } else if (kCount == 1 && singly) {
        capped([&](int, int64_t i) SCE_INLINE { return of_scale(first + i).capped(to_acc(x[i])); });
      } else {
        with_scale(options, scaled, rows.scale + first, [&](const auto& transform) SCE_INLINE {
          const auto z_of = [&](int k, int64_t i) SCE_INLINE { return transform(to_acc(x[k * apart_x + i]), i); };
          if (!smoothed && all_active)
            write([&](int k, int64_t i)
                      SCE_INLINE { return of_row(first + i).at(z_of(k, i)) * of_scale(first + i).scale; });
          else
            write([&](int k, int64_t i) SCE_INLINE {
              return active(first + i, of_row(first + i).at(z_of(k, i), o[k]) * of_scale(first + i).scale);
            });
        });
      }
      for (int k = 0; apart != 1 && k < kCount; ++k)
        for (int64_t i = 0; i < m; ++i) gradient[k * step + i * apart] = together[k * kSome + i];
    });
  });
}

}  // namespace cpu
}  // namespace sparse_ce
