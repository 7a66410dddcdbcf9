// avx2.h - Implements the loops over plain logits (exp2_affine.h) with AVX2. Four vectors are processed together, and 8
// logits take 13 instructions. Compilers need half as much time again for plain C++.
#pragma once

#include "avx2_groups.h"

#ifdef SCE_X86
#include <algorithm>
#include <cmath>

namespace sparse_ce {
namespace cpu {
namespace avx2 {

// Logits may exceed the reference of a sum by this much. The error of an exponential grows with its exponent, to at
// most 2.5e-7 of the exponential.
constexpr float kNear = 4;

// Shorter tiles use plain C++, which has less overhead before and after the loop.
constexpr int64_t kShortest = 512;

// If true, the maximum is found before the exponentials are computed, because these may overwrite float32 logits. The
// maximum of 16-bit logits is found in the same loop, which avoids a second conversion. In the rare case that it is too
// far above the reference, the exponentials are recomputed.
template <typename scalar_t>
constexpr bool kMaximumFirst = sizeof(scalar_t) == 4;

// Returns how many exponentials are stored for the last n < kGroup logits: a whole group if `load` changes their order.
template <typename scalar_t>
constexpr int64_t stored_of_last(int64_t n) {
  return std::is_same_v<scalar_t, BFloat16> ? kGroup : n;
}

// Returns the maximum of n columns.
template <typename scalar_t>
SCE_AVX2 float maximum(const scalar_t* x, int64_t n) {
  __m256 max[2] = {_mm256_set1_ps(-INFINITY), _mm256_set1_ps(-INFINITY)};
  Group group;
  int64_t i = 0;
  for (; i + 2 * kGroup <= n; i += 2 * kGroup) {
    SCE_EACH(j, 2) {
      load(x + i + j * kGroup, group);
      max[j] = higher(group, max[j]);
    }
  }
  for (; i < n; i += kGroup) {
    n - i < kGroup ? load_first(x + i, n - i, group) : load(x + i, group);
    max[0] = higher(group, max[0]);
  }
  return highest_of(_mm256_max_ps(max[0], max[1]));
}

template <bool multiplies = false>
class Exponential {
 public:
  SCE_AVX2_INLINE explicit Exponential(const Line& line)
      : scale_(_mm256_set1_ps(line.factor)), slope_(_mm256_set1_ps(line.slope)), offset_(_mm256_set1_ps(line.offset)) {}

  // Computes the exponential of a line as fit * power and stores the fit in x. The polynomial in the remainder of the
  // exponent, at most 1/2, has a relative error of 1.8e-7 (mean 9e-8) including rounding. The result is 0 for -inf and
  // NaN for NaN.
  SCE_AVX2_INLINE void raise(Group& x, Group& power) const {
    constexpr float kFit[] = {1.00000012f, 0.693147242f, 0.240219116f, 0.0555008352f, 0.00968556013f, 0.00135216f};
    if constexpr (multiplies) SCE_EACH(k, kVectors) x.vector[k] = _mm256_mul_ps(x.vector[k], scale_);
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_fmadd_ps(x.vector[k], slope_, offset_);
    split(x, power);
    x = polynomial(kFit, x);
  }

  // Returns the exponential of one logit, bitwise equal to that of `raise`.
  SCE_AVX2_INLINE float power(float logit) const {
    Group x, power;
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_set1_ps(logit);
    raise(x, power);
    return _mm256_cvtss_f32(_mm256_mul_ps(x.vector[0], power.vector[0]));
  }

 private:
  const __m256 scale_, slope_, offset_;
};

// Holds per-lane results for some logits: their maximum, the sum of exponentials relative to a reference and, for label
// smoothing, the sum of distances from the reference.
struct Lanes {
  __m256 max, sum[2], distance[2];

  SCE_AVX2_INLINE Lanes() {
    max = _mm256_set1_ps(-INFINITY);
    SCE_EACH(k, 2) sum[k] = distance[k] = _mm256_setzero_ps();
  }

