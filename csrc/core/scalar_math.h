// scalar_math.h - Implements exp, log and tanh: with special functions on GPUs, and on CPUs with branch-free arithmetic
// that compilers vectorize on any instruction set.
#pragma once

#include "dtype.h"

#include <cmath>
#include <type_traits>

namespace sparse_ce {

SCE_HD constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the larger number, or b if a is NaN. On a GPU it is one instruction instead of a comparison and a selection.
template <typename acc_t>
SCE_HD acc_t larger(acc_t a, acc_t b) {
#if defined(__CUDA_ARCH__)
  return fmax(a, b);
#else
  return a > b ? a : b;
#endif
}

// Returns the lower number, or a if it is NaN.
template <typename acc_t>
SCE_HD acc_t lower(acc_t a, acc_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(acc_t) == sizeof(float)) {
    acc_t out;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
  }
#endif
  return a >= b ? b : a;
}

// Returns a b with a rounding of its own. GCC would otherwise contract the product with a subtraction that follows, so
// that a scaled logit differs from the one that lse was summed from. Adding 0 changes no digit and leaves nothing to
// contract. nvcc does not contract products (-fmad=false).
template <typename acc_t>
SCE_HD acc_t rounded_product(acc_t a, acc_t b) {
#ifdef SCE_CUDA
  return a * b;
#else
  return a * b + acc_t(0);
#endif
}

// Holds tanh(x) and its slope 1 - tanh(x)^2. The slope is not computed as that difference, which loses most digits if
// tanh(x) is close to 1.
template <typename acc_t>
struct TanhWithSlope {
  acc_t value, slope;
};

#ifdef SCE_CUDA
// Computes a b + c with one rounding. Contraction is allowed only here (-fmad=false): otherwise nvcc could fuse an
// expression in one kernel but not in another, and their results would differ.
template <typename acc_t>
SCE_HD acc_t multiply_add(acc_t a, acc_t b, acc_t c) {
  return std::fma(a, b, c);
}

// Uses ex2.approx.ftz, which has 2 ulp and is exactly 0 for -inf. exp2f needs three more instructions for subnormals.
SCE_HD float power_of_2(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  const float out = exp2f(x);
  return out < 0x1p-126f ? 0.0f : out;  // NaN stays NaN
#endif
}
// Uses rcp.approx.ftz, which has 1 ulp and is exactly 0 for inf. A division needs ten more instructions.
SCE_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return 1.0f / x;
#endif
}
SCE_HD double power_of_2(double x) { return exp2(x); }
template <typename acc_t>
constexpr acc_t kLog2e = acc_t(1.44269504088896340736);
SCE_HD float exponential(float x) { return power_of_2(x * kLog2e<float>); }
SCE_HD double exponential(double x) { return exp(x); }

// tanh is 1 - 2 / (exp(2 |x|) + 1). Near 0 this loses digits, so a minimax fit with relative error 4e-7 is used there.
// Both are always computed, without a branch, which needs two thirds of the instructions of tanhf.
constexpr float kNearTanh = 0.56f;
SCE_HD float tanh_near_0(float x) {
  const float square = x * x;
  const float slope = multiply_add(multiply_add(0.0162737984f, square, -0.0525868163f), square, 0.133194193f);
  return multiply_add(x, multiply_add(slope, square, -0.333328903f) * square, x);
}
// Computes the slope from `left` = 1 - |tanh(x)|.
template <typename acc_t>
SCE_HD acc_t slope_of_tanh(acc_t left) {
  return left * (acc_t(2) - left);
}
SCE_HD TanhWithSlope<float> tanh_of_either(float x, float near) {
  const float size = fabsf(x), half_left = reciprocal(power_of_2(size * 2.88539008f) + 1.0f);
  const float far = copysignf(multiply_add(-2.0f, half_left, 1.0f), x);
  return {size < kNearTanh ? near : far, slope_of_tanh(2.0f * half_left)};
}
SCE_HD TanhWithSlope<float> tanh_with_slope(float x) { return tanh_of_either(x, tanh_near_0(x)); }
SCE_HD TanhWithSlope<double> tanh_with_slope(double x) {
  return {tanh(x), slope_of_tanh(2.0 / (exp(2.0 * fabs(x)) + 1.0))};
}
SCE_HD float tanh_of(float x) { return tanh_with_slope(x).value; }
SCE_HD double tanh_of(double x) { return tanh(x); }
// Computes several values, bitwise equal to tanh_of. Usually all are near 0, so one branch checks them together.
template <int n>
SCE_HD void tanh_of_each(float (&x)[n]) {
  float near[n], size = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) near[i] = tanh_near_0(x[i]), size = larger(fabsf(x[i]), size);
  if (size >= kNearTanh) {
#pragma unroll
    for (int i = 0; i < n; ++i) near[i] = tanh_of_either(x[i], near[i]).value;
  }
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = near[i];
}
template <int n>
SCE_HD void tanh_of_each(double (&x)[n]) {
  for (double& one : x) one = tanh(one);
}
SCE_HD float logarithm(float x) { return logf(x); }
SCE_HD double logarithm(double x) { return log(x); }
SCE_HD float exponential_less_1(float x) { return expm1f(x); }
SCE_HD double exponential_less_1(double x) { return expm1(x); }
SCE_HD float log_of_1_plus(float x) { return log1pf(x); }
SCE_HD double log_of_1_plus(double x) { return log1p(x); }
template <typename acc_t>
SCE_HD acc_t log_of_normal(acc_t x) {
  return logarithm(x);
}
#else
// Holds the bits of a float and the polynomial for exp(r), |r| <= ln2 / 2, of the given degree. The minimax fits have a
// relative error of 2e-7 (degree 5) and 8e-8 (degree 6), including rounding, and are exactly 1 at 0.
template <typename acc_t, int degree>
struct ExpPolynomial;
template <>
struct ExpPolynomial<float, 5> {
  using bits_t = uint32_t;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kLowest = -88.0f;
  static constexpr float kFit[] = {1.0f, 0.999999642f, 0.499988973f, 0.166675746f, 0.0419153795f, 0.00829765573f};
};
template <>
struct ExpPolynomial<float, 6> : ExpPolynomial<float, 5> {
  static constexpr float kFit[] = {1.0f,          1.0f,           0.499999911f,  0.166664198f,
                                   0.0416682251f, 0.00837481581f, 0.00138368469f};
};
template <>
struct ExpPolynomial<double, 11> {  // relative error 2e-17
  using bits_t = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kLowest = -709.0;
  static constexpr double kFit[] = {1.0,
                                    1.0000000000000006661,
                                    0.50000000000000055511,
                                    0.1666666666665730101,
                                    0.041666666666573641542,
                                    0.0083333333377154598237,
                                    0.0013888888932340795988,
                                    0.00019841261491392796039,
                                    2.4801504511037081833e-05,
                                    2.7564254929439031545e-06,
                                    2.7626296554217167686e-07,
                                    2.2981311538834363711e-08};
};

