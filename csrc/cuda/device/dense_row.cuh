// dense_row.cuh - Compares the logits of two models, for one thread of a row.
#pragma once

#include "../../ops/dense_divergence.h"
#include "row_passes.cuh"

namespace sparse_ce {
namespace cuda {

// Holds the largest logits of both rows, and the sums of exponentials relative to them.
template <typename acc_t>
struct DenseStats {
  acc_t max = Limits<acc_t>::kLowest, rest = -1, teacher_max = Limits<acc_t>::kLowest, teacher_rest = -1;

  SCE_HD void merge(const DenseStats& other) {
    merge(max, rest, other.max, other.rest);
    merge(teacher_max, teacher_rest, other.teacher_max, other.teacher_rest);
  }
  SCE_HD static void merge(acc_t& max, acc_t& rest, acc_t other_max, acc_t other_rest) {
    RowStats<acc_t> row;
    row.max = max, row.rest = rest;
    RowStats<acc_t> other;
    other.max = other_max, other.rest = other_rest;
    row.merge(other);
    max = row.max, rest = row.rest;
  }
};

// Holds sums over classes: of terms, of slopes, and of q - p in rows that are near.
template <typename acc_t>
struct DenseSums {
  acc_t term[kMostDivergences] = {}, slope[kMostDivergences] = {}, above = 0;

  SCE_HD void merge(const DenseSums& other) {
    above += other.above;
#pragma unroll
    for (int k = 0; k < kMostDivergences; ++k) term[k] += other.term[k], slope[k] += other.slope[k];
  }
};

template <typename acc_t>
struct LongSums {
  LongSum<acc_t> term[kMostDivergences], slope[kMostDivergences], above;

  __device__ DenseSums<acc_t> total() const {
    DenseSums<acc_t> total;
    total.above = above.sum;
#pragma unroll
    for (int k = 0; k < kMostDivergences; ++k) total.term[k] = term[k].sum, total.slope[k] = slope[k].sum;
    return total;
  }
};

// Computes the forward KL of a row that is not near, and its gradient, in the fewest instructions.
template <typename acc_t>
struct ForwardKl {
  FoldedGradient<acc_t> of_q, of_p;
  acc_t difference, lost;  // of the row's log-sum-exps, and its rounding error
  acc_t by_q, by_p;

  __device__ ForwardKl(const NearRow<acc_t>& row, const DenseCoefficients<acc_t>& by)
      : of_q(probability(row.student)), of_p(probability(row.teacher)), by_q(by.of_q * of_q.a),
        by_p(by.of_slope[0] * of_p.a) {
    const ExactDifference<acc_t> of_largest(row.teacher.max, row.student.max);
    const acc_t of_sums = row.teacher.log_sum - row.student.log_sum;
    difference = of_largest.value + of_sums;
    lost = ((of_largest.value - difference) + of_sums) + of_largest.error;
  }

  // Adds the term of a class, and returns dD/dz.
  __device__ __forceinline__ acc_t add(acc_t z, acc_t y, acc_t& sum) const {
    const acc_t e_q = of_q.below.power(z), e_p = of_p.below.power(y), p = of_p.a * e_p;
    const acc_t log_ratio = ((y - z) - difference) - lost;
    sum += multiply_add(p, p == acc_t(0) ? acc_t(0) : log_ratio, multiply_add(of_q.a, e_q, -p));
    return multiply_add(by_q, e_q, -(by_p * e_p));
  }

 private:
  __device__ static FoldedGradient<acc_t> probability(const DenseLse<acc_t>& row) {
    const acc_t lse = row.max + row.log_sum;
    return FoldedGradient<acc_t>({acc_t(1), acc_t(0), acc_t(0), lse, (row.max - lse) + row.log_sum});
  }
};

// Calls f(constant) with a DivergenceConstant that is not forward KL.
template <typename function_t>
__device__ __forceinline__ void with_other_divergence(Divergence kind, const function_t& f) {
  with_divergence(kind, [&](auto constant) {
    if constexpr (constant.value != Divergence::kForwardKl) f(constant);
  });
}

// Represents the columns [begin, end) of a row, for one thread of a group. Forward KL has a kernel of its own, because
// all others together need the most registers.
template <typename storage_t, int kWidth, bool kForwardKl>
struct DenseRow {
  using scalar_t = storage_t;
  using acc_t = acc_type<scalar_t>;
  using pack_t = Pack<scalar_t>;
  static constexpr int kSize = pack_t::kSize;

