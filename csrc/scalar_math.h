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
SCE_HD float exponential_rough(float x) { return exponential(x); }
SCE_HD float hyperbolic_tangent(float x) { return tanhf(x); }
SCE_HD double hyperbolic_tangent(double x) { return tanh(x); }
SCE_HD float logarithm(float x) { return logf(x); }
SCE_HD double logarithm(double x) { return log(x); }
#else
// x = n ln2 + r with |r| <= ln2 / 2 and power = 2^n, for x <= 88; power is 0 from x = -88 on, and r NaN where x is.
struct Reduced {
  float r, power;

  SCE_HD explicit Reduced(float x) {
    constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
    // Adding 1.5 * 2^23 rounds to an integer n in the low bits of the mantissa; 127 more makes them 2^n's exponent.
    constexpr float kRound = 12582912.0f + 127.0f;
    x = x < -88.0f ? -88.0f : x;
    const float rounded = x * kLog2e + kRound;
    power = bit_cast<float>(bit_cast<uint32_t>(rounded) << 23);
    r = x - (rounded - kRound) * kLn2;
  }
};

// exp(x) for x <= 88: exactly 0 for -inf, NaN for NaN, 3e-9 + rounding relative error (minimax fit on +-ln2/2).
SCE_HD float exponential(float x) {
  const auto [r, power] = Reduced(x);
  float p = 0.001381459879f;
  p = p * r + 0.008368717507f;
  p = p * r + 0.04166838899f;
  p = p * r + 0.1666652113f;
  p = p * r + 0.4999999404f;
  p = p * (r * r) + r;
  return p * power + power;
}

SCE_HD double exponential(double x) { return std::exp(x); }

// The same to 3e-6, for results that are rounded to 16 bits.
SCE_HD float exponential_rough(float x) {
  const auto [r, power] = Reduced(x);
  float p = 0.04145856574f;
  p = p * r + 0.1679093242f;
  p = p * r + 0.5000436306f;
  p = p * r + 0.9999634027f;
  p = p * r + 0.9999992847f;
  return p * power;
}

// Relative error below 1e-7: a polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
SCE_HD float hyperbolic_tangent(float x) {
  const float size = std::fabs(x);
  const float e = exponential(-2.0f * size);
  const float far = std::copysign((1.0f - e) / (1.0f + e), x);
  const float s = x * x;
  float p = -0.005697378889f;
  p = p * s + 0.02063254081f;
  p = p * s - 0.05373779684f;
  p = p * s + 0.1333142072f;
  p = p * s - 0.3333328068f;
  const float near = x + x * (s * p);
  return size < 0.625f ? near : far;
}

SCE_HD double hyperbolic_tangent(double x) { return std::tanh(x); }

inline float logarithm(float x) { return std::log(x); }
inline double logarithm(double x) { return std::log(x); }
#endif

}  // namespace sparse_ce
