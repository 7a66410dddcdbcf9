// avx2.h - the loops over plain logits (line.h) with AVX2: 8 logits in 13 instructions, four vectors at a time, which
// compilers make of plain C++ in half as much time again.
#pragma once

#include "convert.h"
#include "line.h"
#include "tile.h"

#ifdef SCE_X86
#include <algorithm>
#include <cmath>

namespace sparse_ce {
namespace cpu {
namespace avx2 {

#define SCE_AVX2_INLINE SCE_AVX2 inline __attribute__((always_inline))

constexpr int kVectors = 4;
constexpr int64_t kGroup = 8 * kVectors;  // columns

// Logits may exceed the reference of a sum by this much. An exponent has an error that grows with it: 2.5e-7 of the
// exponential at the most.
constexpr float kNear = 4;

// A tile of fewer is left to plain C++, which has less to do before and after.
constexpr int64_t kShortest = 512;

// Logits of 16 bits whose maximum is found while they are raised, once more where they turn out to be too far above the
// reference, which is rare: 6 instructions of 16 logits less. Those of float32 may be overwritten meanwhile.
template <typename scalar_t>
constexpr bool kMaximumFirst = sizeof(scalar_t) == 4;

struct Group {
  __m256 vector[kVectors];
};

SCE_AVX2_INLINE void load(const float* x, Group& out) {
  SCE_EACH(k, kVectors) out.vector[k] = _mm256_loadu_ps(x + 8 * k);
}
SCE_AVX2_INLINE void load(const Half* x, Group& out) {
  SCE_EACH(k, kVectors) out.vector[k] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 8 * k)));
}
// The even ones of 16, then the odd ones: one instruction each. In this order their exponentials are kept.
SCE_AVX2_INLINE void load(const BFloat16* x, Group& out) {
  SCE_EACH(k, kVectors / 2) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * k));
    out.vector[2 * k] = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    out.vector[2 * k + 1] =
        _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
}

// The inverse, to nearest. A tie of BFloat16 goes away from zero (round_to in convert.h).
SCE_AVX2_INLINE void store(const Group& x, float* out) {
  SCE_EACH(k, kVectors) _mm256_storeu_ps(out + 8 * k, x.vector[k]);
}
SCE_AVX2_INLINE void store(const Group& x, Half* out) {
  SCE_EACH(k, kVectors)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8 * k), _mm256_cvtps_ph(x.vector[k], _MM_FROUND_TO_NEAREST_INT));
}
SCE_AVX2_INLINE void store(const Group& x, BFloat16* out) {
  const __m256i half = _mm256_set1_epi32(0x8000);
  SCE_EACH(k, kVectors / 2) {
    const __m256i even = _mm256_add_epi32(_mm256_castps_si256(x.vector[2 * k]), half);
    const __m256i odd = _mm256_add_epi32(_mm256_castps_si256(x.vector[2 * k + 1]), half);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * k),
                        _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa));
  }
}

// The first n < kGroup of them; -inf for the others, which changes neither a maximum nor a sum of exponentials.
template <typename scalar_t>
SCE_AVX2_INLINE void load_first(const scalar_t* x, int64_t n, Group& out) {
  alignas(32) scalar_t some[kGroup];
  for (int64_t i = 0; i < n; ++i) some[i] = x[i];
  for (int64_t i = n; i < kGroup; ++i) from_acc(-INFINITY, some[i]);
  load(some, out);
}
template <typename scalar_t>
SCE_AVX2_INLINE void store_first(const Group& x, int64_t n, scalar_t* out) {
  alignas(32) scalar_t some[kGroup];
  store(x, some);
  for (int64_t i = 0; i < n; ++i) out[i] = some[i];
}

