// dense_classes.h - Computes what some classes contribute to a dense divergence, and their gradient. Each loop is
// compiled once per dtype or divergence, and not for their combinations.
#pragma once

#include "../../ops/dense_divergence.h"
#include "../instruction_set.h"
#include "../simd/tile.h"

#include <type_traits>

namespace sparse_ce {
namespace cpu {

constexpr int64_t kPart = kTile;  // columns that are processed at a time, in arrays that fit into the L1 cache

// Calls f(logits, stride) with the type that stores the logits from `column` on.
template <typename function_t>
void with_logits(const DenseLogits& x, int64_t r, int64_t column, const function_t& f) {
  with_storage(x.dtype, [&](auto storage) {
    const auto* logits = static_cast<const decltype(storage)*>(x.data);
    f(logits + r * x.row_stride + column * x.column_stride, x.column_stride);
  });
}

template <typename acc_t>
acc_t load(const DenseLogits& x, int64_t r, int64_t column) {
  return load_float<acc_t>(x.data, x.dtype, r * x.row_stride + column * x.column_stride);
}

// Returns the transformed logits of up to kPart classes from `column` on: in `buffer`, or the logits if they are
// unchanged. They have the bits of those that the statistics were summed from.
template <typename acc_t>
const acc_t* transformed(const DenseLogits& x, int64_t r, int64_t column, int64_t n, acc_t* buffer) {
  const auto transform = x.template transform<acc_t>(r);
  const acc_t* z = nullptr;
  with_logits(x, r, column, [&](const auto* logits, int64_t stride) {
    using scalar_t = std::decay_t<decltype(*logits)>;
    if constexpr (std::is_same_v<acc_type<scalar_t>, acc_t>) {
      if (stride == 1) {
        z = transformed(logits, n, transform, buffer, static_cast<acc_t*>(nullptr));
        return;
      }
    }
    for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<acc_t>(to_acc(logits[i * stride]));
    z = transformed<acc_t>(buffer, n, transform, buffer, static_cast<acc_t*>(nullptr));
  });
  return z;
}

// Holds exponentials of some logits; a probability is an exponential times `per_exp`.
template <typename acc_t>
struct Probabilities {
  const acc_t* exps;
  acc_t per_exp;
};

// Computes log(p / q) from logits y and z. The probabilities do not have the rounding errors of their logarithms, so
// the difference of these would not be that of the probabilities.
template <typename acc_t>
struct LogRatio {
  acc_t of_rows, lost;  // the difference of the log-sum-exps, and its rounding error

  explicit LogRatio(const NearRow<acc_t>& row) {
    const double largest = double(row.teacher.max) - double(row.student.max);
    const double difference = largest + (std::log(double(row.teacher.sum)) - std::log(double(row.student.sum)));
    of_rows = static_cast<acc_t>(difference);
    lost = static_cast<acc_t>(difference - double(of_rows));
  }
  SCE_HD acc_t operator()(acc_t y, acc_t z) const { return ((y - z) - of_rows) - lost; }
};

// Writes the gradient of up to kPart classes from `column` on: of_q * q + slope, times dz/dx. It may overwrite the
// logits of the student.
template <typename acc_t>
void write_gradient(const DenseDivergenceArgs& args, int64_t r, int64_t column, int64_t n, acc_t of_q,
                    const Probabilities<acc_t>& q, const acc_t* slope, bool nontemporal) {
  with_logits(args.student, r, column, [&](const auto* logits, int64_t stride) {
    using scalar_t = std::decay_t<decltype(*logits)>;
    if constexpr (std::is_same_v<acc_type<scalar_t>, acc_t>) {
      alignas(64) scalar_t buffer[kPart];
      auto* const gradient = static_cast<scalar_t*>(args.grad) + r * args.grad_row_stride + column;
      with_instruction_set([&](auto set) SCE_INLINE {
        const auto transform = args.student.template transform<acc_t>(r);
        const acc_t factor = of_q, per_exp = q.per_exp;
        const acc_t* const exps = q.exps;
        scalar_t* const to = nontemporal ? buffer : gradient;
        if (transform.softcap == acc_t(0)) {
          SCE_SIMD()
          for (int64_t i = 0; i < n; ++i) from_acc((exps[i] * per_exp * factor + slope[i]) * transform.scale, to[i]);
        } else {
          const auto run = [&](int64_t step) SCE_INLINE {
            SCE_SIMD()
            for (int64_t i = 0; i < n; ++i) {
              const acc_t of_cap = tanh_with_slope(transform.scale_per_cap * to_acc(logits[i * step])).slope;
              from_acc((exps[i] * per_exp * factor + slope[i]) * (transform.scale * of_cap), to[i]);
            }
          };
          stride == 1 ? run(1) : run(stride);
        }
        if (nontemporal) stream_copy<decltype(set)::value>(buffer, n, gradient);
      });
    }
  });
}

// GCC vectorizes this loop only outside of lambdas.
template <typename acc_t>
SCE_HD bool all_ratios(const acc_t* x, int64_t n) {
  int32_t far = 0;
  SCE_SIMD(reduction(+ : far))
  for (int64_t i = 0; i < n; ++i) far += !is_ratio(x[i]);
  return far == 0;
}

// Holds what a part of a row's classes contributes.
template <typename acc_t>
struct Classes {
  alignas(64) acc_t of_student[kPart], of_teacher[kPart];  // transformed logits
  alignas(64) acc_t q[kPart], p[kPart], slope[kPart];  // or exponentials
  alignas(64) acc_t log_p[kPart], log_q[kPart], x[kPart];  // x = log(q / p)

