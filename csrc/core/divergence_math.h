// divergence_math.h - Implements the divergences of a student q from a dense teacher p, for both CPU and CUDA.
//
// With z and y the transformed logits of student and teacher, q = softmax(z) and p = softmax(y), a row has
//
//   D = sum_j phi(p_j, q_j),   dD/dz_j = s_j - q_j C,   s_j = q_j dphi/dq_j + k q_j,   C = sum_j s_j,
//
// where any constant k cancels. `slope` is s, with a k that makes it 0 if p = q. `term` is phi plus a multiple of
// q_j - p_j, whose sum is 0. Rounding errors of both lse then cancel to first order, and D has an error of about one
// rounding of 1 even if it is much smaller.
#pragma once

#include "math.h"

namespace sparse_ce {

// kSeveral computes forward KL, reverse KL, JSD and TV together, in this order.
enum class Divergence : int32_t {
  kForwardKl,
  kReverseKl,
  kJsd,
  kSkewForward,
  kSkewReverse,
  kAlpha,
  kTv,
  kHellinger,
  kSeveral
};
constexpr int kMostDivergences = 4;

template <Divergence kind>
using DivergenceConstant = std::integral_constant<Divergence, kind>;

// Calls f(constant) with a DivergenceConstant.
template <typename function_t>
SCE_HD void with_divergence(Divergence kind, const function_t& f) {
  switch (kind) {
    case Divergence::kForwardKl:
      return f(DivergenceConstant<Divergence::kForwardKl>{});
    case Divergence::kReverseKl:
      return f(DivergenceConstant<Divergence::kReverseKl>{});
    case Divergence::kJsd:
      return f(DivergenceConstant<Divergence::kJsd>{});
    case Divergence::kSkewForward:
      return f(DivergenceConstant<Divergence::kSkewForward>{});
    case Divergence::kSkewReverse:
      return f(DivergenceConstant<Divergence::kSkewReverse>{});
    case Divergence::kAlpha:
      return f(DivergenceConstant<Divergence::kAlpha>{});
    case Divergence::kTv:
      return f(DivergenceConstant<Divergence::kTv>{});
    case Divergence::kHellinger:
      return f(DivergenceConstant<Divergence::kHellinger>{});
    case Divergence::kSeveral:
      return f(DivergenceConstant<Divergence::kSeveral>{});
  }
}

SCE_HD constexpr int divergence_count(Divergence kind) { return kind == Divergence::kSeveral ? kMostDivergences : 1; }

// Returns weight * x, or 0 if the weight is 0, although x may be infinite then. The weight is often a probability.
template <typename acc_t>
SCE_HD acc_t expected(acc_t weight, acc_t x) {
  return weight == acc_t(0) ? acc_t(0) : weight * x;
}

// Computes logarithms of p and q relative to the mixture m = share p + (1 - share) q. They are computed from the
// distribution of the larger share: its logarithm is small if the other share is.
template <typename acc_t>
struct Mixture {
  using bits_t = std::conditional_t<sizeof(acc_t) == sizeof(double), uint64_t, uint32_t>;
  // The inverse of a smaller share would leave the range of `exponential`.
  static constexpr acc_t kLeast = sizeof(acc_t) == sizeof(double) ? acc_t(1e-307) : acc_t(1e-37f);
  acc_t of_p, of_q;  // shares
  acc_t least, log_least, odds;  // the smaller share, and the larger one divided by it
  bits_t by_q;  // all bits are set if the share of q is the larger one

  SCE_HD explicit Mixture(double share)
      : of_p(static_cast<acc_t>(share)), of_q(static_cast<acc_t>(1 - share)),
        least(larger(static_cast<acc_t>(share < 0.5 ? share : 1 - share), kLeast)), log_least(logarithm(least)),
        odds((acc_t(1) - least) / least), by_q(share < 0.5 ? ~bits_t(0) : bits_t(0)) {}

  // Returns `of_q` if the share of q is the larger one, else `of_p`. Compilers do not vectorize loops with a condition.
  SCE_HD acc_t pick(acc_t of_q, acc_t of_p) const {
    return bit_cast<acc_t>((bit_cast<bits_t>(of_q) & by_q) | (bit_cast<bits_t>(of_p) & ~by_q));
  }

  struct Logs {
    acc_t p, q;  // log(p / m), log(q / m)
  };

  // Takes log(p / q). Either may be infinite in the result if its probability is 0.
  SCE_HD Logs logs(acc_t log_ratio) const {
    const acc_t t = pick(log_ratio, -log_ratio);  // log(other / larger)
    // The logarithm of the other one is at most -log_least. If it is close to that, it must not be a difference from t.
    const bool far = t > -log_least;
    const acc_t e = exponential(far ? -t : t);
    const acc_t l = log_of_1_plus(far ? odds * e : least * (e - acc_t(1)));
    const acc_t of_other = far ? -log_least - l : t - l, of_larger = far ? of_other - t : -l;
    return {pick(of_other, of_larger), pick(of_larger, of_other)};
  }