  SCE_AVX2_INLINE float total() const { return sum_of(_mm256_add_ps(sum[0], sum[1])); }
  SCE_AVX2_INLINE void merge(const Lanes& other) {
    max = _mm256_max_ps(other.max, max);
    SCE_EACH(k, 2) sum[k] = _mm256_add_ps(other.sum[k], sum[k]);
    SCE_EACH(k, 2) distance[k] = _mm256_add_ps(other.distance[k], distance[k]);
  }
};

// Represents the logit that exponentials are relative to.
class Reference {
 public:
  explicit Reference(float scale) : scale_(scale) {}

  // Returns true if exponentials of logits up to `highest` may use this reference. Otherwise `highest` becomes the
  // reference.
  bool reaches(float highest) const { return highest <= limit_; }
  void move(float highest) {
    logit_ = highest;
    usable_ = std::fabs(scale_ * highest) < kLargest;
    limit_ = usable_ ? highest + kNear / scale_ : -INFINITY;
  }
  bool usable() const { return usable_; }
  float logit() const { return logit_; }
  float value() const { return scale_ * logit_; }

 private:
  const float scale_;
  float logit_ = 0, limit_ = -INFINITY;
  bool usable_ = false;
};

template <bool keep, bool smoothed, typename scalar_t, typename exponential_t>
SCE_AVX2_INLINE void push(Group x, const exponential_t& exponential, __m256 reference, Lanes& lanes,
                          [[maybe_unused]] float* exps) {
  Group power;
  if constexpr (!kMaximumFirst<scalar_t>) lanes.max = higher(x, lanes.max);
  if constexpr (smoothed) {
    SCE_EACH(k, kVectors)
    lanes.distance[k % 2] = _mm256_add_ps(_mm256_sub_ps(x.vector[k], reference), lanes.distance[k % 2]);
  }
  exponential.raise(x, power);
  if constexpr (keep) {
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_mul_ps(x.vector[k], power.vector[k]);
    store(x, exps);
    SCE_EACH(k, kVectors) lanes.sum[k % 2] = _mm256_add_ps(x.vector[k], lanes.sum[k % 2]);
  } else {  // bitwise equal, because multiplying by a power of two is exact
    SCE_EACH(k, kVectors) lanes.sum[k % 2] = _mm256_fmadd_ps(x.vector[k], power.vector[k], lanes.sum[k % 2]);
  }
}

// Prefetches the next columns of this tile, and the columns that are processed after it.
template <typename scalar_t, typename next_t>
SCE_AVX2_INLINE void prefetch(const scalar_t* x, const next_t* next) {
  for (int64_t byte = 0; !kMaximumFirst<scalar_t> && byte < kGroup * int64_t(sizeof(scalar_t)); byte += kLine)
    _mm_prefetch(reinterpret_cast<const char*>(x) + kSoon + byte, _MM_HINT_T0);
  for (int64_t byte = 0; byte < kGroup * int64_t(sizeof(next_t)); byte += kLine)
    _mm_prefetch(reinterpret_cast<const char*>(next) + byte, _MM_HINT_T1);
}

// Processes a tile, n <= kExpTile. `exps` (n,) may alias float32 x. They are in the order of `load`; see stored_of_last
// for those after the last whole group.
template <bool multiplies, bool keep, bool smoothed, typename scalar_t, typename next_t>
SCE_AVX2 Lanes push_tile(const scalar_t* x, int64_t n, const Line& line, float reference, const next_t* next,
                         float* exps) {
  const Exponential<multiplies> exponential(line);
  const __m256 beside = _mm256_set1_ps(reference);
  Lanes lanes;
  Group group;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    prefetch(x + i, next + i);
    for (int64_t byte = 0; keep && byte < kGroup * int64_t(sizeof(float)); byte += kLine)
      __builtin_prefetch(reinterpret_cast<char*>(exps + i) + kSoon + byte, /*write=*/1);
    load(x + i, group);
    push<keep, smoothed, scalar_t>(group, exponential, beside, lanes, exps + i);
  }
  if (i == n) return lanes;
  load_first(x + i, n - i, group);
  float distance = 0;
  for (int64_t k = i; smoothed && k < n; ++k) distance += to_acc(x[k]) - reference;
  alignas(32) float some[kGroup];
  push<keep, false, scalar_t>(group, exponential, beside, lanes, some);
  if constexpr (keep) std::copy(some, some + stored_of_last<scalar_t>(n - i), exps + i);
  lanes.distance[0] = _mm256_add_ps(_mm256_setr_ps(distance, 0, 0, 0, 0, 0, 0, 0), lanes.distance[0]);
  return lanes;
}
template <bool multiplies, bool smoothed, typename scalar_t, typename next_t>
SCE_AVX2 Lanes push_tile(const scalar_t* x, int64_t n, const Line& line, float reference, const next_t* next,
                         float* exps) {
  return exps ? push_tile<multiplies, true, smoothed>(x, n, line, reference, next, exps)
              : push_tile<multiplies, false, smoothed>(x, n, line, reference, next, exps);
}

// Returns the sum of a tile's exponentials without the first logit that equals `most`: from `exps`, where `push_tile`
// stored them, or null.
template <typename scalar_t, bool multiplies>
SCE_AVX2 __attribute__((noinline)) float push_others(const scalar_t* x, int64_t n, float most,
                                                     const Exponential<multiplies>& exponential, const float* exps) {
  const float power_of_most = exps ? exponential.power(most) : 0;
  __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  bool found = false;
  Group group, power;
  const auto leave_out = [&](float value, float nothing) SCE_AVX2 SCE_INLINE {
    for (int k = 0; k < kVectors && !found; ++k) {
      const __m256 equal = _mm256_cmp_ps(group.vector[k], _mm256_set1_ps(value), _CMP_EQ_OQ);
      const int lanes = _mm256_movemask_ps(equal);
      if (lanes == 0) continue;
      alignas(32) float some[8];
      _mm256_store_ps(some, group.vector[k]);
      some[__builtin_ctz(lanes)] = nothing;
      group.vector[k] = _mm256_load_ps(some);
      found = true;
    }
  };
  for (int64_t i = 0; i < n; i += kGroup) {
    if (exps) {
      alignas(32) float some[kGroup] = {};
      const int64_t m = n - i < kGroup ? stored_of_last<scalar_t>(n - i) : kGroup;
      std::copy(exps + i, exps + i + m, some);
      SCE_EACH(k, kVectors) group.vector[k] = _mm256_loadu_ps(some + 8 * k);
      leave_out(power_of_most, 0);
      SCE_EACH(k, kVectors) sum[k % 2] = _mm256_add_ps(group.vector[k], sum[k % 2]);
    } else {
      n - i < kGroup ? load_first(x + i, n - i, group) : load(x + i, group);
      leave_out(most, -INFINITY);
      exponential.raise(group, power);
      SCE_EACH(k, kVectors) sum[k % 2] = _mm256_fmadd_ps(group.vector[k], power.vector[k], sum[k % 2]);
    }
  }
  return sum_of(_mm256_add_ps(sum[0], sum[1]));
}

// Accumulates tiles with the same reference, which are added to `row` together.
// If `summed` is false, the sum is not used.
template <typename scalar_t>
class Stretch {
 public:
  SCE_AVX2_INLINE Stretch(float scale, bool smoothed, bool summed, RowStats<float>& row)
      : reference_(scale), scale_(scale), smoothed_(smoothed), summed_(summed), row_(row) {}