  // Holds sums over the classes, in lanes.
  struct Sums {
    acc_t term[kMostDivergences][kWideLanes] = {}, slope[kMostDivergences][kWideLanes] = {}, above[kWideLanes] = {};
  };

  // Calls add(class, lane) for each class. GCC unrolls loops over fewer lanes instead of vectorizing them.
  template <typename add_t, typename before_t>
  SCE_HD static void each(int64_t n, const add_t& add, const before_t& before) {
    int64_t i = 0;
    for (; i + kWideLanes <= n; i += kWideLanes) {
      before(i);
      SCE_SIMD()
      for (int64_t lane = 0; lane < kWideLanes; ++lane) add(i + lane, lane);
    }
    SCE_SIMD()
    for (int64_t lane = 0; lane < n - i; ++lane) add(i + lane, lane);
  }
  template <typename add_t>
  SCE_HD static void each(int64_t n, const add_t& add) {
    each(n, add, [](int64_t) {});
  }

  // Returns the statistics of transformed logits, and computes their exponentials relative to the largest one.
  // Prefetches kPart elements of `size` bytes from `after` on.
  static RowStats<acc_t> raise(const acc_t* logits, int64_t n, acc_t* to, const void* after = nullptr,
                               int64_t size = 0) {
    return with_instruction_set([&](auto) SCE_INLINE {
      const acc_t* const z = logits;
      acc_t* const exps = to;
      const char* const next = static_cast<const char*>(after);
      const int64_t step = size;
      acc_t maxima[kWideLanes], sums[kWideLanes] = {};
      for (acc_t& lane : maxima) lane = Limits<acc_t>::kLowest;
      each(n, [&](int64_t i, int64_t lane) SCE_INLINE { maxima[lane] = z[i] > maxima[lane] ? z[i] : maxima[lane]; });
      for (int64_t half = kWideLanes / 2; half > 0; half /= 2) {
        SCE_SIMD()
        for (int64_t k = 0; k < half; ++k) maxima[k] = larger(maxima[k + half], maxima[k]);
      }
      RowStats<acc_t> stats;
      const acc_t max = stats.max = maxima[0];
      each(
          n,
          [&](int64_t i, int64_t lane)
              SCE_INLINE { sums[lane] += exps[i] = exponential_below<degree_for<acc_t>>(z[i] - max); },
          [&](int64_t i) SCE_INLINE {
            for (int64_t byte = 0; byte < kWideLanes * step; byte += kLine)
              __builtin_prefetch(next + i * step + byte, 0, 3);
          });
      stats.rest = sum_of_lanes(sums) - acc_t(1);
      if (stats.hides_rest()) {  // the largest one hides the digits of the others
        int64_t at = 0;
        while (z[at] != max) ++at;
        const auto other = [&](int64_t i) { return exps[i]; };
        stats.rest = sum_in_lanes<acc_t>(0, at, other) + sum_in_lanes<acc_t>(at + 1, n, other);
      }
      return stats;
    });
  }

