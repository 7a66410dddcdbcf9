// exp2_affine.h - Defines the exponentials of plain logits, which have no softcap and a positive scale, as powers of
// two of a linear function: exp(scale x - reference) = 2^(slope factor x + offset). This takes one multiply-add per
// logit, and for most scales a product.
#pragma once

#include "../../core/math.h"
#include "../instruction_set.h"

#include <cmath>

namespace sparse_ce {
namespace cpu {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// tanh(x) = x + x s P(s) with s = x^2, for |x| up to kNearZero. P is a fit with relative error 7e-8.
constexpr float kTanh[] = {-0.33332866f, 0.13322766f, -0.053176314f, 0.01919076f, -0.0044108839f};
constexpr float kNearZero = 0.8f;

// Beyond this limit, the product of a logit and log2(e) has too few digits left for the fraction.
constexpr float kLargest = 1 << 20;

// Represents exp(scale x - reference) as 2^(slope factor x + offset). Rounding the slope and the offset changes the
// result by a factor close to 1, which is the same for every x. For powers of two, whose products are exact, the factor
// is 1. Otherwise it is the scale: products are then rounded like those of the entries and of the other loops.
struct Line {
  float factor, slope, offset;

  SCE_HD Line(float scale, float reference)
      : factor((bit_cast<uint32_t>(scale) & 0x7fffff) == 0 ? 1.0f : scale), slope(scale / factor * kLog2e),
        offset(-reference * kLog2e) {}

  // Loops are compiled with and without the product.
  SCE_HD bool multiplies() const { return factor != 1; }
  // Returns the exponent of probability 1, to full precision.
  SCE_HD double where_one(float lse, float lse_residual) const {
    return (static_cast<double>(lse) + lse_residual) * kLog2e + offset;
  }
};

}  // namespace cpu
}  // namespace sparse_ce