SCE_AVX2_INLINE float highest_of(__m256 x) {
  __m128 max = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  max = _mm_max_ps(max, _mm_movehl_ps(max, max));
  return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
}
SCE_AVX2_INLINE float sum_of(__m256 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// NaN is never the larger one.
SCE_AVX2_INLINE __m256 higher(const Group& x, __m256 max) {
  SCE_EACH(k, kVectors) max = _mm256_max_ps(x.vector[k], max);
  return max;
}

// Of n columns.
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

class Exponential {
 public:
  SCE_AVX2_INLINE explicit Exponential(const Line& line)
      : slope_(_mm256_set1_ps(line.slope)), offset_(_mm256_set1_ps(line.offset)) {}

  // 2^(slope x + offset) = fit * power: a fit for what is left of the exponent, at most 1/2, of relative error 1.8e-7
  // (9e-8 in the mean) with the rounding of its terms, in place of x. 0 for -inf and NaN for NaN, as exp has it.
  SCE_AVX2_INLINE void raise(Group& x, Group& power) const {
    // Adding 1.5 * 2^23 rounds to an integer n in the low bits of the mantissa; 127 more makes them 2^n's exponent.
    const __m256 round = _mm256_set1_ps(12582912.0f + 127.0f), lowest = _mm256_set1_ps(-127);
    constexpr float kFit[] = {1.00000012f, 0.693147242f, 0.240219116f, 0.0555008352f, 0.00968556013f, 0.00135216f};
    Group fit;
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_fmadd_ps(x.vector[k], slope_, offset_);
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_max_ps(lowest, x.vector[k]);  // NaN stays
    SCE_EACH(k, kVectors) power.vector[k] = _mm256_add_ps(x.vector[k], round);
    SCE_EACH(k, kVectors)
    x.vector[k] = _mm256_sub_ps(x.vector[k], _mm256_sub_ps(power.vector[k], round));
    SCE_EACH(k, kVectors)
    power.vector[k] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(power.vector[k]), 23));
    SCE_EACH(k, kVectors)
    fit.vector[k] = _mm256_fmadd_ps(_mm256_set1_ps(kFit[5]), x.vector[k], _mm256_set1_ps(kFit[4]));
    SCE_EACH(i, 4)
    SCE_EACH(k, kVectors) fit.vector[k] = _mm256_fmadd_ps(fit.vector[k], x.vector[k], _mm256_set1_ps(kFit[3 - i]));
    x = fit;
  }

  // Of one logit, with the bits that it has among others.
  SCE_AVX2_INLINE float power(float logit) const {
    Group x, power;
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_set1_ps(logit);
    raise(x, power);
    return _mm256_cvtss_f32(_mm256_mul_ps(x.vector[0], power.vector[0]));
  }

 private:
  const __m256 slope_, offset_;
};

// The maximum of some logits, the sum of their exponentials relative to a reference and, for label smoothing, that of
// their distances from it, lane by lane.
struct Lanes {
  __m256 max, sum[2], distance[2];

  SCE_AVX2_INLINE Lanes() {
    max = _mm256_set1_ps(-INFINITY);
    SCE_EACH(k, 2) sum[k] = distance[k] = _mm256_setzero_ps();
  }

  SCE_AVX2_INLINE void merge(const Lanes& other) {
    max = _mm256_max_ps(other.max, max);
    SCE_EACH(k, 2) sum[k] = _mm256_add_ps(other.sum[k], sum[k]);
    SCE_EACH(k, 2) distance[k] = _mm256_add_ps(other.distance[k], distance[k]);
  }
};

// Logits beside which others are raised.
class Reference {
 public:
  explicit Reference(float scale) : scale_(scale) {}

