// math.h - Implements the formulas of the loss and its gradient for both CPU and CUDA.
//
// For each row, with z_j = transform(x_j), entries (c_k, w_k), class weights o_j, w~_k = w_k o_{c_k}, s = sum_k w~_k,
// lse = log sum_j exp z_j, O = sum_j o_j, smoothing e, z-loss l, n classes and grad_output g:
//
//   loss     = (1-e) sum_k w~_k (lse - z_{c_k}) + (e/n) sum_j o_j (lse - z_j) + l lse^2
//   dloss/dz_j = a q_j - b o_j - d sum_{k: c_k = j} w~_k,          q_j = exp(z_j - lse)
//   a = g [(1-e) s + (e/n) O + 2 l lse] + g_lse,   b = g e/n,   d = g (1-e)
//   dloss/dw_k = g (1-e) o_{c_k} (lse - z_{c_k})
#pragma once

#include "scalar_math.h"

#ifdef SCE_CUDA
#define SCE_SIMD(...) _Pragma("unroll")
#define SCE_UNROLL _Pragma("unroll")
#define SCE_SIMD_MAX(name) SCE_SIMD()
#else
#define SCE_PRAGMA(text) _Pragma(#text)
#define SCE_UNROLL _Pragma("GCC unroll 16")
#define SCE_SIMD(...) SCE_PRAGMA(omp simd __VA_ARGS__)
// clang does not vectorize a maximum of floats, and would start it at the lowest finite number instead of -inf.
#ifdef __clang__
#define SCE_SIMD_MAX(name)
#else
#define SCE_SIMD_MAX(name) SCE_SIMD(reduction(max : name))
#endif
#endif

