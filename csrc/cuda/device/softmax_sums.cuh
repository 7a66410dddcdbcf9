// softmax_sums.cuh - Sums what the gradient of a sparse softmax needs of a row.
#pragma once

#include "../../ops/sparse_softmax.h"

namespace sparse_ce {
namespace cuda {

// Holds what the gradient needs of some of a row's elements. The largest y_i is left out of the sum, so that it hides
// no digits of the others. They form monoids, to which a thread adds elements in order.
template <typename acc_t>
struct LogSoftmaxSums {
  static constexpr acc_t kNothing = -acc_t(INFINITY);  // a y_i that adds nothing if g_i is 0
  acc_t highest = kNothing, own = 0;  // the largest y_i and its g_i
  LongSum<acc_t> others;  // sum_i g_i over the others

  // Of each element and the largest before it, adds that with the lower y_i.
  template <int n>
  __device__ __forceinline__ void add(const acc_t (&grad)[n], const acc_t (&y)[n]) {
    acc_t added = 0;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const bool higher = y[e] > highest;
      added += higher ? own : grad[e];
      own = higher ? grad[e] : own, highest = higher ? y[e] : highest;
    }
    others.add(added);
  }
  __device__ void merge(const LogSoftmaxSums& other) {
    others.add(other.others.sum);
    add<1>({other.own}, {other.highest});
  }
  __device__ acc_t at(acc_t grad, acc_t y) const {
    using Gradient = SoftmaxGradient<acc_t>;
    if (Gradient::template has_most<true>(y)) return Gradient::at_most(grad, y, others.sum);
    return Gradient{others.sum + own}.template at<true>(grad, y);
  }
};

template <typename acc_t>
struct SoftmaxSums {
  static constexpr acc_t kNothing = 0;
  acc_t highest = -acc_t(INFINITY), own = 0, share = 0;  // share = sum_i y_i
  LongSum<acc_t> sum;  // sum_i y_i (g_i - own)

  template <int n>
  __device__ __forceinline__ void add(const acc_t (&grad)[n], const acc_t (&y)[n]) {
    acc_t added = 0;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const bool higher = y[e] > highest;
      added += (grad[e] - own) * (higher ? -share : y[e]);  // moves the sum, or adds a term to it
      own = higher ? grad[e] : own, highest = higher ? y[e] : highest;
      share += y[e];
    }
    sum.add(added);
  }
  __device__ void merge(const SoftmaxSums& other) {
    const bool higher = other.highest > highest;
    sum.add(other.sum.sum);
    sum.add((other.own - own) * (higher ? -share : other.share));
    own = higher ? other.own : own, highest = higher ? other.highest : highest;
    share += other.share;
  }
  __device__ acc_t at(acc_t grad, acc_t y) const {
    return SoftmaxGradient<acc_t>{sum.sum, own}.template at<false>(grad, y);
  }
};

}  // namespace cuda
}  // namespace sparse_ce
