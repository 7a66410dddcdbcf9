// tile.h - the two loops over logits that take the CPU's time, for every instruction set.
#pragma once

#include "../../ops/select.h"
#include "../instruction_set.h"
#include "../memory/nontemporal.h"

namespace sparse_ce {
namespace cpu {

// Columns that are converted at a time: few enough that the next ones arrive from memory while these are worked on.
constexpr int64_t kTile = 1024;

// Columns of a span, the least part of a row that a thread takes. The result depends on it, not on the threads. While
// backward writes one span, the next one arrives in the second cache, which has to hold both and a gradient.
constexpr int64_t kSpan = 32 * kTile;

// Columns whose exponentials are relative to one maximum.
constexpr int64_t kPowers = 2 * kTile;
constexpr int64_t kSpare = 31;

// Of a row, or what follows in it: exponentials and, under a softcap, dz/d(scale x) of each logit, (n,) or null, and
// the maxima that they are relative to, (n / kPowers,) rounded up. Where logits have 16 bits the exponentials of a tile
// are in an order of its own, and behind those of a row there is memory for kSpare more.
template <typename acc_t>
struct Powers {
  acc_t *powers = nullptr, *slopes = nullptr, *maxima = nullptr;

  SCE_HD acc_t* powers_at(int64_t column) const { return powers ? powers + column : nullptr; }
  SCE_HD acc_t* slopes_at(int64_t column) const { return slopes ? slopes + column : nullptr; }
  // `column`: a multiple of kPowers.
  SCE_HD Powers from(int64_t column) const {
    return {powers_at(column), slopes_at(column), maxima ? maxima + column / kPowers : nullptr};
  }
};

// Of SelectStats, beside maximum and sum: the spread, the total, the argmax and what label smoothing needs.
struct Wanted {
  bool spread, total, argmax, weighted;
};

// What is done with n <= kSpan logits, for the instruction set in use; class_weight (n,) may be null.
template <typename scalar_t>
struct Tile {
  using acc_t = acc_type<scalar_t>;

  // Whether the exponentials of logits that are transformed so are worth keeping, from `stats` to `gradient`.
  static bool keeps(const LogitTransform<acc_t>& transform);
  // Statistics; with `weighted` also those of label smoothing. `next`: the logits that will be worked on after these.
  // `kept` receives the exponentials.
  static RowStats<acc_t> stats(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                               const acc_t* class_weight, const scalar_t* next, const Powers<acc_t>& kept = {});
  // The gradient as if none had an entry; it may be the logits. From what was kept it has the same bits.
  static void gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                       const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight, const scalar_t* next,
                       const Destination<scalar_t>& to);
  static void gradient(const Powers<acc_t>& kept, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                       const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                       const Destination<scalar_t>& to);
  // The gradient at logits that have entries of the given summed weights, in place of the logits; not yet rounded to
  // storage.
  static void entries(acc_t* x, int64_t n, const LogitTransform<acc_t>& transform,
                      const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                      const acc_t* target_weight);

  // For select: statistics of what is wanted. `kept`, (n / 32,) or null, has a bit for each logit; one without it
  // counts in the total alone. argmax: from 0 on.
  static SelectStats<acc_t> select_stats(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                                         const Wanted& wanted, const acc_t* class_weight, const uint32_t* kept,
                                         const scalar_t* next);
  // Its gradient, and nothing for the scale, as if none had an entry; false, with nothing written, where there is no
  // loop for it.
  static bool select_gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                              const SelectCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                              const scalar_t* next, const Destination<scalar_t>& to);

  // For select by tiles, n <= kTile. z of the logits and, unless it is null, dz/d(scale x) under a softcap.
  static void transform(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, acc_t* z,
                        acc_t* slopes);
  // dl/dz as if none had an entry, 0 where one is not among the `kept`.
  static void derivative(const acc_t* z, int64_t n, const SelectCoefficients<acc_t>& coefficients,
                         const acc_t* class_weight, const uint32_t* kept, acc_t* derivative);
  // The gradient from it, which may be the logits, and, where `of_scale` is there, what it adds to dl/ds, relative to
  // a `common` logit. `slopes`: dz/d(scale x) under a softcap, null without.
  static void chain(const scalar_t* logits, const acc_t* slopes, const acc_t* derivative, int64_t n,
                    const LogitTransform<acc_t>& transform, acc_t* of_scale, acc_t common,
                    const Destination<scalar_t>& to);
};

}  // namespace cpu
}  // namespace sparse_ce
