// linear.h - Defines what the linear head needs apart from GEMMs and the loss: accumulation over chunks, and scaling by
// a factor that is known only in backward. This header does not depend on torch.
#pragma once

#include "../core/target.h"

namespace sparse_ce {

// Splits a float32 that is rounded to 24 bits: 16 bits in the memory of the 16-bit result and 8 bits next to it.
//
// For bfloat16 these are the upper bits. An accumulation over chunks loses 2^-17 per addition, and rounding the result
// loses 2^-9. For float16, which rounds to 2^-12, there are two more mantissa bits and two fewer exponent bits. The
// precision is 2^-19. Numbers below 2^-36 become 0, and numbers from 2^26 on become infinity.
template <typename scalar_t>
struct SplitFloat {
  static constexpr int kDropped = std::is_same<scalar_t, Half>::value ? 6 : 8;  // mantissa bits
  static constexpr uint32_t kBelow = kDropped == 6 ? 90u << 23 : 0;  // bits of the smallest exponent, stored as 0
  static constexpr uint32_t kInfinity = 0x7fffffu >> (23 - kDropped) << (23 - kDropped);

  SCE_HD static float join(uint16_t high, uint8_t low) {
    const uint32_t bits = static_cast<uint32_t>(high) << 8 | low, sign = bits >> 23 << 31, number = bits & 0x7fffffu;
    uint32_t magnitude = (number << kDropped) + kBelow;
    if (kBelow > 0) {
      magnitude = number == 0 ? 0 : magnitude;
      magnitude = number >= kInfinity ? 0x7f800000u | (number - kInfinity) : magnitude;
    }
    return bit_cast<float>(sign | magnitude);
  }
  SCE_HD static void split(float x, uint16_t& high, uint8_t& low) {
    const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    // Round to nearest, ties to even.
    const uint32_t rounded = magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1u);
    uint32_t number = (rounded - kBelow) >> kDropped;
    if (kBelow > 0) {
      number = rounded < kBelow + (1u << 23) ? 0 : number;
      number = rounded >= kBelow + (kInfinity << kDropped) ? kInfinity : number;
    }
    number = x != x ? kInfinity | 1u << (22 - kDropped) : number;
    const uint32_t all = bits >> 31 << 23 | number;
    high = static_cast<uint16_t>(all >> 8);
    low = static_cast<uint8_t>(all);
  }
};

// Computes total += product, or total = product for the first product. A float32 or float64 total is a plain array. A
// 16-bit total is a SplitFloat whose `high` uses the memory of the total; the last product rounds it to the result.
struct AccumulateArgs {
  const void* product;  // (count,), 16 bits or the total's arithmetic dtype
  void* total;  // (count,)
  uint8_t* low;  // (count,); null if the total is a plain array, or there is one product
  DType product_dtype, dtype;
  int64_t count;
  bool first, last;
  int64_t max_blocks;  // 0 means no limit
};

// Accumulates one element; low[i] holds its low bits. `first` and `last` are loop-invariant, so compilers hoist them.
template <typename scalar_t>
SCE_HD void accumulate_element(acc_type<scalar_t> product, bool first, bool last, scalar_t& total, uint8_t* low,
                               int64_t i) {
  if constexpr (sizeof(scalar_t) > 2) {
    total = first ? product : total + product;
  } else {
    const float sum = first ? product : SplitFloat<scalar_t>::join(bit_cast<uint16_t>(total), low[i]) + product;
    if (last) return from_acc(sum, total);
    uint16_t high;
    SplitFloat<scalar_t>::split(sum, high, low[i]);
    total = bit_cast<scalar_t>(high);
  }
}

// Scales one element. 0, the gradient of an ignored row, stays 0 even if the factor is inf or NaN.
template <typename acc_t>
SCE_HD acc_t scaled(acc_t x, acc_t by) {
  return x == acc_t(0) ? x : x * by;
}

// Computes values *= scale / expected. Both are read from device memory. If the factor is 1, no value is accessed.
struct ScaleArgs {
  void* values;  // (rows, count), packed rows with stride row_stride
  DType dtype;
  const void* scale;  // (1,) arithmetic dtype
  const void* expected;  // (1,), the grad_output that the values were computed for; null means 1
  int64_t rows, count, row_stride;
  int64_t max_blocks;  // 0 means no limit

  // Holds the factor. It is unknown if `expected` is 0 or not finite, or so much smaller than `scale` that the values
  // may have underflowed. A scale of 0 sets the values to 0.
  template <typename acc_t>
  struct Factor {
    acc_t by;
    bool known, clears;

    SCE_HD acc_t operator()(acc_t x) const { return !known ? acc_t(NAN) : clears ? acc_t(0) : scaled(x, by); }
  };

  template <typename acc_t>
  SCE_HD Factor<acc_t> factor() const {
    const acc_t actual = *static_cast<const acc_t*>(scale);
    if (!expected) return {actual, true, false};
    const acc_t before = *static_cast<const acc_t*>(expected);
    if (before == actual) return {acc_t(1), true, false};
    const acc_t by = actual / before, most = acc_t(int64_t(1) << 40);
    const bool far = (by >= most || by <= -most) && finite(actual);
    return {by, finite(before) && before != acc_t(0) && !far, actual == acc_t(0)};
  }

 private:
  template <typename acc_t>
  SCE_HD static bool finite(acc_t x) {
    return x < acc_t(INFINITY) && x > -acc_t(INFINITY);
  }
};

namespace cpu {
void accumulate(const AccumulateArgs& args);
void scale(const ScaleArgs& args);
bool multiplies_bfloat16();  // true if the CPU has instructions for it
}  // namespace cpu

}  // namespace sparse_ce
