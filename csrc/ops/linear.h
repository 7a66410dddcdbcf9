// linear.h - what the linear head needs beside GEMMs and the loss: sums of products over chunks of rows, rows of zeros,
// and a scale that is not known before backward. Pointers and sizes, nothing of torch.
#pragma once

#include "../core/target.h"

namespace sparse_ce {

// A float32 rounded to 24 bits: 16 where its 16-bit result will be, 8 beside it. For bfloat16 they are its upper bits:
// what a sum over chunks loses between two of them is 2^-17 of it, rounding the result loses 2^-9. For float16, which
// rounds to 2^-12, they have two bits more of the number and two less of the exponent: 2^-19, and a range from 2^-36,
// below which is 0, to 2^26, from where on is infinity.
template <typename scalar_t>
struct SplitFloat {
  static constexpr int kDropped = std::is_same<scalar_t, Half>::value ? 6 : 8;  // bits of the number
  static constexpr uint32_t kBelow = kDropped == 6 ? 90u << 23 : 0;  // of what is the least exponent, here 0
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
    // To nearest, ties to even.
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

// total += product, or = product for the first. A total of float32 or float64 is a plain array; one of 16 bits is a
// SplitFloat, whose `high` shares the memory of the total and becomes it with the last product.
struct AccumulateArgs {
  const void* product;  // (count,) of 16 bits or of the total's arithmetic dtype
  void* total;  // (count,)
  uint8_t* low;  // (count,), or null: the total is a plain array, or first is last
  DType product_dtype, dtype;
  int64_t count;
  bool first, last;
  int64_t max_blocks;  // 0: no limit
};

// One element, with low[i] beside it where it is split. `first` and `last` are the same for all: compilers take them
// out of a loop.
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

// Rows of ignored targets become 0: whatever they held would reach the weight's gradient as 0 * NaN.
struct ClearRowsArgs {
  void* rows;  // (target.rows, row_bytes)
  int64_t row_bytes;
  TargetView target;
  int64_t max_blocks;  // 0: no limit
};

// One element: 0, the gradient of an ignored row, stays 0 where the scale is inf or NaN.
template <typename acc_t>
SCE_HD acc_t scaled(acc_t x, acc_t by) {
  return x == acc_t(0) ? x : x * by;
}

// values *= scale / expected, which are read where they lie; nothing is touched where that is 1.
struct ScaleArgs {
  void* values;  // (rows, count), the rows row_stride apart and packed
  DType dtype;
  const void* scale;  // (1,) arithmetic dtype
  const void* expected;  // (1,), what the values were made for, or null: 1
  int64_t rows, count, row_stride;
  int64_t max_blocks;  // 0: no limit

  // What was made for 0, or for what is not finite, tells of nothing else; nor does what was made for so little of what
  // is wanted that it may have underflowed. Where 0 is wanted it is 0, whatever was made.
  template <typename acc_t>
  struct Factor {
    acc_t by;
    bool known, clears;

    SCE_HD acc_t operator()(acc_t x) const { return !known ? acc_t(NAN) : clears ? acc_t(0) : scaled(x, by); }
  };

  template <typename acc_t>
  SCE_HD Factor<acc_t> factor() const {
    const acc_t wanted = *static_cast<const acc_t*>(scale);
    if (!expected) return {wanted, true, false};
    const acc_t made = *static_cast<const acc_t*>(expected);
    if (made == wanted) return {acc_t(1), true, false};
    const acc_t by = wanted / made, most = acc_t(int64_t(1) << 40);
    const bool far = (by >= most || by <= -most) && finite(wanted);
    return {by, finite(made) && made != acc_t(0) && !far, wanted == acc_t(0)};
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
bool multiplies_bfloat16();  // whether the processor has instructions for it
}  // namespace cpu

}  // namespace sparse_ce
