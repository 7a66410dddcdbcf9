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

// Holds exp(x) - 1 and exp(x) - 1 - x for |x| < 88 with the relative error of a few roundings: a series near 0.
template <typename acc_t>
struct ExponentialLess {
  acc_t one, two;

  SCE_HD explicit ExponentialLess(acc_t x) {
    constexpr int kTerms = sizeof(acc_t) == sizeof(double) ? 18 : 10;
    const bool near = std::fabs(x) < acc_t(1);
    const acc_t t = near ? x : acc_t(0), far = exponential_less_1(x);
    acc_t series = 0;
#pragma GCC unroll 18
    for (int i = kTerms + 1; i > 1; --i) series = (series * t + acc_t(1)) * (acc_t(1) / acc_t(i));
    two = near ? series * t * t : far - x;
    one = near ? t + two : far;
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

  // Returns log(q / p) + log_ratio.
  SCE_HD acc_t less_maxima(acc_t z, acc_t y) const {
    const ExactDifference<acc_t> of_class(z, y), of_largest(max, teacher_max);
    const acc_t x = of_class.value - of_largest.value, exact = x + (of_class.error - of_largest.error);
    return is_ratio(x) ? exact : x;
  }
  SCE_HD acc_t p(acc_t y) const { return exponential((y - teacher_max) - log_teacher_sum); }
  SCE_HD acc_t q(acc_t z) const { return exponential((z - max) - log_sum); }
  // Returns p (exp(x) - 1) with x of `less_maxima`. log_ratio is log(1 + more), with the sum over all classes.
  SCE_HD acc_t more(acc_t z, acc_t y) const {
    const acc_t x = less_maxima(z, y), e = exponential(y - teacher_max), of_q = exponential(z - max);
    return (is_ratio(x) ? e * ExponentialLess<acc_t>(is_ratio(x) ? x : acc_t(0)).one : of_q - e) / teacher_sum;
  }
};

// Computes a divergence of two distributions that agree in all classes of much probability, from x = log(q / p) with a
// small relative error. Each term is at least 0, and for small |x| no difference of larger numbers. The slopes have
// k = 1 under forward KL, and k = -sign / 2 under TV with the sign of q - p of the teacher's largest class. `slope_sum`
// is at least 0 except under skewed reverse KL and TV, and its sum is C.
template <Divergence kind, typename acc_t>
struct NearDivergence : DivergenceShares<acc_t> {
  using Shares = DivergenceShares<acc_t>;
  using Shares::beta, Shares::mixture, Shares::rest;
  static constexpr int kCount = divergence_count(kind);
  acc_t sign;

  SCE_HD NearDivergence(const Shares& shares, acc_t sign) : Shares(shares), sign(sign) {}

  struct At {
    acc_t term[kCount], slope[kCount], slope_sum[kCount];
  };

  // Returns a (exp(x) - 1 - x) for x = log(b / a). Its sum over classes is that of a log(a / b).
  SCE_HD static acc_t kl(acc_t a, acc_t b, acc_t x, bool near) {
    const acc_t of_near = a * ExponentialLess<acc_t>(near ? x : acc_t(0)).two;
    return near ? of_near : (b - a) - expected(a, x);
  }
  SCE_HD static acc_t sign_of(acc_t x) { return x > acc_t(0) ? acc_t(1) : x < acc_t(0) ? acc_t(-1) : acc_t(0) * x; }

