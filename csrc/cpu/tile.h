// tile.h - the two loops over logits that take the CPU's time, for every instruction set.
#pragma once

#include "../math.h"
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

  // Statistics; with `weighted` also those of label smoothing. `next`: the logits that will be worked on after these.
  static RowStats<acc_t> stats(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                               const acc_t* class_weight, const scalar_t* next);
  // The gradient as if none had an entry; it may be the logits.
  static void gradient(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                       const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight, const scalar_t* next,
                       scalar_t* gradient);
  // The gradient at logits that have entries of the given summed weights. In place of the logits `z`, which are
  // transformed but not yet rounded to storage.
  static void entries(acc_t* z, int64_t n, const LogitTransform<acc_t>& transform,
                      const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight,
                      const acc_t* target_weight);
};

}  // namespace cpu
}  // namespace sparse_ce