  // Returns the sums of terms and slopes, and computes the weighed slope of each class.
  template <Divergence kind, bool balanced>
  static Sums compare(double beta, const acc_t* z, const acc_t* y, const Probabilities<acc_t>& of_student,
                      const Probabilities<acc_t>& of_teacher, const NearRow<acc_t>& of_row,
                      const LogRatio<acc_t>& log_ratio, const DenseCoefficients<acc_t>& of_slopes, int64_t n,
                      acc_t* slope) {
    // In these divergences, errors of probabilities cancel only if their logarithms have the same.
    constexpr bool kCancels =
        kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse || kind == Divergence::kAlpha;
    return with_instruction_set([&](auto) SCE_INLINE {
      const DivergenceOf<kind, acc_t> of(beta);
      const DenseLse<acc_t> student = of_row.student, teacher = of_row.teacher;
      const DenseCoefficients<acc_t> by = of_slopes;
      const Probabilities<acc_t> q = of_student, p = of_teacher;
      const LogRatio<acc_t> ratio = log_ratio;
      // A processor keeps more classes of two short loops in flight than of a long one.
      alignas(64) acc_t exps[kPart];
      if constexpr (balanced) {
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) exps[i] = of.mixture.lower_per_higher(ratio(y[i], z[i]));
      }
      Sums sums;
      each(n, [&](int64_t i, int64_t lane) SCE_INLINE {
        const acc_t log_p = teacher.log_prob(y[i]), log_q = student.log_prob(z[i]);
        const auto at = kCancels ? of.at(exponential(log_p), exponential(log_q), log_p, log_q, log_p - log_q)
                                 : of.template at<balanced>(p.exps[i] * p.per_exp, q.exps[i] * q.per_exp, log_p, log_q,
                                                            ratio(y[i], z[i]), balanced ? exps[i] : acc_t(0));
        for (int k = 0; k < of.kCount; ++k) {
          sums.term[k][lane] += at.term[k];
          if constexpr (kind != Divergence::kForwardKl) sums.slope[k][lane] += at.slope[k];  // otherwise it is known
        }
        slope[i] = by.weighed(at.slope);
      });
      return sums;
    });
  }

  // Computes x = log(q / p) from the logits. Returns true if all x are ratios. Otherwise it also computes
  // log-probabilities and q, which `compare_near` then needs.
  bool relate(const acc_t* student, const acc_t* teacher, const NearRow<acc_t>& of_row, int64_t n, acc_t* to) {
    return with_instruction_set([&](auto) SCE_INLINE {
      const NearRow<acc_t> row = of_row;
      acc_t* const q = to;
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) x[i] = row.log_of_ratio(student[i], teacher[i]);
      if (all_ratios(x, n)) return true;
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        log_q[i] = row.student.log_prob(student[i]), log_p[i] = row.teacher.log_prob(teacher[i]);
        q[i] = exponential(log_q[i]);
      }
      return false;
    });
  }
  // Does the same as `compare` for a near row, from what `relate` did, and computes q.
  template <Divergence kind, bool all_near>
  Sums compare_near(double beta, acc_t log_ratio, const Probabilities<acc_t>& of_teacher,
                    const DenseCoefficients<acc_t>& of_slopes, int64_t n, acc_t* q, acc_t* slope) {
    return with_instruction_set([&](auto) SCE_INLINE {
      const NearDivergence<kind, acc_t> of(DivergenceShares<acc_t>(kind, beta),
                                           NearDivergence<kind, acc_t>::sign_of(-log_ratio));
      const DenseCoefficients<acc_t> by = of_slopes;
      const Probabilities<acc_t> p = of_teacher;
      Sums sums;
      each(n, [&](int64_t i, int64_t lane) SCE_INLINE {
        const auto at = of.template at<all_near>(p.exps[i] * p.per_exp, q[i], log_p[i], log_q[i], x[i]);
        sums.above[lane] += at.above;
        for (int k = 0; k < of.kCount; ++k) sums.term[k][lane] += at.term[k], sums.slope[k][lane] += at.slope_sum[k];
        q[i] = at.q, slope[i] = by.weighed(at.slope);
      });
      return sums;
    });
  }
};

}  // namespace cpu
}  // namespace sparse_ce