  SCE_HD At at(acc_t p, acc_t q, acc_t x) const {
    const bool near = is_ratio(x);
    const acc_t t = near ? x : acc_t(0), up = ExponentialLess<acc_t>(t).one, down = ExponentialLess<acc_t>(-t).one;
    const acc_t above = near ? p * up : q - p;
    At at;
    if constexpr (kind == Divergence::kForwardKl || kind == Divergence::kSeveral) {
      at.term[0] = kl(p, q, x, near);
      at.slope[0] = above, at.slope_sum[0] = 0;
    }
    if constexpr (kind == Divergence::kReverseKl || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 1 : 0;
      at.term[k] = at.slope_sum[k] = kl(q, p, -x, near);
      at.slope[k] = expected(q, x);
    }
    if constexpr (kind == Divergence::kJsd || kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse ||
                  kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 2 : 0;
      // The mixture has the share of_q of q.
      const acc_t of_p = kind == Divergence::kSkewReverse ? rest : beta;
      const acc_t of_q = kind == Divergence::kSkewReverse ? beta : rest;
      const acc_t m = of_p * p + of_q * q;
      const auto far = mixture.logs(-x);
      const acc_t v = of_q * up, w = of_p * down;  // m / p - 1, m / q - 1
      const acc_t log_p = near ? -log_of_1_plus(v) : far.p, log_q = near ? -log_of_1_plus(w) : far.q;
      const acc_t of_forward = kl(p, m, -log_p, near), of_reverse = kl(q, m, -log_q, near);
      const acc_t square = expected(above, above / m);  // (q - p)^2 / m
      if constexpr (kind == Divergence::kSkewForward) {
        at.term[0] = of_forward;
        at.slope[0] = of_q * expected(q, near ? v / (acc_t(1) + v) : -exponential_less_1(log_p));
        at.slope_sum[0] = of_q * of_q * of_p * square;
      } else if constexpr (kind == Divergence::kSkewReverse) {
        at.term[0] = of_reverse;
        at.slope[0] = expected(q, log_q + beta * (near ? w / (acc_t(1) + w) : -exponential_less_1(log_q)));
        at.slope_sum[0] = of_reverse - beta * of_p * of_p * square;
      } else {
        at.term[k] = beta * of_forward + rest * of_reverse;
        at.slope[k] = rest * expected(q, log_q), at.slope_sum[k] = rest * of_reverse;
      }
    }
    if constexpr (kind == Divergence::kTv || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 3 : 0;
      at.term[k] = acc_t(0.5) * std::fabs(above);
      at.slope[k] = at.slope_sum[k] = acc_t(0.5) * q * (sign_of(near ? x : above) - sign);  // the product p x may be 0
    }
    if constexpr (kind == Divergence::kAlpha) {
      // With the larger share 1 - b of the distribution l, o the other one and t = log(o / l), the term is
      // l (b (exp(t) - 1) - (exp(b t) - 1)) / (b (1 - b)).
      const acc_t b = mixture.least, l = mixture.pick(q, p), o = mixture.pick(p, q), to = mixture.pick(-t, t);
      const acc_t of_near = l * (b * ExponentialLess<acc_t>(to).two - ExponentialLess<acc_t>(b * to).two);
      // The product p^beta q^(1 - beta) is that of the roots, which do not overflow if the ratio does.
      const acc_t product = expected(power(p, beta), power(q, rest));
      const acc_t of_far = ((acc_t(1) - b) * l + b * o) - product;
      at.term[0] = (near ? of_near : of_far) / (b * (acc_t(1) - b));
      at.slope[0] = (near ? -q * ExponentialLess<acc_t>(-beta * t).one : q - product) / beta;
      at.slope_sum[0] = rest * at.term[0];
    }
    if constexpr (kind == Divergence::kHellinger) {
      const acc_t half = acc_t(0.5) * t, root = ExponentialLess<acc_t>(half).one;
      const acc_t root_of_p = ExponentialLess<acc_t>(-half).one;
      const acc_t product = expected(power(p, acc_t(0.5)), power(q, acc_t(0.5)));
      at.term[0] = acc_t(0.5) * (near ? p * root * root : (p + q) - acc_t(2) * product);
      at.slope[0] = acc_t(0.5) * (near ? -q * root_of_p : q - product), at.slope_sum[0] = acc_t(0.5) * at.term[0];
    }
    return at;
  }

 private:
  // Returns x^of for a probability.
  SCE_HD static acc_t power(acc_t x, acc_t of) { return x == acc_t(0) ? acc_t(0) : exponential(of * logarithm(x)); }
};

// Returns true if the ordinary result of a row has so few digits that it must be computed by NearDivergence.
template <typename acc_t>
SCE_HD bool is_near(Divergence kind, const acc_t* divergence) {
  return kind == Divergence::kTv ? divergence[0] < acc_t(0.125)
                                 : divergence[kind == Divergence::kSeveral ? 2 : 0] < acc_t(0.03125);
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
