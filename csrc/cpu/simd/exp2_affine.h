// exp2_affine.h - plain logits, those without a softcap whose scale is above 0, have exponentials that are powers of
// two of a line: exp(scale x - reference) = 2^(slope x + offset), one multiplication and addition a logit.
#pragma once

#include "../../core/math.h"
#include "../instruction_set.h"

#include <cmath>

namespace sparse_ce {
namespace cpu {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// tanh(x) = x + x s P(s) with s = x^2, for |x| up to kNearZero: the terms of P, a fit of relative error 7e-8.
constexpr float kTangent[] = {-0.33332866f, 0.13322766f, -0.053176314f, 0.01919076f, -0.0044108839f};
constexpr float kNearZero = 0.8f;

// Beyond this a logit's product with log2(e) leaves too few digits for the fraction.
constexpr float kLargest = 1 << 20;

// exp(scale x - reference) as 2^(slope x + offset). Rounding the two is the same factor near 1 for every x.
struct Line {
  float slope, offset;

  SCE_HD Line(float scale, float reference) : slope(scale * kLog2e), offset(-reference * kLog2e) {}

  // The exponent of the logit x whose probability is 1, to all its digits.
  SCE_HD double where_one(float lse, float lse_residual, float scale) const {
    return (static_cast<double>(lse) + lse_residual) / scale * slope + offset;
  }
};

}  // namespace cpu
}  // namespace sparse_ce
