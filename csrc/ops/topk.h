// topk.h - Defines the order of a row's logits for top-k: the largest first, ties by the lowest class.
#pragma once

#include "../core/dtype.h"

namespace sparse_ce {

struct TopkArgs {
  const void* logits;  // (rows, columns), unit column stride, any row stride
  DType dtype;
  int64_t rows, columns, row_stride, k;  // 0 < k <= columns < 2^31
  bool largest;  // false: the k smallest, in ascending order
  int64_t* ids;  // (rows, k)
  int64_t max_blocks;  // 0 means no limit

  template <typename scalar_t>
  SCE_HD const scalar_t* row(int64_t r) const {
    return static_cast<const scalar_t*>(logits) + r * row_stride;
  }
};

template <typename scalar_t>
using order_type =
    std::conditional_t<sizeof(scalar_t) == 2, int16_t, std::conditional_t<sizeof(scalar_t) == 4, int32_t, int64_t>>;

// Maps a number to an integer that is larger for numbers that come earlier. Both zeros map to the same integer. NaN
// counts as the largest number, as in torch.topk.
template <typename scalar_t>
SCE_HD order_type<scalar_t> order_of(scalar_t x, bool largest) {
  using order_t = order_type<scalar_t>;
  constexpr order_t kMost = std::numeric_limits<order_t>::max();
  constexpr int kExponent = std::is_same<scalar_t, Half>::value ? 5 : sizeof(scalar_t) == 8 ? 11 : 8;
  constexpr order_t kInfinity = static_cast<order_t>(kMost ^ (kMost >> kExponent));
  const auto bits = bit_cast<order_t>(x);
  auto order = static_cast<order_t>(bits < 0 ? bits ^ kMost : bits);
  order = order == -1 ? 0 : order;
  order = (bits & kMost) > kInfinity ? kMost : order;
  return static_cast<order_t>(largest ? order : ~order);
}

// Represents a class that may be among the k.
template <typename scalar_t>
struct Candidate {
  order_type<scalar_t> order;
  int32_t id;

  SCE_HD bool before(const Candidate& other) const {
    return order != other.order ? order > other.order : id < other.id;
  }
};

namespace cpu {
void topk_ids(const TopkArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