  // Whether logits up to `highest` may be raised; where not, it becomes the reference.
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

template <bool keep, bool smoothed, typename scalar_t>
SCE_AVX2_INLINE void push(Group x, const Exponential& exponential, __m256 reference, Lanes& lanes,
                          [[maybe_unused]] float* powers) {
  Group power;
  if constexpr (!kMaximumFirst<scalar_t>) lanes.max = higher(x, lanes.max);
  if constexpr (smoothed) {
    SCE_EACH(k, kVectors)
    lanes.distance[k % 2] = _mm256_add_ps(_mm256_sub_ps(x.vector[k], reference), lanes.distance[k % 2]);
  }
  exponential.raise(x, power);
  if constexpr (keep) {
    SCE_EACH(k, kVectors) x.vector[k] = _mm256_mul_ps(x.vector[k], power.vector[k]);
    store(x, powers);
    SCE_EACH(k, kVectors) lanes.sum[k % 2] = _mm256_add_ps(x.vector[k], lanes.sum[k % 2]);
  } else {  // the same bits: a power of two is multiplied without rounding
    SCE_EACH(k, kVectors) lanes.sum[k % 2] = _mm256_fmadd_ps(x.vector[k], power.vector[k], lanes.sum[k % 2]);
  }
}

// Asks for the columns that come soon, and for those that are worked on after the tile.
template <typename scalar_t>
SCE_AVX2_INLINE void prefetch(const scalar_t* x, const scalar_t* next) {
  for (int64_t byte = 0; byte < kGroup * int64_t(sizeof(scalar_t)); byte += kLine) {
    if constexpr (!kMaximumFirst<scalar_t>) _mm_prefetch(reinterpret_cast<const char*>(x) + kSoon + byte, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(next) + byte, _MM_HINT_T1);
  }
}

// A tile, n <= kPowers. `powers` (n,), which may be x where that is float32, in the order of `load`: of logits of 16
// bits (n,) rounded up to whole groups.
template <bool keep, bool smoothed, typename scalar_t>
SCE_AVX2 Lanes push_tile(const scalar_t* x, int64_t n, const Line& line, float reference, const scalar_t* next,
                         float* powers) {
  const Exponential exponential(line);
  const __m256 beside = _mm256_set1_ps(reference);
  Lanes lanes;
  Group group;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    prefetch(x + i, next + i);
    if constexpr (keep) __builtin_prefetch(reinterpret_cast<char*>(powers + i) + kSoon, /*write=*/1);
    if constexpr (keep) __builtin_prefetch(reinterpret_cast<char*>(powers + i) + kSoon + kLine, /*write=*/1);
    load(x + i, group);
    push<keep, smoothed, scalar_t>(group, exponential, beside, lanes, powers + i);
  }
  if (i == n) return lanes;
  load_first(x + i, n - i, group);
  float distance = 0;
  for (int64_t k = i; smoothed && k < n; ++k) distance += to_acc(x[k]) - reference;
  alignas(32) float some[kGroup];
  push<keep, false, scalar_t>(group, exponential, beside, lanes, some);
  if constexpr (keep) std::copy(some, some + (kMaximumFirst<scalar_t> ? n - i : kGroup), powers + i);
  lanes.distance[0] = _mm256_add_ps(_mm256_setr_ps(distance, 0, 0, 0, 0, 0, 0, 0), lanes.distance[0]);
  return lanes;
}
template <bool smoothed, typename scalar_t>
SCE_AVX2 Lanes push_tile(const scalar_t* x, int64_t n, const Line& line, float reference, const scalar_t* next,
                         float* powers) {
  return powers ? push_tile<true, smoothed>(x, n, line, reference, next, powers)
                : push_tile<false, smoothed>(x, n, line, reference, next, powers);
}

// Tiles with the same reference, which are added to `row` together.
class Stretch {
 public:
  SCE_AVX2_INLINE Stretch(float scale, bool smoothed, RowStats<float>& row)
      : reference(scale), scale_(scale), smoothed_(smoothed), row_(row) {}

  // What a tile adds, but for its maximum where that is known before.
  template <typename scalar_t>
  SCE_AVX2_INLINE Lanes raise(const scalar_t* x, int64_t n, const scalar_t* next, float* powers) const {
    const Line line(scale_, reference.value());
    return smoothed_ ? push_tile<true>(x, n, line, reference.logit(), next, powers)
                     : push_tile<false>(x, n, line, reference.logit(), next, powers);
  }

  SCE_AVX2_INLINE void add(const Lanes& tile, int64_t n) {
    lanes_.merge(tile);
    columns_ += n;
  }

  SCE_AVX2_INLINE void move(float highest) {
    finish();
    reference.move(highest);
  }

  // Relative to the exponential of the maximum as it was added: a row with all its mass at one class adds up to 1.
  SCE_AVX2_INLINE void finish() {
    if (columns_ == 0) return;
    const float most = highest_of(lanes_.max), count = static_cast<float>(columns_);
    RowStats<float> stats;
    stats.max = scale_ * most;
    stats.sum =
        sum_of(_mm256_add_ps(lanes_.sum[0], lanes_.sum[1])) / Exponential(Line(scale_, reference.value())).power(most);
    if (smoothed_) {
      const float distance = sum_of(_mm256_add_ps(lanes_.distance[0], lanes_.distance[1]));
      stats.weighted = scale_ * (distance - count * (most - reference.logit()));
      stats.weight = count;
    }
    row_.merge(stats);
    lanes_ = Lanes();
    columns_ = 0;
  }

  Reference reference;

 private:
  const float scale_;
  const bool smoothed_;
  RowStats<float>& row_;
  Lanes lanes_;
  int64_t columns_ = 0;
};

