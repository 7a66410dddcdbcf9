// tile.h - the two loops over logits that take the CPU's time, for every instruction set.
#pragma once

#include "../select.h"
#include "instruction_set.h"

namespace sparse_ce {
namespace cpu {

// Columns that are converted at a time: few enough that the next ones arrive from memory while these are worked on.
constexpr int64_t kTile = 1024;

// Columns of a span, the least part of a row that a thread takes. The result depends on it, not on the threads. While
// backward writes one span, the next one arrives in the second cache, which has to hold both and a gradient.
constexpr int64_t kSpan = 32 * kTile;

// Logits without a softcap, converted and scaled where they are used.
template <typename scalar_t>
struct Scaled {
  const scalar_t* logits;
  acc_type<scalar_t> scale;
  SCE_HD acc_type<scalar_t> operator[](int64_t i) const { return scale * to_acc(logits[i]); }
};

// What is done with n <= kSpan logits, for the instruction set in use; class_weight (n,) may be null.
template <typename scalar_t>
struct Tile {
  using acc_t = acc_type<scalar_t>;

  // Statistics, added to those of `before`; with `weighted` also those of label smoothing. `next`: the logits that will
  // be worked on after these.
  static RowStats<acc_t> stats(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                               const acc_t* class_weight, const scalar_t* next, RowStats<acc_t> before = {});
  // The gradient as if none had an entry; it may be the logits.
  static void gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                       const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight, const scalar_t* next,
                       scalar_t* gradient);
  // The gradient at logits that have entries of the given summed weights. In place of the logits `z`, which are
  // transformed but not yet rounded to storage.
  static void entries(acc_t* z, int64_t n, const LogitTransform<acc_t>& transform,
                      const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                      const acc_t* target_weight);

  // For select, n <= kTile. z of the logits.
  static void transform(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, acc_t* z);
  // Adds z to `stats`, all but its total.
  static void push(const acc_t* z, int64_t n, bool weighted, const acc_t* class_weight, SelectStats<acc_t>& stats);
  static acc_t total(const acc_t* z, int64_t n);
  // The first of the largest, -1 where none is above `above`.
  static int64_t argmax(const acc_t* z, int64_t n, acc_t above);
  // dl/dz as if none had an entry.
  static void derivative(const acc_t* z, int64_t n, const SelectCoefficients<acc_t>& coefficients,
                         const acc_t* class_weight, acc_t* derivative);
  // The gradient from it, and, where `of_scale` is there, what it adds to dl/ds; it may be the logits.
  static void chain(const scalar_t* logits, const acc_t* z, const acc_t* derivative, int64_t n,
                    const LogitTransform<acc_t>& transform, acc_t* of_scale, scalar_t* gradient);
};

}  // namespace cpu
}  // namespace sparse_ce