namespace sparse_ce {

// Sums are accumulated in a fixed number of lanes. A single lane would add too many rounding errors, and compilers must
// not choose the number. More lanes are used if terms are ready faster than an addition completes. A GPU thread adds
// few terms and uses one lane.
#ifdef SCE_CUDA
constexpr int64_t kLanes = 1, kWideLanes = 1;
#else
constexpr int64_t kLanes = 16, kWideLanes = 64;
#endif

template <typename acc_t, size_t lane_count>
SCE_HD acc_t sum_of_lanes(acc_t (&lanes)[lane_count]) {
  for (size_t half = lane_count / 2; half > 0; half /= 2)
    for (size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  return lanes[0];
}

// Returns the sum of term(i) over begin <= i < end. Calls before(i) with the first term of each group of `lane_count`.
template <typename acc_t, int64_t lane_count = kLanes, typename term_t, typename before_t>
SCE_HD acc_t sum_in_lanes(int64_t begin, int64_t end, const term_t& term, const before_t& before) {
  acc_t lanes[lane_count] = {};
  int64_t i = begin;
  for (; i + lane_count <= end; i += lane_count) {
    before(i);
    SCE_SIMD()
    for (int64_t k = 0; k < lane_count; ++k) lanes[k] += term(i + k);
  }
  SCE_SIMD()
  for (int64_t k = 0; k < end - i; ++k) lanes[k] += term(i + k);
  return sum_of_lanes(lanes);
}
template <typename acc_t, int64_t lane_count = kLanes, typename term_t>
SCE_HD acc_t sum_in_lanes(int64_t begin, int64_t end, const term_t& term) {
  return sum_in_lanes<acc_t, lane_count>(begin, end, term, [](int64_t) {});
}

// Accumulates many terms sequentially with Kahan compensation. Used by GPU threads, because doubles can be 64 times
// slower there.
template <typename acc_t>
struct LongSum {
  acc_t sum = 0, lost = 0;

  SCE_HD void add(acc_t x) {
    const acc_t y = x - lost, to = sum + y;
    lost = (to - sum) - y;
    if (lost != lost) lost = 0;  // an infinite sum has no rounding error
    sum = to;
  }
};

struct LossOptions {
  double label_smoothing = 0, z_loss = 0, logit_scale = 1;
  double softcap = 0;  // 0 means none
};

// Computes z = softcap tanh(scale x / softcap), or scale x without a softcap. `row_scale` multiplies the options'
// scale.
template <typename acc_t>
struct LogitTransform {
  acc_t scale, softcap, scale_per_cap, per_cap;

  SCE_HD explicit LogitTransform(const LossOptions& options, acc_t row_scale = 1)
      : scale(static_cast<acc_t>(options.logit_scale) * row_scale), softcap(static_cast<acc_t>(options.softcap)),
        scale_per_cap(softcap == acc_t(0) ? acc_t(0) : scale / softcap),
        per_cap(softcap == acc_t(0) ? acc_t(0) : acc_t(1) / softcap) {}

  SCE_HD bool identity() const { return scale == acc_t(1) && softcap == acc_t(0); }
  SCE_HD acc_t operator()(acc_t x) const { return rounded_product(factor(), base(x)); }
  // z = factor() base(x). z has the order of the logits, or the reverse order if the scale is negative.
  SCE_HD acc_t factor() const { return softcap == acc_t(0) ? scale : softcap; }
  SCE_HD acc_t base(acc_t x) const { return softcap == acc_t(0) ? x : tanh_at(x); }
  // Holds z and dz/d(scale x), computed from one exponential.
  struct WithSlope {
    acc_t z, of_cap;
  };
  SCE_HD WithSlope with_slope(acc_t x) const {
    return softcap == acc_t(0) ? WithSlope{rounded_product(scale, x), acc_t(1)} : capped(x);
  }
  // These require a softcap. tanh_at returns z / softcap, and slope_at returns dz/dx from it.
  SCE_HD WithSlope capped(acc_t x) const {
    const TanhWithSlope<acc_t> t = tanh_with_slope(scale_per_cap * x);
    return {rounded_product(softcap, t.value), t.slope};
  }
  SCE_HD acc_t tanh_at(acc_t x) const { return tanh_of(scale_per_cap * x); }
  SCE_HD acc_t slope_at(acc_t t) const { return scale * ((acc_t(1) - t) * (acc_t(1) + t)); }
  // Returns z such that `slope` can be computed from it: close to the cap, z is rounded only once.
  SCE_HD acc_t nearest(acc_t x) const {
    const WithSlope t = with_slope(x);
    const acc_t size = t.z < acc_t(0) ? -t.z : t.z, left = t.of_cap / (acc_t(1) + size * per_cap);
    if (softcap == acc_t(0) || !(left < acc_t(0.5))) return t.z;
    const acc_t near_cap = softcap - softcap * left;
    return t.z < acc_t(0) ? -near_cap : near_cap;
  }
  // Returns dz/dx from z if x is no longer available. The differences are exact, so a slope near 0 loses no more digits
  // than z lost by rounding.
  SCE_HD acc_t slope(acc_t z) const {
    if (softcap == acc_t(0)) return scale;
    return scale * ((per_cap * (softcap - z)) * (per_cap * (softcap + z)));
  }
};

// Holds statistics of some of a row's logits. They form a monoid, so tiles, threads, blocks and shards all merge alike.
template <typename acc_t>
struct RowStats {
  // The initial maximum is the lowest finite value. With -inf, a tile of -inf logits would give NaN or need a branch.
  acc_t max = Limits<acc_t>::kLowest;
  acc_t rest = -1;  // sum_j exp(z_j - max) over all j but one with z_j = max; -1 without such a j, so 1 + rest = 0
  acc_t weighted = 0;  // sum_j o_j (z_j - max), if label smoothing needs it
  acc_t weight = 0;  // sum_j o_j over the same j

  // The sum of all exponentials contains the 1 of the maximum, which hides the digits of the others in a confident row.
  // Therefore it is kept without that 1.
  SCE_HD acc_t total() const { return acc_t(1) + rest; }
  SCE_HD acc_t log_total() const {
    return acc_t(0) <= rest && rest < acc_t(1) ? log_of_1_plus(rest) : logarithm(total());  // the latter is faster
  }
  SCE_HD bool empty() const { return rest == acc_t(-1); }

  // Returns true if `rest`, computed as a sum of all exponentials minus 1, has so few digits that the others must be
  // added again.
  SCE_HD bool hides_rest() const { return rest > acc_t(-1) && rest < acc_t(1); }

  // The maximum must stay that of the same logits, or exceed it: then 1 + rest becomes the sum without the new maximum.
  // Loops over merges are vectorized, so numbers are copied before one of two is selected.
  SCE_HD void merge(const RowStats& other) {
    const RowStats mine = *this, its = other;
    const bool higher = mine.max >= its.max;
    const acc_t to = higher ? mine.max : its.max, low = higher ? its.max : mine.max;
    const acc_t rest_high = higher ? mine.rest : its.rest, rest_low = higher ? its.rest : mine.rest;
    max = to;
    rest = rest_high + (acc_t(1) + rest_low) * exponential(low - to);
    const acc_t moved = mine.weighted + (mine.weight != acc_t(0) ? mine.weight * (mine.max - to) : acc_t(0));
    weighted = moved + (its.weighted + (its.weight != acc_t(0) ? its.weight * (its.max - to) : acc_t(0)));
    weight = mine.weight + its.weight;
  }

  // Adds the logits z[begin, end). NaN does not become the maximum but enters the sum.
  template <typename logits_t>
  SCE_HD void push(const logits_t& z, int64_t begin, int64_t end) {
    RowStats added;
    acc_t to = added.max;
    SCE_SIMD_MAX(to)
    for (int64_t i = begin; i < end; ++i) to = larger(acc_t(z[i]), to);
    added.max = to;
    const auto term = [&](int64_t i) { return exponential(z[i] - to); };
    added.rest = sum_in_lanes<acc_t>(begin, end, term) - acc_t(1);
    if (added.hides_rest()) {
      int64_t at = begin;
      while (!(z[at] == to)) ++at;
      added.rest = sum_in_lanes<acc_t>(begin, at, term) + sum_in_lanes<acc_t>(at + 1, end, term);
    }
    merge(added);
  }

  // Adds the smoothing terms of the same n logits, after push. A class of weight 0 adds 0 even if its logit is -inf.
  SCE_HD void push_weighted(const acc_t* z, const acc_t* class_weight, int64_t n) {
    const acc_t to = max;
    if (!class_weight) {
      weighted += sum_in_lanes<acc_t, kWideLanes>(0, n, [&](int64_t i) { return z[i] - to; });
      weight += static_cast<acc_t>(n);
      return;
    }
    weighted += sum_in_lanes<acc_t, kWideLanes>(0, n, [&](int64_t i) {
      const acc_t o = class_weight[i];
      return o == acc_t(0) ? acc_t(0) : o * (z[i] - to);
    });
    weight += sum_in_lanes<acc_t, kWideLanes>(0, n, [&](int64_t i) { return class_weight[i]; });
  }
};

// Holds sums over the entries of a row. z is relative to the row's maximum, which keeps the loss exact if all logits
// are large.
template <typename acc_t>
struct TargetStats {
  acc_t dot = 0;  // sum_k w~_k (z_{c_k} - max)
  acc_t mass = 0;  // sum_k w~_k

  // Changes the maximum that `dot` is relative to.
  SCE_HD void move_max(acc_t from, acc_t to) {
    if (mass != acc_t(0)) dot += mass * (from - to);
  }
  SCE_HD void merge(const TargetStats& other) {
    dot += other.dot;
    mass += other.mass;
  }
};

// Holds statistics of some of a row's logits and of the entries among them. They form a monoid too.
template <typename acc_t>
struct PartStats {
  RowStats<acc_t> row;
  TargetStats<acc_t> entries;  // relative to row.max

  SCE_HD void merge(PartStats other) {
    const acc_t to = larger(other.row.max, row.max);
    entries.move_max(row.max, to);
    other.entries.move_max(other.row.max, to);
    row.merge(other.row);
    entries.merge(other.entries);
  }
};

// Accumulates many entries. `sum_t` has `add` and a compensated sum.
template <typename sum_t>
struct TargetSums {
  sum_t dot, mass;

  // Adds an entry of weight w~. Its logit z() is evaluated only if the weight is not 0, so -inf logits add 0.
  template <typename acc_t, typename logit_t>
  SCE_HD void add(acc_t w, acc_t max, const logit_t& z) {
    if (w == acc_t(0)) return;
    dot.add(w * (z() - max));
    mass.add(w);
  }
  template <typename acc_t>
  SCE_HD TargetStats<acc_t> stats() const {
    return {static_cast<acc_t>(dot.sum), static_cast<acc_t>(mass.sum)};
  }
};

template <typename acc_t>
struct RowLoss {
  acc_t loss, lse;
  acc_t lse_residual;  // rounding error of lse: lse + lse_residual has twice the precision

  // If all logits of a row are -inf, lse is -inf and the loss is NaN, as with log_softmax.
  SCE_HD RowLoss(const RowStats<acc_t>& row, const TargetStats<acc_t>& target, const LossOptions& options,
                 int64_t num_classes) {
    const acc_t log_sum = row.log_total();
    lse = row.max + log_sum;
    lse_residual = (row.max - lse) + log_sum;
    const acc_t e = static_cast<acc_t>(options.label_smoothing);
    loss = (acc_t(1) - e) * (target.mass * log_sum - target.dot);
    if (e != acc_t(0)) loss += e / static_cast<acc_t>(num_classes) * (row.weight * log_sum - row.weighted);
    if (options.z_loss != 0) loss += static_cast<acc_t>(options.z_loss) * lse * lse;
  }
};

// Accumulates the masked mean of elements x_i with mask weights w_i (1 for true):
//
//   m = sum_i where(w_i = 0, 0, w_i x_i) / d,   d = sum_i w_i, or 1 if that is 0
//   dm/dx_i = where(w_i = 0, 0, w_i / d)
template <typename acc_t>
struct MaskedSum {
  acc_t sum = 0, weight = 0;

  // Selects instead of multiplying, because masked elements may be NaN or inf. The gradient is term(1 / d, w).
  SCE_HD static acc_t term(acc_t x, acc_t w) { return w == acc_t(0) ? acc_t(0) : w * x; }
  template <typename other_t>
  SCE_HD void merge(const MaskedSum<other_t>& other) {
    sum += static_cast<acc_t>(other.sum);
    weight += static_cast<acc_t>(other.weight);
  }
  SCE_HD acc_t divisor() const { return weight == acc_t(0) ? acc_t(1) : weight; }
  SCE_HD acc_t mean() const { return sum / divisor(); }
};

template <typename acc_t>
struct GradientCoefficients {
  acc_t a, b, d, lse, lse_residual;
  acc_t mass = 0, other = 0;  // a = d mass + other

  SCE_HD GradientCoefficients(acc_t a, acc_t b, acc_t d, acc_t lse, acc_t lse_residual)
      : a(a), b(b), d(d), lse(lse), lse_residual(lse_residual), other(a) {}

  // weight_sum is O, grad is g, and grad_lse is g_lse.
  SCE_HD GradientCoefficients(acc_t grad, acc_t grad_lse, acc_t mass, acc_t lse, acc_t lse_residual, acc_t weight_sum,
                              const LossOptions& options, int64_t num_classes)
      : lse(lse), lse_residual(lse_residual) {
    const acc_t e = static_cast<acc_t>(options.label_smoothing);
    const acc_t share = e / static_cast<acc_t>(num_classes);
    acc_t per_q = (acc_t(1) - e) * mass + share * weight_sum;
    if (options.z_loss != 0) per_q += acc_t(2) * static_cast<acc_t>(options.z_loss) * lse;
    a = grad * per_q + grad_lse;
    this->mass = mass;
    other = grad * (share * weight_sum) + grad_lse;
    if (options.z_loss != 0) other += grad * (acc_t(2) * static_cast<acc_t>(options.z_loss) * lse);
    b = e == acc_t(0) ? acc_t(0) : grad * share;  // avoids -0, which would change the sign of zero gradients
    d = grad * (acc_t(1) - e);
  }

  SCE_HD acc_t log_prob(acc_t z) const { return (z - lse) - lse_residual; }
  // These return dloss/dz_j: a q_j for most classes, minus b o_j with label smoothing, minus d sum w~ if the class has
  // entries.
  SCE_HD acc_t at(acc_t z) const { return a * exponential(log_prob(z)); }
  // Returns the factor that turns an exponential relative to `max` into a q_j.
  SCE_HD acc_t per_exp(acc_t max) const { return a * exponential(log_prob(max)); }
  SCE_HD acc_t at(acc_t z, acc_t class_weight) const { return at(z) - b * class_weight; }
  SCE_HD acc_t at(acc_t z, acc_t class_weight, acc_t target_weight) const {
    return at(z, class_weight, target_weight, mass - target_weight);
  }
  // Returns true if q is so large that q - 1 would lose digits. At most one class of a row is.
  SCE_HD bool holds_most(acc_t z) const { return log_prob(z) > acc_t(-0.5); }
  // `others` is the sum of w~ over the other classes.
  SCE_HD acc_t at(acc_t z, acc_t class_weight, acc_t target_weight, acc_t others) const {
    return holds_most(z) ? at_most(z, class_weight, others) : at(z, class_weight) - d * target_weight;
  }
  // If a class holds most, it has nearly all of a: a q - d w~ is then computed as a (q - 1) + d others + other, where
  // q - 1 is no difference of rounded numbers.
  SCE_HD acc_t at_most(acc_t z, acc_t class_weight, acc_t others) const {
    return a * exponential_less_1(log_prob(z)) + (d * others + (other - b * class_weight));
  }
  // Returns dloss/dw of an entry. If its factor is 0 (zero grad_output, full label smoothing or class weight 0), it is
  // 0 even if the logit is -inf or NaN.
  SCE_HD acc_t of_value(acc_t z, acc_t class_weight) const {
    const acc_t by = d * class_weight;
    return by == acc_t(0) ? acc_t(0) : -by * log_prob(z);
  }
};

}  // namespace sparse_ce