  const DenseDivergenceArgs& args;
  int64_t r, begin, end;
  bool divergence;
  DivergenceShares<acc_t> shares;
  NearRow<acc_t> relation;

  __device__ static const scalar_t* row_of(const DenseLogits& x, int64_t r) {
    return static_cast<const scalar_t*>(x.data) + r * x.row_stride;
  }
  __device__ bool has_packs(const DenseLogits& x) const {
    return x.dtype == args.student.dtype && x.column_stride == 1;
  }
  __device__ acc_t load(const DenseLogits& x, int64_t column) const {
    return load_float<acc_t>(x.data, x.dtype, r * x.row_stride + column * x.column_stride);
  }

  __device__ __forceinline__ RowStats<acc_t> stats(const DenseLogits& x) const {
    const scalar_t* row = row_of(x, r);
    OnlineStats<acc_t> stats;
    const LogitTransform<acc_t> transform = x.transform<acc_t>(r);
    for_columns<kWidth, kUnroll>(
        row, begin, end, has_packs(x),
        [&](int64_t column, auto count) {
          constexpr int n = decltype(count)::value, logits = n * kSize;
          pack_t packs[n];
          load_packs<int64_t(kWidth) * kSize>(row + column, count, packs);
          acc_t z[logits];
          if (transform.identity())
            to_logits(packs, count, LogitTransform<acc_t>(LossOptions{}), z);
          else
            to_logits(packs, count, transform, z);
          stats.push(z);
        },
        [&](int64_t column) {
          const acc_t z[] = {transform(load(x, column))};
          stats.push(z);
        });
    return stats.finish();
  }

  template <int n>
  __device__ static void transform_each(const LogitTransform<acc_t>& transform, acc_t (&x)[n]) {
    if (transform.identity()) return;
    to_bases(transform, x);
#pragma unroll
    for (acc_t& of_one : x) of_one *= transform.factor();
  }

