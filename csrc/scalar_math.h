// scalar_math.h - exp, log and tanh: on a GPU its special functions, on a CPU straight-line arithmetic that compilers
// vectorise on any instruction set.
#pragma once

#include "dtype.h"

#include <cmath>

namespace sparse_ce {

SCE_HD constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef SCE_CUDA
// ex2.approx.ftz: 2 ulp, and exactly 0 for -inf. The plain exp2f spends three more instructions on subnormals.
SCE_HD float exponential(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
  return out;
#else  // on a host the same product and base
  const float out = exp2f(x * 1.44269504f);
  return out < 0x1p-126f ? 0.0f : out;  // a NaN stays
#endif
}
SCE_HD double exponential(double x) { return exp(x); }
SCE_HD float hyperbolic_tangent(float x) { return tanhf(x); }
SCE_HD double hyperbolic_tangent(double x) { return tanh(x); }
SCE_HD float logarithm(float x) { return logf(x); }
SCE_HD double logarithm(double x) { return log(x); }
#else
// The bits of a float and the polynomial for 2^f, |f| <= 1/2, by its degree: minimax fits of relative error 2e-7 (5)
// and 8e-8 (6) with the rounding of their terms, exactly 1 at 0.
template <typename acc_t, int degree>
struct Power;
template <>
struct Power<float, 5> {
  using bits_t = uint32_t;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kFit[] = {1.0f, 0.693146944f, 0.240221202f, 0.0555071309f, 0.00967554096f, 0.00132764725f};
};
template <>
struct Power<float, 6> : Power<float, 5> {
  static constexpr float kFit[] = {1.0f,           0.693147182f,   0.240226462f,   0.0555032864f,
                                   0.00961848907f, 0.00133999309f, 0.000153458124f};
};
template <>
struct Power<double, 11> {  // 2e-17
  using bits_t = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kFit[] = {1.0,
                                    0.69314718055994569675,
                                    0.24022650695910098007,
                                    0.055504108664790394552,
                                    0.0096181291076070023796,
                                    0.0013333558153439964747,
                                    0.0001540353044157213033,
                                    1.5252727385193868197e-5,
                                    1.3215442675329822143e-6,
                                    1.0180647659234138888e-7,
                                    7.0725704128144235096e-9,
                                    4.078071929588336665e-10};
};

// 2^y = power 2^f, |f| <= 1/2, for y < 128 (1024); power is 0 from y = -127 (-1023) on, and f NaN where y is.
template <typename acc_t, int degree>
struct Raised : Power<acc_t, degree> {
  using Of = Power<acc_t, degree>;
  acc_t f, power;

  SCE_HD explicit Raised(acc_t y) {
    // Adding 1.5 * 2^23 rounds to an integer n in the low bits of the mantissa; 127 more makes them 2^n's exponent.
    constexpr acc_t kRound = acc_t(uint64_t(3) << (Of::kMantissa - 1)) + Of::kBias, kLowest = -Of::kBias;
    y = y < kLowest ? kLowest : y;
    const acc_t rounded = y + kRound;
    f = y - (rounded - kRound);
    power = bit_cast<acc_t>(bit_cast<typename Of::bits_t>(rounded) << Of::kMantissa);
  }

  // The fit from its term `first` on, divided by f^first. In pairs of terms: the chain of additions is half as long.
  template <int first>
  SCE_HD acc_t fit() const {
    constexpr bool kPairs = (degree - first) % 2 != 0;
    const acc_t square = f * f;
    acc_t p = kPairs ? acc_t(0) : Of::kFit[degree];
#pragma GCC unroll 6
    for (int k = kPairs ? degree - 1 : degree - 2; k >= first; k -= 2) {
      const acc_t pair = Of::kFit[k + 1] * f + Of::kFit[k];
      p = k == degree - 1 ? pair : p * square + pair;
    }
    return p;
  }
};

// exp(x), x < 88 (709), in the fewest instructions: the fit's relative error and that of rounding x log2(e), |x| 6e-8
// (1e-16), of which little is left in a sum whose terms get smaller with x. Exactly 1 for 0, 0 for -inf, NaN for NaN.
template <int degree, typename acc_t>
SCE_HD acc_t exponential_below(acc_t x) {
  const Raised<acc_t, degree> e(x * acc_t(1.44269504088896340736));
  return e.template fit<0>() * e.power;
}

// The degree for logits as they are stored.
template <typename scalar_t>
constexpr int degree_for = sizeof(scalar_t) == 8   ? 11
                           : sizeof(scalar_t) == 4 ? 6
                                                   : 5;

// A template: of a float it is no double's.
template <typename acc_t>
SCE_HD acc_t exponential(acc_t x) {
  return exponential_below<degree_for<acc_t> >(x);
}

// By exp(-2 |x|) - 1, which keeps its digits near 0: relative error 3e-7 (4e-16).
template <typename acc_t>
SCE_HD acc_t hyperbolic_tangent(acc_t x) {
  const Raised<acc_t, degree_for<acc_t> > e(acc_t(-2 * 1.44269504088896340736) * std::fabs(x));
  const acc_t less_one = e.power * (e.f * e.template fit<1>()) + (e.power - acc_t(1));
  return std::copysign(less_one / (acc_t(2) + less_one), x);
}

inline float logarithm(float x) { return std::log(x); }
inline double logarithm(double x) { return std::log(x); }
#endif

}  // namespace sparse_ce