  // Does the same in fewer instructions. The errors grow with the inverse of the smaller share. `e` is
  // lower_per_higher(log_ratio), the lower one of p and q divided by the higher one.
  SCE_HD bool balanced() const { return least >= acc_t(0.125); }
  SCE_HD static acc_t lower_per_higher(acc_t log_ratio) { return exponential(-std::fabs(log_ratio)); }
  SCE_HD Logs logs_if_balanced(acc_t log_ratio, acc_t e) const {
    const acc_t size = std::fabs(log_ratio);
    const bool more_p = log_ratio > acc_t(0);
    const acc_t of_lower = more_p ? of_q : of_p, kept_nan = e - e;
    const acc_t of_higher = kept_nan - log_of_1_plus(of_lower * (e - acc_t(1))), other = of_higher - size;
    return {more_p ? of_higher : other, more_p ? other : of_higher};
  }
};

// Holds what a divergence derives from `beta`, that of the functions in Python.
template <typename acc_t>
struct DivergenceShares {
  acc_t beta, rest;  // rest = 1 - beta
  Mixture<acc_t> mixture;

  SCE_HD DivergenceShares(Divergence kind, double of_beta)
      : beta(static_cast<acc_t>(of_beta)), rest(static_cast<acc_t>(1 - of_beta)),
        mixture(kind == Divergence::kSkewReverse ? 1 - of_beta : of_beta) {}
};

// Computes one divergence.
template <Divergence kind, typename acc_t>
struct DivergenceOf : DivergenceShares<acc_t> {
  using Shares = DivergenceShares<acc_t>;
  using Shares::beta, Shares::mixture, Shares::rest;
  static constexpr int kCount = divergence_count(kind);

  SCE_HD explicit DivergenceOf(double of_beta) : Shares(kind, of_beta) {}
  SCE_HD explicit DivergenceOf(const Shares& shares) : Shares(shares) {}

  struct At {
    acc_t term[kCount], slope[kCount];
  };

  // Takes probabilities, their logarithms, and x = log(p / q). `balanced` promises that the mixture is, and that e is
  // its lower_per_higher(x). Otherwise, e is not used.
  template <bool balanced = false>
  SCE_HD At at(acc_t p, acc_t q, acc_t log_p, acc_t log_q, acc_t x, [[maybe_unused]] acc_t e = 0) const {
    At at;
    if constexpr (kind == Divergence::kHellinger) {
      const acc_t root_p = exponential(log_p * acc_t(0.5)), root_q = exponential(log_q * acc_t(0.5));
      const acc_t above = root_q - root_p;
      at.term[0] = acc_t(0.5) * above * above;
      at.slope[0] = acc_t(0.5) * root_q * above;
      return at;
    }
    if constexpr (kind == Divergence::kForwardKl || kind == Divergence::kSeveral) {
      at.term[0] = expected(p, x) + (q - p);
      at.slope[0] = -p;
    }
    if constexpr (kind == Divergence::kReverseKl || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 1 : 0;
      at.slope[k] = expected(q, -x);
      at.term[k] = at.slope[k] + (p - q);
    }
    if constexpr (kind == Divergence::kJsd || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 2 : 0;
      const auto logs = balanced ? mixture.logs_if_balanced(x, e) : mixture.logs(x);
      at.slope[k] = rest * expected(q, logs.q);
      at.term[k] = beta * expected(p, logs.p) + at.slope[k];
    }
    if constexpr (kind == Divergence::kTv || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 3 : 0;
      const acc_t half = acc_t(0.5) * q, above = q - p;
      at.slope[k] = above > acc_t(0) ? half : above < acc_t(0) ? -half : acc_t(0) * above;
      at.term[k] = acc_t(0.5) * (above < acc_t(0) ? -above : above);
    }
    if constexpr (kind == Divergence::kSkewForward) {
      const auto logs = mixture.logs(x);
      at.term[0] = expected(p, logs.p) + rest * (q - p);
      at.slope[0] = -rest * expected(q, exponential_less_1(logs.p));
    }
    if constexpr (kind == Divergence::kSkewReverse) {
      const auto logs = mixture.logs(x);
      at.term[0] = expected(q, logs.q) + rest * (p - q);
      at.slope[0] = expected(q, logs.q - beta * exponential_less_1(logs.q));
    }
    if constexpr (kind == Divergence::kAlpha) {
      // With b = max(beta, 1 - beta) and the distribution l of that share, o the other one:
      //   p^beta q^(1 - beta) = l + more,   more = l ((o / l)^(1 - b) - 1)
      constexpr acc_t kFar = 40;
      const acc_t l = mixture.pick(q, p), o = mixture.pick(p, q), t = mixture.least * mixture.pick(x, -x);
      const acc_t product = exponential(beta * log_p + rest * log_q);
      const acc_t near = l * exponential_less_1(t < kFar ? t : kFar);
      const acc_t more = t <= kFar ? near : product - l;  // also if l is 0
      at.term[0] = ((o - l) - more / mixture.least) / (acc_t(1) - mixture.least);
      at.slope[0] = mixture.pick(-more, (q - p) - more) / beta;
    }
    return at;
  }
};

// Returns a divergence within its bounds, which rounding may have exceeded. NaN is kept.
template <typename acc_t>
SCE_HD acc_t bounded(Divergence kind, int k, double beta, acc_t x) {
  if (kind == Divergence::kSeveral)
    kind = k == 2 ? Divergence::kJsd : k == 3 ? Divergence::kTv : Divergence::kForwardKl;
  double most = 0;  // none
  if (kind == Divergence::kTv || kind == Divergence::kHellinger) most = 1;
  if (kind == Divergence::kJsd) most = -(beta * logarithm(beta) + (1 - beta) * logarithm(1 - beta));
  if (kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse) most = -logarithm(beta);
  if (kind == Divergence::kAlpha) most = 1 / (beta * (1 - beta));
  acc_t bound = static_cast<acc_t>(most);
  if (x < acc_t(0)) return acc_t(0);
  return most > 0 && x > bound ? bound : x;
}

}  // namespace sparse_ce
