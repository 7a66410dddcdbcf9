// online_stats.cuh - Adds logits to a row's statistics before its maximum is known.
#pragma once

#include "../../ops/select_stats.h"
#include "folded.cuh"

namespace sparse_ce {
namespace cuda {

// Adds logits of a thread. Of each logit and the maximum before it, the lower one is added to `rest`, so that only the
// last maximum is left out. Until `finish`, `rest` is in units of the common factor of `below`.
template <typename acc_t>
struct OnlineStats : RowStats<acc_t> {
  using RowStats<acc_t>::max, RowStats<acc_t>::rest, RowStats<acc_t>::weighted, RowStats<acc_t>::weight;
  Folded<acc_t> below{max};

  __device__ OnlineStats() { rest = 0; }

  template <int n>
  __device__ __forceinline__ void push(const acc_t (&z)[n]) {
    acc_t low[n];
    move_max(lower_ones(z, low), [](acc_t, acc_t) {});
    add(low);
  }
  // Adds numbers below the maximum.
  template <int n>
  __device__ __forceinline__ void add(const acc_t (&low)[n]) {
    acc_t added = below.power(low[0]);
#pragma unroll
    for (int i = 1; i < n; ++i) added += below.power(low[i]);
    rest += added;
  }

  __device__ RowStats<acc_t> finish() const {
    RowStats<acc_t> row = *this;
    row.rest = rest * unit() - nothing();
    return row;
  }

 protected:
  // Finds the lower ones of z and the maximum, and returns the new maximum.
  template <int n>
  __device__ __forceinline__ acc_t lower_ones(const acc_t (&z)[n], acc_t (&low)[n]) const {
    acc_t high = max;
#pragma unroll
    for (int i = 0; i < n; ++i) low[i] = lower(z[i], high), high = larger(z[i], high);
    return high;
  }
  // Moves the maximum up. Calls f(shift, factor) with the exponent of the old one, and its power, if it moves.
  template <typename function_t>
  __device__ __forceinline__ void move_max(acc_t to, const function_t& f) {
    if (to == max) return;
    const Folded<acc_t> below_to(to);
    const acc_t shift = below_to.exponent(max) - below.exponent(max), factor = power_of_2(shift);  // shift <= 0
    f(shift, factor);
    rest *= factor;
    if (weight != acc_t(0)) weighted += weight * (max - to);
    max = to, below = below_to;
  }
  // Returns the factor that removes that of `below`. It is NaN if the maximum is infinite.
  __device__ acc_t unit() const { return power_of_2(-below.exponent(max)); }
  // Returns 1 if the maximum may be that of no logit. If it is, `rest` has that logit already.
  __device__ acc_t nothing() const { return max == Limits<acc_t>::kLowest ? acc_t(1) : acc_t(0); }
};

// Does the same with the spread and the squares. The other numbers need no `finish`.
template <typename acc_t>
struct OnlineSelect : OnlineStats<acc_t> {
  using Row = OnlineStats<acc_t>;
  using Row::max, Row::rest, Row::below;
  acc_t spread = 0, squares = 0, total = 0;
  int32_t above = 0, argmax = -1;  // see SelectStats

  __device__ acc_t highest() const { return argmax < 0 ? -acc_t(INFINITY) : max; }

  template <int n>
  __device__ __forceinline__ void push_spread(const acc_t (&z)[n]) {
    acc_t low[n];
    this->move_max(this->lower_ones(z, low), [&](acc_t shift, acc_t factor) {
      spread = SelectStats<acc_t>::moved(spread, rest, shift, factor);  // the maximum before is one of the lower ones
      squares *= factor * factor;
    });
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const acc_t exponent = below.exponent(low[i]), e = power_of_2(exponent);
      rest += e;
      spread = multiply_add(e, larger(exponent, acc_t(-1500)), spread);  // 0 if e is 0, even if z is -inf
      squares = multiply_add(e, e, squares);
    }
  }

  __device__ SelectStats<acc_t> finish() const {
    SelectStats<acc_t> stats;
    stats.row = Row::finish();
    const acc_t unit = this->unit();
    stats.spread = unit * (spread - below.exponent(max) * rest) / below.by;
    stats.squares = unit * unit * squares - this->nothing();
    stats.total = total, stats.above = above, stats.argmax = argmax;
    return stats;
  }
};

}  // namespace cuda
}  // namespace sparse_ce