// Decomposes exp(x) = power exp(r), |r| <= ln2 / 2, for x < 88 (709 for doubles). power is 0 for x <= -88 (-709), and r
// is NaN if x is. Without fused multiply-add, r has the rounding error of n ln2, 5e-8 |x| (1e-16). `exact` splits ln2
// into two parts; n times the first part is exact.
template <typename acc_t, int degree, bool exact = false>
struct Raised : ExpPolynomial<acc_t, degree> {
  using Of = ExpPolynomial<acc_t, degree>;
  acc_t r, power;

  SCE_HD explicit Raised(acc_t x) {
    // Adding 1.5 * 2^23 rounds to an integer n in the low bits of the mantissa. Adding 127 more turns them into the
    // exponent of 2^n.
    constexpr acc_t kRound = acc_t(uint64_t(3) << (Of::kMantissa - 1)) + Of::kBias;
    constexpr acc_t kLog2e = acc_t(1.44269504088896340736), kLn2 = acc_t(0.69314718055994530942);
    constexpr acc_t kMost = acc_t(0.693359375), kLow = acc_t(-2.1219444005469058277e-4);
    x = x < Of::kLowest ? Of::kLowest : x;
    const acc_t rounded = x * kLog2e + kRound, n = rounded - kRound;
    r = exact ? (x - n * kMost) - n * kLow : x - n * kLn2;
    power = bit_cast<acc_t>(bit_cast<typename Of::bits_t>(rounded) << Of::kMantissa);
  }

  // Returns the polynomial from its term `first` on, divided by r^first. Terms are paired, which halves the chain of
  // additions.
  template <int first>
  SCE_HD acc_t fit() const {
    constexpr bool kPairs = (degree - first) % 2 != 0;
    const acc_t square = r * r;
    acc_t p = kPairs ? acc_t(0) : Of::kFit[degree];
#pragma GCC unroll 6
    for (int k = kPairs ? degree - 1 : degree - 2; k >= first; k -= 2) {
      const acc_t pair = Of::kFit[k + 1] * r + Of::kFit[k];
      p = k == degree - 1 ? pair : p * square + pair;
    }
    return p;
  }
};

// Returns exp(x) for x < 88 (709) in the fewest instructions. The error is that of the fit plus 5e-8 |x| (1e-16), which
// matters little in a sum whose terms shrink with x. exp(0) is exactly 1, exp(-inf) is 0 and exp(NaN) is NaN.
template <int degree, typename acc_t>
SCE_HD acc_t exponential_below(acc_t x) {
  const Raised<acc_t, degree> e(x);
  return e.template fit<0>() * e.power;
}

// Selects the degree for the storage type of the logits.
template <typename scalar_t>
constexpr int degree_for = sizeof(scalar_t) == 8   ? 11
                           : sizeof(scalar_t) == 4 ? 6
                                                   : 5;