  // Computes the sums over the classes, or the gradient, or both under forward KL in a row that is not near.
  template <bool kSums, bool kGradient>
  __device__ __forceinline__ DenseSums<acc_t> compare(const DenseCoefficients<acc_t>& by, scalar_t* gradient) const {
    const LogitTransform<acc_t> of_student = args.student.template transform<acc_t>(r);
    const LogitTransform<acc_t> of_teacher = args.teacher.template transform<acc_t>(r);
    const int64_t label = kGradient ? args.label(r) : -1;
    const bool compares = kSums || (divergence && (!kForwardKl || by.of_slope[0] != acc_t(0)));
    LongSums<acc_t> sums;
    const ForwardKl<acc_t> forward_kl(relation, by);
    // Computes gradients dz from the teacher's logits y and the student's, which `numbers` returns, from `column` on.
    const auto compare_some = [&](int64_t column, const auto& numbers, auto& dz, auto& y) {
      constexpr int n = sizeof(y) / sizeof(acc_t);
      acc_t z[n];
      numbers(z);
      transform_each(of_student, z);
      if (compares) {
        transform_each(of_teacher, y);
        const auto as = [&](auto kind) {
          constexpr int kCount = divergence_count(kind.value);
          acc_t term[kCount] = {}, slope[kCount] = {}, above = 0;
          const auto add = [&](int e, acc_t q, const auto& at, const acc_t* slope_sum) {
            dz[e] = by.of_q * q;
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
              term[k] += at.term[k], slope[k] += slope_sum[k];
              // A slope whose factor is 0 may be infinite.
              if (by.of_slope[k] != acc_t(0)) dz[e] += by.of_slope[k] * at.slope[k];
            }
          };
          if (kForwardKl && ((kSums && kGradient) || !relation.near())) {
#pragma unroll
            for (int e = 0; e < n; ++e) dz[e] = forward_kl.add(z[e], y[e], term[0]);
          } else if (!kForwardKl && !relation.near()) {
            const DivergenceOf<kind.value, acc_t> of(shares);
#pragma unroll
            for (int e = 0; e < n; ++e) {
              const acc_t log_p = relation.teacher.log_prob(y[e]), log_q = relation.student.log_prob(z[e]);
              const acc_t q = exponential(log_q);
              const auto at = of.at(exponential(log_p), q, log_p, log_q, log_p - log_q);
              add(e, q, at, at.slope);
            }
          } else {
            using Near = NearDivergence<kind.value, acc_t>;
            const Near of(shares, Near::sign_of(-relation.log_ratio));
#pragma unroll
            for (int e = 0; e < n; ++e) {
              const acc_t log_p = relation.teacher.log_prob(y[e]), log_q = relation.student.log_prob(z[e]);
              const auto at = of.template at<false>(exponential(log_p), exponential(log_q), log_p, log_q,
                                                    relation.log_of_ratio(z[e], y[e]));
              add(e, at.q, at, at.slope_sum);
              above += at.above;
            }
          }
          if constexpr (kSums) {
            sums.above.add(above);
#pragma unroll
            for (int k = 0; k < kCount; ++k) sums.term[k].add(term[k]), sums.slope[k].add(slope[k]);
          }
        };
        if constexpr (kForwardKl)
          as(DivergenceConstant<Divergence::kForwardKl>{});
        else
          with_other_divergence(args.kind, as);
      } else {
#pragma unroll
        for (int e = 0; e < n; ++e) dz[e] = by.of_q * exponential(relation.student.log_prob(z[e]));
      }
      if (!kGradient) return;
      const auto of_label = static_cast<uint64_t>(label - column);
      if (of_label < uint64_t(n)) {
#pragma unroll
        for (int e = 0; e < n; ++e)
          if (of_label == uint64_t(e)) dz[e] -= by.of_label;
      }
      if (of_student.softcap != acc_t(0)) {
        acc_t x[n];
        numbers(x);
#pragma unroll
        for (int e = 0; e < n; ++e) dz[e] *= of_student.scale * tanh_with_slope(of_student.scale_per_cap * x[e]).slope;
      } else if (!of_student.identity()) {
#pragma unroll
        for (int e = 0; e < n; ++e) dz[e] *= of_student.scale;
      }
    };

    const scalar_t *of_x = row_of(args.student, r), *of_y = row_of(args.teacher, r);
    const bool lines_up = has_packs(args.teacher) && equally_aligned(of_x, of_y);
    const int width = kGradient ? common_width(of_x, gradient) : 16;
    hide(of_x), hide(of_y), hide(gradient);  // otherwise each step would compute them from the tensors' pointers
    for_columns<kWidth, 1>(
        of_x, begin, end, has_packs(args.student) && (!compares || lines_up),
        [&](int64_t column, auto) {
          pack_t pack = pack_t::load(of_x + column), of_teacher{};
          if (compares) of_teacher = pack_t::load(of_y + column);
          // Other divergences need too many registers for all classes of a 16-bit pack.
          constexpr int kParts = kForwardKl || kSize == 1 ? 1 : kSize / 4, n = kSize / kParts;
          Pack<scalar_t, n> parts[kParts], teacher_parts[kParts];
          std::memcpy(parts, &pack, sizeof(pack)), std::memcpy(teacher_parts, &of_teacher, sizeof(pack));
#pragma unroll
          for (int u = 0; u < kParts; ++u) {
            acc_t dz[n], y[n];
            to_numbers(teacher_parts[u], y);
            compare_some(column + u * n, [&](acc_t(&x)[n]) { to_numbers(parts[u], x); }, dz, y);
            if (kGradient) from_numbers(dz, parts[u]);
          }
          if (!kGradient) return;
          std::memcpy(&pack, parts, sizeof(pack));
          pack.store(gradient + column, width);
        },
        [&](int64_t column) {
          const acc_t of_one = load(args.student, column);
          acc_t dz[1], y[1] = {compares ? load(args.teacher, column) : acc_t(0)};
          compare_some(column, [&](acc_t(&x)[1]) { x[0] = of_one; }, dz, y);
          if (kGradient) from_acc(dz[0], gradient[column]);
        });
    return sums.total();
  }
};

}  // namespace cuda
}  // namespace sparse_ce