  // Returns the reference of the last tile's exponentials.
  float reference() const { return reference_.value(); }

  // Adds a tile. Returns false if no reference is suitable for it.
  SCE_AVX2_INLINE bool push(const scalar_t* x, int64_t n, const scalar_t* next, float* exps) {
    float highest = -INFINITY;
    if (kMaximumFirst<scalar_t> || !reference_.usable()) {
      highest = maximum(x, n);
      if (!reference_.reaches(highest)) move(highest);
    }
    if (!reference_.usable()) return false;
    Lanes tile = raise(x, n, next, exps);
    if constexpr (kMaximumFirst<scalar_t>) {
      tile.max = _mm256_set1_ps(highest);
    } else if (!reference_.reaches(highest_of(tile.max))) {
      move(highest_of(tile.max));
      if (!reference_.usable()) return false;
      tile = raise(x, n, next, exps);
    }
    const float of_tile = kMaximumFirst<scalar_t> ? highest : highest_of(tile.max);
    if (of_tile > top_.most) {
      lanes_.merge(lanes_of_top_);
      lanes_of_top_ = tile;
      top_ = {x, n, exps, of_tile};
    } else {
      lanes_.merge(tile);
    }
    columns_ += n;
    return true;
  }

  // Uses the exponential of the maximum exactly as it was added: a row with all its mass at one class then sums to 1.
  SCE_AVX2_INLINE void finish() {
    if (columns_ == 0) return;
    const Exponential<true> exponential(Line(scale_, reference_.value()));
    const float most = top_.most, count = static_cast<float>(columns_), power = exponential.power(most);
    const float others = lanes_.total();
    lanes_.merge(lanes_of_top_);
    RowStats<float> stats;
    stats.max = scale_ * most;
    stats.rest = lanes_.total() / power - 1;
    if (summed_ && stats.hides_rest()) {
      // Without the maximum in the sum, the rounding error of its exponent does not cancel.
      const auto to_most = static_cast<float>(std::exp(static_cast<double>(stats.max) - reference_.value()));
      stats.rest = (others + push_others(top_.x, top_.n, most, exponential, top_.exps)) /
                   (exponential.power(reference_.logit()) * to_most);
    }
    if (smoothed_) {
      const float distance = sum_of(_mm256_add_ps(lanes_.distance[0], lanes_.distance[1]));
      stats.weighted = scale_ * (distance - count * (most - reference_.logit()));
      stats.weight = count;
    }
    row_.merge(stats);
    lanes_ = lanes_of_top_ = Lanes();
    top_ = Top();
    columns_ = 0;
  }

