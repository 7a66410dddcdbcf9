// tile.h - Declares the loops over logits that take most of the CPU's time, for every instruction set.
#pragma once

#include "../../ops/select.h"
#include "../instruction_set.h"
#include "../memory/nontemporal.h"

namespace sparse_ce {
namespace cpu {

// Number of columns that are converted at a time: small enough to load the next tile while this one is processed.
constexpr int64_t kTile = 1024;

// Number of columns of a span, the smallest part of a row that a thread processes. Results depend on it, but not on the
// threads. While backward writes a span, the next one is loaded into the L2 cache, which must hold both and a gradient.
constexpr int64_t kSpan = 32 * kTile;

// Number of columns whose exponentials are relative to one maximum.
constexpr int64_t kExpTile = 2 * kTile;
constexpr int64_t kSpare = 31;

// Points to the stored exponentials of a row: `exps` and, under a softcap, `slopes` dz/d(scale x), both (n,) or null,
// and `maxima` that they are relative to, (n / kExpTile,) rounded up. With 16-bit logits the exponentials of a tile are
// permuted, and those of a row are followed by memory for kSpare more.
template <typename acc_t>
struct Exps {
  acc_t *exps = nullptr, *slopes = nullptr, *maxima = nullptr;

  SCE_HD acc_t* exps_at(int64_t column) const { return exps ? exps + column : nullptr; }
  SCE_HD acc_t* slopes_at(int64_t column) const { return slopes ? slopes + column : nullptr; }
  // `column` must be a multiple of kExpTile.
  SCE_HD Exps from(int64_t column) const {
    return {exps_at(column), slopes_at(column), maxima ? maxima + column / kExpTile : nullptr};
  }
};

// Selects the fields of SelectStats, in addition to maximum and sum. `weighted` are those of label smoothing.
struct RequestedStats {
  bool spread, squares, total, argmax, weighted;
};

// Processes n <= kSpan logits with the instruction set in use. class_weight (n,) may be null.
template <typename scalar_t>
struct Tile {
  using acc_t = acc_type<scalar_t>;

  // Returns true if storing the exponentials between `stats` and `gradient` pays off for this transform.
  static bool keeps(const LogitTransform<acc_t>& transform);
  // Returns statistics, with `weighted` including those of label smoothing. `next` are the logits that are processed
  // next. `kept` receives the exponentials.
  static RowStats<acc_t> stats(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                               const acc_t* class_weight, const scalar_t* next, const Exps<acc_t>& stored = {});
  // Writes the gradient as if no logit had an entry; it may overwrite the logits. With stored exponentials the gradient
  // has the same bits.
  static void gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                       const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight, const scalar_t* next,
                       const Destination<scalar_t>& to);
  static void gradient(const Exps<acc_t>& stored, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                       const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                       const Destination<scalar_t>& to);
  // Replaces logits by their gradient if they have entries, whose summed weights are given. `elsewhere` is the weight
  // of the row's other entries. The result is not rounded to storage.
  static void entries(acc_t* x, int64_t n, const LogitTransform<acc_t>& transform,
                      const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                      const acc_t* target_weight, double elsewhere);

  // Returns the requested statistics for select, and if `ranked` is not null, the number of logits above it; NaN is not
  // counted. `kept` (n / 32,), or null, has a bit for each logit; a logit whose bit is not set is only included in the
  // total and counted. argmax counts from 0.
  static SelectStats<acc_t> select_stats(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                                         const RequestedStats& requested, const acc_t* class_weight,
                                         const uint32_t* kept, const Ranked<acc_t>* ranked, const scalar_t* next);
  // Returns the first logit whose transform is at least `least`, or -1. `n` has no limit.
  static int64_t first_from(acc_t least, const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform);
  // Returns the number of logits that are above the ranked one; NaN is. `n` has no limit.
  static int64_t above(const scalar_t* logits, int64_t n, const Ranked<acc_t>& ranked);
  // Writes select's gradient as if no logit had an entry, without that of the scale. Returns false, and writes nothing,
  // if there is no loop for it.
  static bool select_gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                              const SelectCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                              const scalar_t* next, const Destination<scalar_t>& to);

  // Computes z for select, n <= kTile, and under a softcap dz/d(scale x) unless `slopes` is null.
  static void transform(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, acc_t* z,
                        acc_t* slopes);
  // Returns the same z of one logit.
  static acc_t transformed(acc_t logit, const LogitTransform<acc_t>& of_logit) {
    if (of_logit.softcap == acc_t(0)) return of_logit(logit);
    Tile<acc_t>::transform(&logit, 1, of_logit, &logit, nullptr);
    return logit;
  }
  // Computes dl/dz as if no logit had an entry. It is 0 for logits that are not in `kept`.
  static void derivative(const acc_t* z, int64_t n, const SelectCoefficients<acc_t>& coefficients,
                         const acc_t* class_weight, const uint32_t* kept, acc_t* derivative);
  // Writes the gradient from dl/dz, possibly over the logits. Unless `of_scale` is null, adds the contribution to dl/ds
  // relative to a `common` logit. `slopes` are dz/d(scale x) under a softcap and null otherwise.
  static void chain(const scalar_t* logits, const acc_t* slopes, const acc_t* derivative, int64_t n,
                    const LogitTransform<acc_t>& transform, acc_t* of_scale, acc_t common,
                    const Destination<scalar_t>& to);
};

// Returns z of a tile: the logits if they are unchanged, otherwise `buffer`. See Tile::transform for `slopes`.
template <typename scalar_t, typename acc_t>
const acc_t* transformed(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, acc_t* buffer,
                         acc_t* slopes) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    if (transform.identity()) return logits;
  }
  Tile<scalar_t>::transform(logits, n, transform, buffer, slopes);
  return buffer;
}

}  // namespace cpu
}  // namespace sparse_ce
