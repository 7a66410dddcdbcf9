// folded.cuh - Computes exponentials and gradients of logits in the fewest instructions.
#pragma once

#include "../../core/math.h"

namespace sparse_ce {

// Computes exp(z - of), up to a common factor, with one multiply_add and one power of 2. If `of` is so large that the
// factor could overflow, any two different logits are so far apart that one power is 0.
template <typename acc_t>
struct Folded {
  static constexpr acc_t kFar = sizeof(acc_t) == sizeof(double) ? acc_t(0x1p62) : acc_t(0x1p29);
  acc_t by, more;

  SCE_HD explicit Folded(acc_t of) : by(std::fabs(of) < kFar ? kLog2e<acc_t> : acc_t(1)), more(of * -by) {}
  SCE_HD acc_t exponent(acc_t z) const { return multiply_add(z, by, more); }
  SCE_HD acc_t power(acc_t z) const { return power_of_2(exponent(z)); }
};

// Computes a q_j with the same few instructions.
template <typename acc_t>
struct FoldedGradient {
  Folded<acc_t> below;
  acc_t a;

  SCE_HD explicit FoldedGradient(const GradientCoefficients<acc_t>& c)
      : below(c.lse), a(c.a * power_of_2(-(below.exponent(c.lse) + c.lse_residual * kLog2e<acc_t>))) {}
  SCE_HD acc_t at(acc_t z) const { return a * below.power(z); }
};

// Computes the bases of several logits at once.
template <typename acc_t, int n>
SCE_HD void to_bases(const LogitTransform<acc_t>& transform, acc_t (&x)[n]) {
  if (transform.softcap == acc_t(0)) return;
#pragma unroll
  for (acc_t& of_one : x) of_one = transform.scale_per_cap * of_one;
  tanh_of_each(x);
}

// Computes dloss/dx of a class without entries in the fewest instructions: (a q_j - b o_j) dz_j/dx_j.
template <typename acc_t>
struct DenseGradient {
  const LogitTransform<acc_t> transform;
  const FoldedGradient<acc_t> of_q;
  acc_t a, b;  // the coefficients times the scale

  SCE_HD DenseGradient(const GradientCoefficients<acc_t>& c, const LogitTransform<acc_t>& transform)
      : transform(transform), of_q(c), a(of_q.a * transform.scale), b(c.b * transform.scale) {}

  // Returns the gradient from the base v_j.
  SCE_HD acc_t at(acc_t v, acc_t class_weight) const {
    const acc_t of_z = multiply_add(a, of_q.below.power(transform.factor() * v), -(b * class_weight));
    return transform.softcap == acc_t(0) ? of_z : of_z * multiply_add(-v, v, acc_t(1));
  }
};

}  // namespace sparse_ce
