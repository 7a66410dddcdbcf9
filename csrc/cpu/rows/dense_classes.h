// dense_classes.h - Computes what a few hundred classes contribute to a dense divergence, and their gradient. Each loop
// is compiled once per dtype or divergence, and not for their combinations.
#pragma once

#include "../../ops/dense_divergence.h"
#include "../instruction_set.h"
#include "../simd/tile.h"

#include <type_traits>

namespace sparse_ce {
namespace cpu {

constexpr int64_t kPart = 512;  // columns that are processed at a time, in arrays that fit into the L1 cache

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

// Computes the log-probabilities of up to kPart classes from `column` on.
template <typename acc_t>
void load_log_probs(const DenseLogits& x, int64_t r, int64_t column, int64_t n, const DenseLse<acc_t>& of_row,
                    acc_t* log_probs) {
  with_logits(x, r, column, [&](const auto* logits, int64_t stride) {
    const auto transform = x.template transform<acc_t>(r);
    with_instruction_set([&](auto) SCE_INLINE {
      const DenseLse<acc_t> lse = of_row;
      const acc_t scale = transform.scale;
      const bool capped = transform.softcap != acc_t(0);
      const auto run = [&](int64_t step) SCE_INLINE {
        const auto logit = [&](int64_t i) SCE_INLINE { return static_cast<acc_t>(to_acc(logits[i * step])); };
        if (capped) {
          SCE_SIMD()
          for (int64_t i = 0; i < n; ++i) log_probs[i] = logit(i);
          return;
        }
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) log_probs[i] = lse.log_prob(rounded_product(scale, logit(i)));
      };
      stride == 1 ? run(1) : run(stride);  // vectors are loaded only if the stride is known to be 1
    });
    if (transform.softcap == acc_t(0)) return;
    // These are the bits of the logits that lse was summed from.
    Tile<acc_t>::transform(log_probs, n, transform, log_probs, nullptr);
    with_instruction_set([&](auto) SCE_INLINE {
      const DenseLse<acc_t> lse = of_row;
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) log_probs[i] = lse.log_prob(log_probs[i]);
    });
  });
}

// Writes the gradient of up to kPart classes from `column` on: of_q * q + slope, times dz/dx. It may overwrite the
// logits of the student.
template <typename acc_t>
void write_gradient(const DenseDivergenceArgs& args, int64_t r, int64_t column, int64_t n, acc_t of_q, const acc_t* q,
                    const acc_t* slope) {
  with_logits(args.student, r, column, [&](const auto* logits, int64_t stride) {
    using scalar_t = std::decay_t<decltype(*logits)>;
    if constexpr (std::is_same_v<acc_type<scalar_t>, acc_t>) {
      auto* to = static_cast<scalar_t*>(args.grad) + r * args.grad_row_stride + column;
      with_instruction_set([&](auto) SCE_INLINE {
        const auto transform = args.student.template transform<acc_t>(r);
        const acc_t factor = of_q;
        if (transform.softcap == acc_t(0)) {
          SCE_SIMD()
          for (int64_t i = 0; i < n; ++i) from_acc((q[i] * factor + slope[i]) * transform.scale, to[i]);
          return;
        }
        const auto run = [&](int64_t step) SCE_INLINE {
          SCE_SIMD()
          for (int64_t i = 0; i < n; ++i) {
            const acc_t of_cap = tanh_with_slope(transform.scale_per_cap * to_acc(logits[i * step])).slope;
            from_acc((q[i] * factor + slope[i]) * (transform.scale * of_cap), to[i]);
          }
        };
        stride == 1 ? run(1) : run(stride);
      });
    }
  });
}

template <typename acc_t>
double sum(const acc_t* x, int64_t n) {
  return with_instruction_set(
      [&](auto) SCE_INLINE { return double(sum_in_lanes<acc_t, kWideLanes>(0, n, [&](int64_t i) { return x[i]; })); });
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
  alignas(64) acc_t log_p[kPart], log_q[kPart], q[kPart], x[kPart], above[kPart];
  acc_t term[kMostDivergences][kPart], slope[kMostDivergences][kPart], slope_sum[kMostDivergences][kPart];

  template <Divergence kind>
  void compare(double beta, int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      const DivergenceOf<kind, acc_t> of(beta);
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const auto at = of.at(log_p[i], log_q[i]);
        q[i] = at.q;
        for (int k = 0; k < of.kCount; ++k) term[k][i] = at.term[k], slope[k][i] = at.slope[k];
      }
    });
  }

  // Computes q, and terms and slopes of the divergences, from the log-probabilities.
  void compare(Divergence kind, double beta, int64_t n) {
    with_divergence(kind, [&](auto of) { compare<of.value>(beta, n); });
  }
  // Turns logits in the place of log-probabilities into these, and computes x = log(q / p). Returns true if all x are
  // ratios.
  bool relate(const NearRow<acc_t>& of_row, int64_t n) {
    return with_instruction_set([&](auto) SCE_INLINE {
      const NearRow<acc_t> row = of_row;
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const acc_t z = log_q[i], y = log_p[i];
        log_q[i] = row.student.log_prob(z), log_p[i] = row.teacher.log_prob(y), x[i] = row.log_of_ratio(z, y);
      }
      return all_ratios(x, n);
    });
  }
  // Computes q, q - p, terms, slopes and their sums from what `relate` did.
  template <Divergence kind, bool all_near>
  void compare_near(double beta, acc_t log_ratio, int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      const NearDivergence<kind, acc_t> of(DivergenceShares<acc_t>(kind, beta),
                                           NearDivergence<kind, acc_t>::sign_of(-log_ratio));
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const auto at = of.template at<all_near>(log_p[i], log_q[i], x[i]);
        q[i] = at.q, above[i] = at.above;
        for (int k = 0; k < of.kCount; ++k)
          term[k][i] = at.term[k], slope[k][i] = at.slope[k], slope_sum[k][i] = at.slope_sum[k];
      }
    });
  }

  // Computes only q.
  void exponentiate(int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) q[i] = exponential(log_q[i]);
    });
  }

  // Computes the sum of the slopes times their factors in the place of the first ones. A factor of 0 hides slopes that
  // are not finite.
  void weigh_slopes(const DenseCoefficients<acc_t>& by, int count, int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      const acc_t first = by.of_slope[0];
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) slope[0][i] = first == acc_t(0) ? acc_t(0) : first * slope[0][i];
      for (int k = 1; k < count; ++k) {
        const acc_t factor = by.of_slope[k];
        if (factor == acc_t(0)) continue;
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) slope[0][i] += factor * slope[k][i];
      }
    });
  }
};

}  // namespace cpu
}  // namespace sparse_ce
