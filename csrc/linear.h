// linear.h - what the linear head needs beside GEMMs and the loss: sums of products over chunks of rows, rows of zeros,
// and a scale that is not known before backward. Pointers and sizes, nothing of torch.
#pragma once

#include "target.h"

namespace sparse_ce {

// The upper 24 bits of a float32: 16 where its 16-bit result will be, 8 beside it. What a sum over chunks loses between
// two of them is 2^-17 of it; rounding the result to bfloat16 loses 2^-9.
struct SplitFloat {
  SCE_HD static float join(uint16_t high, uint8_t low) {
    return bit_cast<float>(static_cast<uint32_t>(high) << 16 | static_cast<uint32_t>(low) << 8);
  }
  SCE_HD static void split(float x, uint16_t& high, uint8_t& low) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = x != x ? 0x7fc00000u : bits + 0x7fu + ((bits >> 8) & 1u);  // to nearest, ties to even
    high = static_cast<uint16_t>(rounded >> 16);
    low = static_cast<uint8_t>(rounded >> 8);
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
    const float sum = first ? product : SplitFloat::join(bit_cast<uint16_t>(total), low[i]) + product;
    if (last) return from_acc(sum, total);
    uint16_t high;
    SplitFloat::split(sum, high, low[i]);
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

// values *= scale, which is read where it lies; nothing is touched where it is 1.
struct ScaleArgs {
  void* values;  // (count,)
  DType dtype;
  const void* scale;  // (1,) arithmetic dtype
  int64_t count;
  int64_t max_blocks;  // 0: no limit
};

namespace cpu {
void accumulate(const AccumulateArgs& args);
void scale(const ScaleArgs& args);
bool multiplies_bfloat16();  // whether the processor has instructions for it
}  // namespace cpu

}  // namespace sparse_ce
