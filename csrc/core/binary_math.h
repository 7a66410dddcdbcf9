// binary_math.h - Implements the formulas of binary cross entropy for both CPU and CUDA.
//
// For each row, with logits z_j = scale x_j + shift, summed targets t_j (0 without an entry), class weights w_j,
// weights p_j of positives, smoothing e, and grad_output g:
//
//   T_j  = (1-e) t_j + e/2
//   loss = sum_j a_j F(z_j) + b_j G(z_j),   dloss/dz_j = g (a_j F'(z_j) + b_j G'(z_j)),   a_j = w_j (1 - T_j),
//   b_j = w_j p_j T_j
//
// F is the loss of a negative class and G that of a positive one. With q = sigmoid(-z), r = sigmoid(z), exponents c+
// and c- (gamma), and a clip m:
//
//   F = max(r - m, 0)^c- (-log(min(q + m, 1))),   G = q^c+ (-log r)
//
// Without exponents and clip, F = softplus(z) and G = softplus(-z). The other gradients are
// dloss/dx_j = scale dloss/dz_j and dloss/dt_j = g (1-e) w_j (p_j G(z_j) - F(z_j)).
#pragma once

#include "divergence_math.h"

namespace sparse_ce {

struct BinaryOptions {
  double label_smoothing = 0, gamma_positive = 0, gamma_negative = 0, clip = 0;
};

// Selects the loss of a class: none, exponents, or exponents and a clip.
enum class BinaryKind : int32_t { kPlain, kFocal, kClipped };
inline BinaryKind binary_kind(const BinaryOptions& options) {
  if (options.clip != 0) return BinaryKind::kClipped;
  const bool focal = options.gamma_positive != 0 || options.gamma_negative != 0;
  return focal ? BinaryKind::kFocal : BinaryKind::kPlain;
}

// Returns exp(x) for x <= 0. In float32 on CUDA, the rounding error of x log2(e), which grows with |x|, is corrected.
#ifdef SCE_CUDA
SCE_HD float small_exponential(float x) {
  const float power = x * kLog2e<float>, e = power_of_2(power);
  const float lost = multiply_add(power, 1.90465430e-9f, multiply_add(power, -0.693147182f, x));  // x - power ln2
  return e == 0.0f ? e : multiply_add(e, lost, e);
}
SCE_HD double small_exponential(double x) { return exp(x); }
SCE_HD double reciprocal(double x) { return 1.0 / x; }
#else
template <typename acc_t>
SCE_HD acc_t small_exponential(acc_t x) {
  return exponential(x);
}
template <typename acc_t>
SCE_HD acc_t reciprocal(acc_t x) {
  return acc_t(1) / x;
}
template <typename acc_t>
SCE_HD acc_t multiply_add(acc_t a, acc_t b, acc_t c) {
  return a * b + c;
}
#endif

// Returns log(1 + u) for 0 <= u <= 1, by a minimax fit of log(1 + u) / u. The relative error is at most 2e-7, also for
// small u, whose digits are lost if 1 + u is rounded first.
SCE_HD float log_of_1_plus_small(float u) {
  constexpr float kFit[] = {1.0f,        -0.49999902f, 0.33329964f,  -0.24954133f, 0.19675931f,
                            -0.1530557f, 0.10603617f,  -0.05695916f, 0.019851264f, -0.003243981f};
  const float square = u * u;
  float p = multiply_add(kFit[9], u, kFit[8]);
#ifdef SCE_CUDA
#pragma unroll
#else
#pragma GCC unroll 4
#endif
  for (int k = 6; k >= 0; k -= 2) p = multiply_add(p, square, multiply_add(kFit[k + 1], u, kFit[k]));
  return p * u;
}
// Computes 2 atanh(s) with s = u / (2 + u); the fit of atanh(s) / s in s^2 has a relative error of 1e-18.
SCE_HD double log_of_1_plus_small(double u) {
  constexpr double kFit[] = {1.0000000000000000012,   0.33333333333333074797,  0.20000000000092873734,
                             0.14285714272727057267,  0.11111112040373836587,  0.090908704162524022551,
                             0.076933070211520038808, 0.066501870163373121685, 0.060550843640346088273,
                             0.041622532559304102879, 0.085220817813906990645};
  const double s = u / (2.0 + u), square = s * s;
  double p = kFit[10];
#ifdef SCE_CUDA
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int k = 9; k >= 0; --k) p = multiply_add(p, square, kFit[k]);
  return 2.0 * s * p;
}

// Holds the probabilities r = sigmoid(z) and q = sigmoid(-z), and -log q and -log r, each with all its digits.
template <typename acc_t>
struct Sigmoid {
  acc_t r, q, minus_log_q, minus_log_r;

  // Returns the smaller probability divided by the larger one.
  SCE_HD static acc_t lower_per_higher(acc_t z) { return small_exponential(z < acc_t(0) ? z : -z); }
  SCE_HD Sigmoid(acc_t z, acc_t u) {  // u = lower_per_higher(z)
    const bool below = z < acc_t(0);
    const acc_t size = below ? -z : z;
    const acc_t larger_one = reciprocal(acc_t(1) + u), smaller = u * larger_one, l = log_of_1_plus_small(u);
    r = below ? smaller : larger_one;
    q = below ? larger_one : smaller;
    minus_log_q = below ? l : size + l;
    minus_log_r = below ? size + l : l;
  }
};

