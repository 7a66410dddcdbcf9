// near_divergence.h - Implements the divergences of distributions that agree, for both CPU and CUDA. There the terms of
// `DivergenceOf` are differences that leave few digits.
#pragma once

#include "divergence_math.h"

namespace sparse_ce {

// Holds exp(x), exp(x) - 1 and exp(x) - 1 - x for |x| < 88 with the relative error of a few roundings.
template <typename acc_t>
struct ExponentialLess {
  acc_t whole, less_1, less_2;

  SCE_HD explicit ExponentialLess(acc_t x) {
#ifdef SCE_CUDA
    const bool near = std::fabs(x) < acc_t(0.35);
    whole = exponential(x), less_1 = exponential_less_1(x), less_2 = near ? x * x * series(x) : less_1 - x;
#else
    const Raised<acc_t, degree_for<acc_t>, true> e(x);
    const acc_t of_r = e.r * e.r * series(e.r), more = e.power * (e.r + of_r);
    whole = e.power + more, less_1 = (e.power - acc_t(1)) + more, less_2 = e.power == acc_t(1) ? of_r : less_1 - x;
#endif
  }

 private:
  // Returns 1/2 + x/6 + x^2/24 + ... for |x| < 0.35.
  SCE_HD static acc_t series(acc_t x) {
    constexpr double kFactorials[] = {2,      6,       24,       120,       720,        5040,       40320,
                                      362880, 3628800, 39916800, 479001600, 6227020800, 87178291200};
    constexpr int kTerms = sizeof(acc_t) == sizeof(double) ? 13 : 7;
    acc_t sum = 0;
    SCE_UNROLL
    for (int i = kTerms - 1; i >= 0; --i) sum = sum * x + acc_t(1 / kFactorials[i]);
    return sum;
  }
};

// Holds log(1 + x) and x - log(1 + x) for x > -1 with the relative error of a few roundings. With s = x / (2 + x),
// log(1 + x) is 2 (s + s^3 / 3 + s^5 / 5 + ...), and x - 2 s is x s.
template <typename acc_t>
struct LessLogarithm {
  acc_t log, less;

  SCE_HD explicit LessLogarithm(acc_t x) {
#ifndef SCE_CUDA
    if constexpr (sizeof(acc_t) == sizeof(float)) {
      const Split<acc_t> split(acc_t(1) + x);
      const bool near = split.k == acc_t(0);
      const acc_t f = near ? x : split.f, of_f = less_near_1(f);
      log = split.log_of_power() + (f - of_f), less = near ? of_f : x - log;
      return;
    }
#endif
    constexpr int kTerms = sizeof(acc_t) == sizeof(double) ? 9 : 4;
    const bool near = std::fabs(x) < acc_t(0.25);
    const acc_t t = near ? x : acc_t(0), s = t / (acc_t(2) + t), square = s * s, far = log_of_1_plus(x);
    acc_t series = 0;
    SCE_UNROLL
    for (int i = kTerms; i > 0; --i) series = series * square + acc_t(1) / acc_t(2 * i + 1);
    less = near ? t * s - (s + s) * square * series : x - far;
    log = near ? x - less : far;
  }

#ifndef SCE_CUDA
 private:
  // Returns f - log(1 + f) if 1 + f is between the roots of 1/2 and 2. The fit has a relative error of 8e-9. It takes
  // no division, unlike the series.
  static acc_t less_near_1(acc_t f) {
    constexpr float kFit[] = {0.5f,         -0.33333323f, 0.25f,        -0.20001454f, 0.16668117f,
                              -0.14232619f, 0.12410734f,  -0.11799853f, 0.11612986f,  -0.068643263f};
    const acc_t square = f * f;
    acc_t p = kFit[9] * f + kFit[8];
    SCE_UNROLL
    for (int k = 6; k >= 0; k -= 2) p = p * square + (kFit[k + 1] * f + kFit[k]);
    return square * p;
  }
#endif
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
  return (kind == Divergence::kSeveral ? divergence[2] : divergence[0]) <
         acc_t(0.03125) * static_cast<acc_t>(relative_to_kl(kind, beta));
}

// Returns true if a row cannot be near if its other classes contribute at least 0, up to rounding.
template <typename acc_t>
SCE_HD bool is_clearly_far(Divergence kind, double beta, const acc_t* divergence) {
  acc_t less[kMostDivergences];
  for (int k = 0; k < kMostDivergences; ++k) less[k] = acc_t(0.96875) * divergence[k];
  return !is_near(kind, beta, less);
}

// Returns true if NearDivergence must be computed again because log_ratio had this error.
template <typename acc_t>
SCE_HD bool is_rough(Divergence kind, double beta, acc_t divergence, acc_t error) {
  if (kind == Divergence::kTv || kind == Divergence::kSeveral) return error != acc_t(0);
  return error * error * static_cast<acc_t>(relative_to_kl(kind, beta)) >
         acc_t(0.5) * Limits<acc_t>::kEpsilon * divergence;
}

// Holds a row's largest logit, and the sum of exponentials relative to it.
template <typename acc_t>
struct DenseLse {
  acc_t max, sum, log_sum = logarithm(sum);