// Adds scale * logits to `row`, tile by tile; scale > 0. kept(begin) is where those of a tile are kept: exponentials
// and, as its maximum, what they are relative to. plain(begin, end) adds a tile, and keeps both, where these loops are
// not right; done(begin, end) follows either.
template <typename scalar_t, typename kept_t, typename plain_t, typename done_t>
SCE_AVX2 __attribute__((noinline)) void push(const scalar_t* logits, int64_t n, float scale, bool smoothed,
                                             const scalar_t* next, RowStats<float>& row, const kept_t& kept,
                                             const plain_t& plain, const done_t& done) {
  Stretch stretch(scale, smoothed, row);
  Reference& reference = stretch.reference;
  for (int64_t begin = 0; begin < n; begin += kPowers) {
    const int64_t m = std::min(kPowers, n - begin);
    const scalar_t *const x = logits + begin, *const after = begin + m < n ? x + m : next;
    const Powers<float> memory = kept(begin);
    float highest = -INFINITY;
    Lanes tile;
    if (m >= kShortest && (kMaximumFirst<scalar_t> || !reference.usable())) {
      highest = maximum(x, m);
      if (!reference.reaches(highest)) stretch.move(highest);
    }
    if (m >= kShortest && reference.usable()) {
      tile = stretch.raise(x, m, after, memory.powers);
      if constexpr (kMaximumFirst<scalar_t>) tile.max = _mm256_set1_ps(highest);
      highest = highest_of(tile.max);
      if (!reference.reaches(highest)) {
        stretch.move(highest);
        if (reference.usable()) tile = stretch.raise(x, m, after, memory.powers);
      }
    }
    if (m >= kShortest && reference.usable()) {
      if (memory.maxima) *memory.maxima = reference.value();
      stretch.add(tile, m);
    } else {
      plain(begin, begin + m);
    }
    done(begin, begin + m);
  }
  stretch.finish();
}

// Whether exponentials that were kept of a tile of n are those of `push`, relative to `max`.
inline bool raised_here(float max, int64_t n) { return n >= kShortest && std::fabs(max) < kLargest; }

// The sum of the exponentials of z (n,), of which the largest is `max`, relative to it; `powers` as above. Meanwhile
// what is in memory at `next` comes nearer.
SCE_AVX2 inline float sum_beside(const float* z, int64_t n, float max, const float* next, float* powers) {
  const Line line(1, max);
  const Lanes lanes = push_tile<false>(z, n, line, max, next, powers);
  return sum_of(_mm256_add_ps(lanes.sum[0], lanes.sum[1])) / Exponential(line).power(max);
}

// By this an exponential relative to `max` is multiplied to become a exp(scale x - lse).
inline float per_power(float max, float scale, const GradientCoefficients<float>& c) {
  return c.a * static_cast<float>(std::exp2(-Line(scale, max).where_one(c.lse, c.lse_residual, scale)));
}

// factor * x - less, rounded.
template <typename scalar_t>
SCE_AVX2 void narrow(const float* powers, int64_t n, float factor, float less, scalar_t* out) {
  const __m256 by = _mm256_set1_ps(factor), minus = _mm256_set1_ps(less);
  Group group;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    SCE_EACH(k, kVectors) group.vector[k] = _mm256_fmsub_ps(_mm256_loadu_ps(powers + i + 8 * k), by, minus);
    store(group, out + i);
  }
  if (i == n) return;
  alignas(32) float some[kGroup] = {};
  std::copy(powers + i, powers + i + (kMaximumFirst<scalar_t> ? n - i : kGroup), some);
  SCE_EACH(k, kVectors) group.vector[k] = _mm256_fmsub_ps(_mm256_loadu_ps(some + 8 * k), by, minus);
  store_first(group, n - i, out + i);
}

// dz/dx (a exp(z - lse) - b) from exponentials that `push` has kept, relative to `max`, of n <= kPowers plain logits.
template <typename scalar_t>
SCE_AVX2 __attribute__((noinline)) void gradient(const float* powers, float max, int64_t n, float scale,
                                                 const GradientCoefficients<float>& c,
                                                 const Destination<scalar_t>& to) {
  const float factor = scale * per_power(max, scale, c);
  alignas(64) scalar_t rounded[kPowers];
  narrow(powers, n, factor, c.b * scale, to.around ? rounded : to.gradient);
  if (to.around) copy_around<InstructionSet::kAvx2>(rounded, n, to.gradient);
}

}  // namespace avx2
}  // namespace cpu
}  // namespace sparse_ce
#endif