// Holds what a class contributes if it is negative or positive, and the derivatives.
template <typename acc_t>
struct BinaryTerms {
  acc_t negative, negative_slope, positive, positive_slope;
};

// Raises x to a whole power below 8: multiplies those of x, x^2 and x^4 that the exponent's bits select. The others are
// replaced by 0 x + 1, because compilers do not vectorize selections by a constant of the loop.
template <typename acc_t>
struct WholePower {
  acc_t of_x, of_square, of_fourth;  // 1 if selected, else 0

  SCE_HD explicit WholePower(double exponent)
      : of_x(acc_t(int(exponent) & 1)), of_square(acc_t(int(exponent) >> 1 & 1)),
        of_fourth(acc_t(int(exponent) >> 2 & 1)) {}
  SCE_HD acc_t operator()(acc_t x) const {
    const acc_t one = acc_t(1), square = x * x;
    return (of_x * x + (one - of_x)) * (of_square * square + (one - of_square)) *
           (of_fourth * (square * square) + (one - of_fourth));
  }
};
// Returns true if BinaryLoss can multiply instead of exponentiating logarithms.
inline bool whole_exponents(const BinaryOptions& options) {
  const auto whole = [](double exponent) { return exponent < 8 && exponent == int(exponent); };
  return whole(options.gamma_positive) && whole(options.gamma_negative) &&
         (options.clip == 0 || options.gamma_negative > 0);
}

// Evaluates F and G. `whole` promises that whole_exponents is true.
template <BinaryKind kind, typename acc_t, bool whole = false>
struct BinaryLoss {
  acc_t gamma_positive, gamma_negative, clip;
  WholePower<acc_t> power_positive, power_negative;  // with a clip, the exponent of negatives is smaller by 1

  SCE_HD explicit BinaryLoss(const BinaryOptions& options)
      : gamma_positive(static_cast<acc_t>(options.gamma_positive)),
        gamma_negative(static_cast<acc_t>(options.gamma_negative)), clip(static_cast<acc_t>(options.clip)),
        power_positive(whole ? options.gamma_positive : 0),
        power_negative(whole ? options.gamma_negative - (kind == BinaryKind::kClipped) : 0) {}

  SCE_HD BinaryTerms<acc_t> at(acc_t z) const { return at(z, Sigmoid<acc_t>::lower_per_higher(z)); }
  // Consists of selections instead of branches, so that compilers vectorize loops of it.
  SCE_HD BinaryTerms<acc_t> at(acc_t z, acc_t lower_per_higher) const {
    const Sigmoid<acc_t> s(z, lower_per_higher);
    if constexpr (kind == BinaryKind::kPlain) {
      return {s.minus_log_q, s.r, s.minus_log_r, -s.q};
    } else {
      const acc_t of_positive =
          whole ? power_positive(s.q) : small_exponential(-gamma_positive * finite(s.minus_log_q));
      const acc_t more = gamma_positive * s.r * finite(s.minus_log_r);
      const acc_t positive = of_positive * s.minus_log_r, positive_slope = -of_positive * (more + s.q);
      if constexpr (kind == BinaryKind::kFocal) {
        const acc_t of_negative =
            whole ? power_negative(s.r) : small_exponential(-gamma_negative * finite(s.minus_log_r));
        const acc_t slope = of_negative * (gamma_negative * s.q * finite(s.minus_log_q) + s.r);
        return {of_negative * s.minus_log_q, slope, positive, positive_slope};
      } else {
        const bool above = !(s.r <= clip);  // also for NaN
        const acc_t shifted = above ? s.r - clip : acc_t(1), left = above ? s.q + clip : acc_t(1);
        const acc_t l = -log_of_normal(left);
        const acc_t less = whole ? power_negative(shifted) : acc_t(0);
        const acc_t power = whole ? less * shifted : small_exponential(gamma_negative * log_of_normal(shifted));
        const acc_t change = whole ? gamma_negative * l * less + power / left
                                   : power * ((gamma_negative * l * left + shifted) / (shifted * left));
        const acc_t slope = s.r * s.q * change;
        const acc_t nan_or_0 = s.r - s.r;  // log_of_normal may not return NaN
        return {above ? power * l + nan_or_0 : acc_t(0), above ? slope : acc_t(0), positive, positive_slope};
      }
    }
  }

 private:
  // Returns a number whose product with 0 is 0. The other digits do not matter.
  SCE_HD static acc_t finite(acc_t x) { return x < acc_t(1e30) ? x : acc_t(1e30); }
};

// Holds the factors a and b of a class.
template <typename acc_t>
struct BinaryCoefficients {
  acc_t negative, positive;

  // `target` is T, `weight` is w and `pos_weight` is p.
  SCE_HD BinaryCoefficients(acc_t target, acc_t weight, acc_t pos_weight)
      : negative(weight * (acc_t(1) - target)), positive(weight * expected(target, pos_weight)) {}

  SCE_HD acc_t loss(const BinaryTerms<acc_t>& terms) const {
    return expected(negative, terms.negative) + expected(positive, terms.positive);
  }
  SCE_HD acc_t slope(const BinaryTerms<acc_t>& terms) const {
    return negative * terms.negative_slope + positive * terms.positive_slope;
  }
};

}  // namespace sparse_ce