// Returns exp(x) with a relative error of 1.5e-7 (4e-16) for all x, because log-probabilities may be far below 0. It is
// a template, because floats would otherwise convert to the double overload.
template <typename acc_t>
SCE_HD acc_t exponential(acc_t x) {
  const Raised<acc_t, degree_for<acc_t>, true> e(x);
  return e.template fit<0>() * e.power;
}

// Returns exp(x) - 1 for x < 88 (709) with a relative error of 3e-7 (4e-16).
template <typename acc_t>
SCE_HD acc_t exponential_less_1(acc_t x) {
  const Raised<acc_t, degree_for<acc_t>, true> e(x);
  return (e.power - acc_t(1)) + e.power * (e.r * e.template fit<1>());
}

// Computes tanh as (1 - p) / (1 + p) with p = exp(-2 |x|). The numerator keeps its digits near 0; the relative error is
// 3e-7 (4e-16). The slope is (1 - |tanh(x)|) (1 + |tanh(x)|), where the first factor is 2 p / (1 + p).
template <typename acc_t>
SCE_HD TanhWithSlope<acc_t> tanh_with_slope(acc_t x) {
  const Raised<acc_t, degree_for<acc_t>, true> e(acc_t(-2) * std::fabs(x));
  const acc_t more = e.power * (e.r * e.template fit<1>()), p = e.power + more, sum = acc_t(1) + p;
  const acc_t size = ((acc_t(1) - e.power) - more) / sum;
  return {std::copysign(size, x), (p + p) / sum * (acc_t(1) + size)};
}
template <typename acc_t>
SCE_HD acc_t tanh_of(acc_t x) {
  return tanh_with_slope(x).value;
}

inline float logarithm(float x) { return std::log(x); }
inline double logarithm(double x) { return std::log(x); }

template <typename acc_t>
struct LogBits;
template <>
struct LogBits<float> {
  using bits_t = int32_t;
  static constexpr int kMantissa = 23;
  static constexpr bits_t kOne = 0x3f800000, kRootOfHalf = 0x3f3504f3;
};
template <>
struct LogBits<double> {
  using bits_t = int64_t;
  static constexpr int kMantissa = 52;
  static constexpr bits_t kOne = 0x3ff0000000000000, kRootOfHalf = 0x3fe6a09e667f3bcd;
};

// Splits x > 0 into 2^k (1 + f), where 1 + f is between the roots of 1/2 and 2.
template <typename acc_t>
struct Split {
  using Bits = LogBits<acc_t>;
  using bits_t = typename Bits::bits_t;
  using unsigned_t = std::make_unsigned_t<bits_t>;  // the sum of the bits of NaN exceeds bits_t
  acc_t k, f;

  SCE_HD explicit Split(acc_t x) {
    const auto bits = static_cast<bits_t>(bit_cast<unsigned_t>(x) + unsigned_t(Bits::kOne - Bits::kRootOfHalf));
    k = static_cast<acc_t>((bits >> Bits::kMantissa) - (Bits::kOne >> Bits::kMantissa));
    f = bit_cast<acc_t>((bits & ((bits_t(1) << Bits::kMantissa) - 1)) + Bits::kRootOfHalf) - acc_t(1);
  }
  SCE_HD acc_t log_of_power() const { return k * acc_t(0.69314718055994530942); }
};

// Returns log(1 + f) with the relative error of a few roundings if 1 + f is between the roots of 1/2 and 2. The fit has
// a relative error of 3e-8.
SCE_HD float log_near_1(float f) {
  constexpr float kFit[] = {-0.4999999f, 0.3333395f,  -0.25001755f, 0.19962072f,
                            -0.1657051f, 0.14917979f, -0.14307508f, 0.087348111f};
  const float square = f * f;
  float p = kFit[7] * f + kFit[6];
#pragma GCC unroll 3
  for (int k = 4; k >= 0; k -= 2) p = p * square + (kFit[k + 1] * f + kFit[k]);
  return f + square * p;
}
// This is 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = f / (2 + f).
SCE_HD double log_near_1(double f) {
  constexpr int kTerms = 10;
  const double s = f / (2.0 + f), square = s * s;
  double series = 1.0 / (2 * kTerms + 1);
#pragma GCC unroll 10
  for (int i = kTerms - 1; i > 0; --i) series = series * square + 1.0 / (2 * i + 1);
  return (s + s) + (s + s) * square * series;
}

// Returns log(x) for 0 < x <= 1 that is not subnormal, with a relative error of 2e-7 (1e-15 for doubles). Compilers
// vectorize it, unlike std::log.
template <typename acc_t>
SCE_HD acc_t log_of_normal(acc_t x) {
  const Split<acc_t> split(x);
  return split.log_of_power() + log_near_1(split.f);
}

// Returns log(1 + x) for -1 < x, with the relative error of a few roundings even near 0. NaN does not stay NaN.
template <typename acc_t>
SCE_HD acc_t log_of_1_plus(acc_t x) {
  const Split<acc_t> split(acc_t(1) + x);
  return split.log_of_power() + log_near_1(split.k == acc_t(0) ? x : split.f);
}
#endif

}  // namespace sparse_ce