 private:
  SCE_AVX2_INLINE void move(float highest) {
    finish();
    reference_.move(highest);
  }

  // Adds a tile; skips its maximum if that is already known.
  SCE_AVX2_INLINE Lanes raise(const scalar_t* x, int64_t n, const scalar_t* next, float* exps) const {
    const Line line(scale_, reference_.value());
    return line.multiplies() ? raise<true>(line, x, n, next, exps) : raise<false>(line, x, n, next, exps);
  }

  template <bool multiplies>
  SCE_AVX2_INLINE Lanes raise(const Line& line, const scalar_t* x, int64_t n, const scalar_t* next, float* exps) const {
    return smoothed_ ? push_tile<multiplies, true>(x, n, line, reference_.logit(), next, exps)
                     : push_tile<multiplies, false>(x, n, line, reference_.logit(), next, exps);
  }

  Reference reference_;
  const float scale_;
  const bool smoothed_, summed_;
  RowStats<float>& row_;
  // The tile with the maximum is kept apart. If the maximum hides the digits of the other exponentials, the tile is
  // added again without it.
  struct Top {
    const scalar_t* x = nullptr;
    int64_t n = 0;
    const float* exps = nullptr;
    float most = -INFINITY;
  };
  Top top_;
  Lanes lanes_, lanes_of_top_;
  int64_t columns_ = 0;
};

// Adds scale * logits to `row`, tile by tile; scale > 0. stored(begin) returns the memory for a tile's exponentials and
// for their reference, which is stored as the maximum. plain(begin, end) adds a tile, and stores both, if these loops
// do not apply. done(begin, end) is called after either.
template <typename scalar_t, typename stored_t, typename plain_t, typename done_t>
SCE_AVX2 __attribute__((noinline)) void push(const scalar_t* logits, int64_t n, float scale, bool smoothed, bool summed,
                                             const scalar_t* next, RowStats<float>& row, const stored_t& stored,
                                             const plain_t& plain, const done_t& done) {
  Stretch<scalar_t> stretch(scale, smoothed, summed, row);
  for (int64_t begin = 0; begin < n; begin += kExpTile) {
    const int64_t end = std::min(n, begin + kExpTile), m = end - begin;
    const Exps<float> memory = stored(begin);
    if (m >= kShortest && stretch.push(logits + begin, m, end < n ? logits + end : next, memory.exps)) {
      if (memory.maxima) *memory.maxima = stretch.reference();
    } else {
      plain(begin, end);
    }
    done(begin, end);
  }
  stretch.finish();
}

// Returns true if the stored exponentials of a tile of n come from `push`, relative to `max`.
inline bool raised_here(float max, int64_t n) { return n >= kShortest && std::fabs(max) < kLargest; }

// Returns the sum of the exponentials of z (n,) relative to their maximum `max`, without that of the maximum; see above
// for `exps`. Prefetches the memory at `next`.
template <typename next_t>
SCE_AVX2 float rest_beside(const float* z, int64_t n, float max, const next_t* next, float* exps) {
  const Line line(1, max);
  const Lanes lanes = push_tile<false, false>(z, n, line, max, next, exps);
  const Exponential<> exponential(line);
  const float power = exponential.power(max);
  const RowStats<float> stats{max, lanes.total() / power - 1};
  return stats.hides_rest() ? push_others(z, n, max, exponential, exps) / power : stats.rest;
}

// Returns the factor that turns an exponential relative to `max` into a exp(scale x - lse).
inline float per_exp(float max, float scale, const GradientCoefficients<float>& c) {
  return c.a * static_cast<float>(std::exp2(-Line(scale, max).where_one(c.lse, c.lse_residual)));
}

// Computes factor * x - less, rounded.
template <typename scalar_t>
SCE_AVX2 void narrow(const float* exps, int64_t n, float factor, float less, scalar_t* out) {
  const __m256 by = _mm256_set1_ps(factor), minus = _mm256_set1_ps(less);
  Group group;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    SCE_EACH(k, kVectors) group.vector[k] = _mm256_fmsub_ps(_mm256_loadu_ps(exps + i + 8 * k), by, minus);
    store(group, out + i);
  }
  if (i == n) return;
  alignas(32) float some[kGroup] = {};
  std::copy(exps + i, exps + i + stored_of_last<scalar_t>(n - i), some);
  SCE_EACH(k, kVectors) group.vector[k] = _mm256_fmsub_ps(_mm256_loadu_ps(some + 8 * k), by, minus);
  store_first(group, n - i, out + i);
}

// Writes dz/dx (a exp(z - lse) - b) from the exponentials that `push` stored relative to `max`, for n <= kExpTile plain
// logits.
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void gradient(const float* exps, float max, int64_t n, float scale,
                                                 const GradientCoefficients<float>& c,
                                                 const Destination<scalar_t>& to) {
  const float factor = scale * per_exp(max, scale, c);
  alignas(64) scalar_t rounded[kExpTile];
  narrow(exps, n, factor, c.b * scale, to.nontemporal ? rounded : to.gradient);
  if (to.nontemporal) stream_copy<InstructionSet::kAvx2>(rounded, n, to.gradient);
}

}  // namespace avx2
}  // namespace cpu
}  // namespace sparse_ce
#endif
