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

// Returns probability * x, or 0 if the probability is 0, although x may be infinite then.
template <typename acc_t>
SCE_HD acc_t expected(acc_t probability, acc_t x) {
  return probability == acc_t(0) ? acc_t(0) : probability * x;
}

// Computes logarithms of p and q relative to the mixture m = share p + (1 - share) q. They are computed from the
// distribution of the larger share: its logarithm is small if the other share is.
template <typename acc_t>
struct Mixture {
  using bits_t = std::conditional_t<sizeof(acc_t) == sizeof(double), uint64_t, uint32_t>;
  // The inverse of a smaller share would leave the range of `exponential`.
  static constexpr acc_t kLeast = sizeof(acc_t) == sizeof(double) ? acc_t(1e-307) : acc_t(1e-37f);
  acc_t least, log_least, odds;  // the smaller share, and the larger one divided by it
  bits_t by_q;  // all bits are set if the share of q is the larger one

  SCE_HD explicit Mixture(double share)
      : least(larger(static_cast<acc_t>(share < 0.5 ? share : 1 - share), kLeast)), log_least(logarithm(least)),
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
    acc_t q, term[kCount], slope[kCount];
  };

  SCE_HD At at(acc_t log_p, acc_t log_q) const {
    At at;
    if constexpr (kind == Divergence::kHellinger) {
      const acc_t root_p = exponential(log_p * acc_t(0.5)), root_q = exponential(log_q * acc_t(0.5));
      const acc_t above = root_q - root_p;
      at.q = root_q * root_q;
      at.term[0] = acc_t(0.5) * above * above;
      at.slope[0] = acc_t(0.5) * root_q * above;
      return at;
    }
    const acc_t p = exponential(log_p), q = exponential(log_q), x = log_p - log_q;
    at.q = q;
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
      const auto logs = mixture.logs(x);
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

// Holds exp(x), exp(x) - 1 and exp(x) - 1 - x for |x| < 88 with the relative error of a few roundings.
template <typename acc_t>
struct ExponentialLess {
  acc_t none, one, two;

  SCE_HD explicit ExponentialLess(acc_t x) {
#ifdef SCE_CUDA
    const bool near = std::fabs(x) < acc_t(0.35);
    none = exponential(x), one = exponential_less_1(x), two = near ? x * x * series(x) : one - x;
#else
    const Raised<acc_t, degree_for<acc_t>, true> e(x);
    const acc_t of_r = e.r * e.r * series(e.r), more = e.power * (e.r + of_r);
    none = e.power + more, one = (e.power - acc_t(1)) + more, two = e.power == acc_t(1) ? of_r : one - x;
#endif
  }

 private:
  // Returns 1/2 + x/6 + x^2/24 + ... for |x| < 0.35.
  SCE_HD static acc_t series(acc_t x) {
    constexpr int kTerms = sizeof(acc_t) == sizeof(double) ? 13 : 7;
    acc_t sum = 0;
    SCE_UNROLL
    for (int i = kTerms + 1; i > 1; --i) sum = (sum * x + acc_t(1)) * (acc_t(1) / acc_t(i));
    return sum;
  }
};

// Holds log(1 + x) and x - log(1 + x) for x > -1 with the relative error of a few roundings. With s = x / (2 + x),
// log(1 + x) is 2 (s + s^3 / 3 + s^5 / 5 + ...), and x - 2 s is x s.
template <typename acc_t>
struct LessLogarithm {
  acc_t log, less;

  SCE_HD explicit LessLogarithm(acc_t x) {
    constexpr int kTerms = sizeof(acc_t) == sizeof(double) ? 9 : 4;
    const bool near = std::fabs(x) < acc_t(0.25);
    const acc_t t = near ? x : acc_t(0), s = t / (acc_t(2) + t), square = s * s, far = log_of_1_plus(x);
    acc_t series = 0;
    SCE_UNROLL
    for (int i = kTerms; i > 0; --i) series = series * square + acc_t(1) / acc_t(2 * i + 1);
    less = near ? t * s - (s + s) * square * series : x - far;
    log = near ? x - less : far;
  }
};

// Returns true if log(q / p) is so small that exponentials of it do not overflow.
template <typename acc_t>
SCE_HD bool is_ratio(acc_t x) {
  return std::fabs(x) < acc_t(40);  // one comparison, because compilers do not vectorize conditions of two
}

// Holds a difference and its rounding error, which is 0 if the difference is not finite.
template <typename acc_t>
struct ExactDifference {
  acc_t value, error;

  SCE_HD ExactDifference(acc_t a, acc_t b) : value(a == b ? acc_t(0) : a - b) {
    const acc_t of_b = value - a, left = (a - (value - of_b)) - (b + of_b);
    error = left == left ? left : acc_t(0);
  }
};

// Relates the log-probabilities of a student to those of a teacher that it agrees with. Their difference has the
// rounding errors of large logits, but the difference of the logits themselves has not.
template <typename acc_t>
struct NearRow {
  acc_t max, teacher_max, sum, teacher_sum;
  acc_t log_ratio;  // log(sum / teacher_sum); inf if the row is not near
  acc_t log_sum = logarithm(sum), log_teacher_sum = logarithm(teacher_sum);

  SCE_HD bool near() const { return log_ratio < acc_t(INFINITY); }

  // Returns log_ratio as far as the sums tell: 0 if it may be their rounding.
  SCE_HD acc_t rough_log_ratio() const {
    const acc_t rough = log_sum - log_teacher_sum;
    return std::fabs(rough) < acc_t(16) * Limits<acc_t>::kEpsilon ? acc_t(0) : rough;
  }
  SCE_HD acc_t log_p(acc_t y) const { return (y - teacher_max) - log_teacher_sum; }
  SCE_HD acc_t log_q(acc_t z) const { return (z - max) - log_sum; }
  // Returns log(q / p).
  SCE_HD acc_t log_of_ratio(acc_t z, acc_t y) const {
    const ExactDifference<acc_t> of_class(z, y), of_largest(max, teacher_max);
    const acc_t x = of_class.value - of_largest.value, exact = x + (of_class.error - of_largest.error);
    return (is_ratio(x) ? exact : x) - log_ratio;
  }
};

// Computes a divergence of two distributions that agree in all classes of much probability, from x = log(q / p) with a
// small relative error. Each term is at least 0, and for small |x| no difference of larger numbers. The slopes have
// k = 1 under forward KL, and k = -sign / 2 under TV with the sign of q - p of the teacher's largest class. `slope_sum`
// is at least 0 except under skewed reverse KL and TV, and its sum is C. If all x are too large by d, then the sum of
// `above` is exp(d) - 1, and the error of D and C is about d^2; under TV it is d.
template <Divergence kind, typename acc_t>
struct NearDivergence : DivergenceShares<acc_t> {
  using Shares = DivergenceShares<acc_t>;
  using Shares::beta, Shares::mixture, Shares::rest;
  static constexpr int kCount = divergence_count(kind);
  acc_t sign;

  SCE_HD NearDivergence(const Shares& shares, acc_t sign) : Shares(shares), sign(sign) {}

  struct At {
    acc_t q, above;  // above = q - p
    acc_t term[kCount], slope[kCount], slope_sum[kCount];
  };

  SCE_HD static acc_t sign_of(acc_t x) { return x > acc_t(0) ? acc_t(1) : x < acc_t(0) ? acc_t(-1) : acc_t(0) * x; }

  // `all_near` promises that x is a ratio.
  template <bool all_near>
  SCE_HD At at(acc_t log_p, acc_t log_q, acc_t x) const {
    const bool near = all_near || is_ratio(x);
    const acc_t t = near ? x : x > acc_t(0) ? acc_t(40) : acc_t(-40), p = exponential(log_p);
    const ExponentialLess<acc_t> up(t);
    const acc_t of_ratio = p * up.one, q = all_near ? p * up.none : exponential(log_q);
    const acc_t above = near ? of_ratio : q - p;
    At at;
    at.q = q, at.above = above;
    if constexpr (kind == Divergence::kForwardKl || kind == Divergence::kSeveral) {
      at.term[0] = near ? p * up.two : above - expected(p, x);
      at.slope[0] = above, at.slope_sum[0] = 0;
    }
    if constexpr (kind == Divergence::kReverseKl || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 1 : 0;
      at.slope[k] = expected(q, x);
      at.term[k] = at.slope_sum[k] = near ? q * ExponentialLess<acc_t>(-t).two : at.slope[k] - above;
    }
    if constexpr (kind == Divergence::kJsd || kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse ||
                  kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 2 : 0;
      // The mixture m has the share of_q of q.
      const acc_t of_p = kind == Divergence::kSkewReverse ? rest : beta;
      const acc_t of_q = kind == Divergence::kSkewReverse ? beta : rest;
      const acc_t v = of_q * up.one, w = of_p * exponential_less_1(-t);  // m / p - 1, m / q - 1
      const LessLogarithm<acc_t> of_v(v), of_w(w);
      // A mixture that is nearly the larger of p and q must be compared with the other one.
      const bool by_p = v > acc_t(-0.5), by_q = w > acc_t(-0.5);
      const acc_t log_p_less = by_p ? of_v.log + (x > acc_t(0) ? x - t : acc_t(0)) : t + of_w.log;  // log(m / p)
      const acc_t log_q_less = by_q ? of_w.log + (x < acc_t(0) ? t - x : acc_t(0)) : of_v.log - t;  // log(m / q)
      const acc_t of_forward = near && by_p ? p * of_v.less : of_q * above - expected(p, log_p_less);
      const acc_t of_reverse = near && by_q ? q * of_w.less : -of_p * above - expected(q, log_q_less);
      const acc_t by_m = above / (of_p * p + of_q * q);
      if constexpr (kind == Divergence::kSkewForward) {
        at.term[0] = of_forward;
        at.slope[0] = of_q * of_q * expected(q, by_m);
        at.slope_sum[0] = of_q * of_q * of_p * expected(above, by_m);
      } else if constexpr (kind == Divergence::kSkewReverse) {
        at.term[0] = of_reverse;
        at.slope[0] = expected(q, -log_q_less - beta * of_p * by_m);
        at.slope_sum[0] = of_reverse - beta * of_p * of_p * expected(above, by_m);
      } else {
        at.term[k] = beta * of_forward + rest * of_reverse;
        at.slope[k] = -rest * expected(q, log_q_less), at.slope_sum[k] = rest * of_reverse;
      }
    }
    if constexpr (kind == Divergence::kTv || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 3 : 0;
      at.term[k] = acc_t(0.5) * std::fabs(above);
      at.slope[k] = at.slope_sum[k] = acc_t(0.5) * q * (sign_of(near ? x : above) - sign);  // the product p x may be 0
    }
    if constexpr (kind == Divergence::kAlpha) {
      // With the larger share 1 - b of the distribution l, o the other one and t = log(o / l), the term is
      // l (b (exp(t) - 1) - (exp(b t) - 1)) / (b (1 - b)), and p^beta q^(1 - beta) is l exp(b t).
      const acc_t b = mixture.least, l = mixture.pick(q, p), to = mixture.pick(-t, t);
      const ExponentialLess<acc_t> root(b * to);
      const acc_t less_l = mixture.pick(-above, above);  // o - l
      const acc_t product = near ? l * root.none : exponential(beta * log_p + rest * log_q);
      const acc_t of_near = l * (b * ExponentialLess<acc_t>(to).two - root.two);
      at.term[0] = (near ? of_near : b * less_l - (product - l)) / (b * (acc_t(1) - b));
      at.slope[0] = (near ? product * exponential_less_1(beta * t) : q - product) / beta;
      at.slope_sum[0] = rest * at.term[0];
    }
    if constexpr (kind == Divergence::kHellinger) {
      const ExponentialLess<acc_t> root(acc_t(0.5) * t);
      const acc_t product = near ? p * root.none : std::sqrt(p) * std::sqrt(q);
      at.term[0] = acc_t(0.5) * (near ? p * root.one * root.one : (p + q) - acc_t(2) * product);
      at.slope[0] = acc_t(0.5) * (near ? product * root.one : q - product), at.slope_sum[0] = acc_t(0.5) * at.term[0];
    }
    return at;
  }
};

// Returns k such that a divergence is about k times the forward KL if p and q agree; TV is not such a divergence.
SCE_HD double relative_to_kl(Divergence kind, double beta) {
  if (kind == Divergence::kJsd || kind == Divergence::kSeveral) return beta * (1 - beta);
  if (kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse) return (1 - beta) * (1 - beta);
  return kind == Divergence::kHellinger ? 0.25 : 1;
}

// Returns true if the ordinary result of a row has so few digits that it must be computed by NearDivergence.
template <typename acc_t>
SCE_HD bool is_near(Divergence kind, double beta, const acc_t* divergence) {
  if (kind == Divergence::kTv) return divergence[0] < acc_t(0.125);
  return divergence[kind == Divergence::kSeveral ? 2 : 0] <
         acc_t(0.03125) * static_cast<acc_t>(relative_to_kl(kind, beta));
}

// Returns true if NearDivergence must be computed again because log_ratio had this error.
template <typename acc_t>
SCE_HD bool is_rough(Divergence kind, double beta, acc_t divergence, acc_t error) {
  if (kind == Divergence::kTv || kind == Divergence::kSeveral) return error != acc_t(0);
  return error * error * static_cast<acc_t>(relative_to_kl(kind, beta)) >
         acc_t(0.5) * Limits<acc_t>::kEpsilon * divergence;
}

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