  SCE_HD acc_t log_prob(acc_t z) const { return (z - max) - log_sum; }
};

// Relates the log-probabilities of a student to those of a teacher. Their difference has the rounding errors of large
// logits, but the difference of the logits themselves has not.
template <typename acc_t>
struct NearRow {
  DenseLse<acc_t> student, teacher;
  acc_t log_ratio;  // log(student.sum / teacher.sum); inf if the row is not near
  bool corrected = false;

  SCE_HD bool near() const { return log_ratio < acc_t(INFINITY); }

  // Returns log(q / p).
  SCE_HD acc_t log_of_ratio(acc_t z, acc_t y) const {
    const ExactDifference<acc_t> of_class(z, y), of_largest(student.max, teacher.max);
    const acc_t x = of_class.value - of_largest.value, exact = x + (of_class.error - of_largest.error);
    return (is_ratio(x) ? exact : x) - log_ratio;
  }

  // Returns true if a row's divergences, and `above`, its sum of q - p, must be computed again. This is so if they have
  // shown that the row is near, or that log_ratio had an error. log_ratio is then the new one.
  SCE_HD bool again(Divergence kind, double beta, const acc_t* divergence, acc_t above) {
    if (corrected) return false;
    if (near()) {
      const acc_t error = log_of_1_plus(above);
      log_ratio += error, corrected = true;
      return is_rough(kind, beta, divergence[0], error);
    }
    if (!is_near(kind, beta, divergence)) return false;
    const acc_t rough = student.log_sum - teacher.log_sum;  // close to 0 it may be rounding; NaN without a class
    log_ratio = std::fabs(rough) >= acc_t(16) * Limits<acc_t>::kEpsilon ? rough : acc_t(0);
    return true;
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

  // `all_near` promises that x is a ratio. Then neither `far_q` nor the logarithms are used.
  template <bool all_near>
  SCE_HD At at(acc_t p, acc_t far_q, acc_t log_p, acc_t log_q, acc_t x) const {
    const bool near = all_near || is_ratio(x);
    const acc_t t = near ? x : x > acc_t(0) ? acc_t(40) : acc_t(-40);
    const ExponentialLess<acc_t> up(t);
    const acc_t of_ratio = p * up.less_1, q = all_near ? p * up.whole : far_q;
    const acc_t above = near ? of_ratio : q - p;
    At at;
    at.q = q, at.above = above;
    if constexpr (kind == Divergence::kForwardKl || kind == Divergence::kSeveral) {
      at.term[0] = near ? p * up.less_2 : above - expected(p, x);
      at.slope[0] = above, at.slope_sum[0] = 0;
    }
    if constexpr (kind == Divergence::kReverseKl || kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 1 : 0;
      at.slope[k] = expected(q, x);
      at.term[k] = at.slope_sum[k] = near ? q * ExponentialLess<acc_t>(-t).less_2 : at.slope[k] - above;
    }
    if constexpr (kind == Divergence::kJsd || kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse ||
                  kind == Divergence::kSeveral) {
      constexpr int k = kCount > 1 ? 2 : 0;
      // The mixture m has the share of_q of q.
      const acc_t of_p = kind == Divergence::kSkewReverse ? rest : beta;
      const acc_t of_q = kind == Divergence::kSkewReverse ? beta : rest;
      const acc_t v = of_q * up.less_1, w = of_p * exponential_less_1(-t);  // m / p - 1, m / q - 1
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
      const acc_t product = near ? l * root.whole : exponential(beta * log_p + rest * log_q);
      const acc_t of_near = l * (b * ExponentialLess<acc_t>(to).less_2 - root.less_2);
      at.term[0] = (near ? of_near : b * less_l - (product - l)) / (b * (acc_t(1) - b));
      at.slope[0] = (near ? product * exponential_less_1(beta * t) : q - product) / beta;
      at.slope_sum[0] = rest * at.term[0];
    }
    if constexpr (kind == Divergence::kHellinger) {
      const ExponentialLess<acc_t> root(acc_t(0.5) * t);
      const acc_t product = near ? p * root.whole : std::sqrt(p) * std::sqrt(q);
      at.term[0] = acc_t(0.5) * (near ? p * root.less_1 * root.less_1 : (p + q) - acc_t(2) * product);
      at.slope[0] = acc_t(0.5) * (near ? product * root.less_1 : q - product);
      at.slope_sum[0] = acc_t(0.5) * at.term[0];
    }
    return at;
  }
};

}  // namespace sparse_ce
