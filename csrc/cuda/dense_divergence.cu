// Assigns a row to a warp, to a block, or to a cluster of blocks. Both models' rows are read up to three times: for
// their statistics, for the sums over their classes, and for the gradient; under forward KL the last two are one. Each
// block of a cluster reads its part of the columns, so that few rows are in flight and are still in the L2 cache when
// they are read again.
#include "device/row_passes.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int64_t kWarpRowBytes = 8192;  // of the student; a block processes longer rows
constexpr int64_t kPartBytes = 65536;  // of both rows; 17 MB in the two blocks that each multiprocessor of an H100 runs

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

// Represents the columns [begin, end) of a row, for one thread of a group.
template <typename storage_t, int kWidth>
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
    by_softcap(x.transform<acc_t>(r), [&](const LogitTransform<acc_t>& transform) {
      for_columns<kWidth, kUnroll>(
          row, begin, end, has_packs(x),
          [&](int64_t column, auto count) {
            constexpr int n = decltype(count)::value, logits = n * kSize;
            pack_t packs[n];
            load_packs<int64_t(kWidth) * kSize>(row + column, count, packs);
            acc_t z[logits];
            to_logits(packs, count, transform, z);
            stats.push(z);
          },
          [&](int64_t column) {
            const acc_t z[] = {transform(load(x, column))};
            stats.push(z);
          });
    });
    return stats.finish();
  }

  template <int n>
  __device__ static void transform_each(const LogitTransform<acc_t>& transform, acc_t (&x)[n]) {
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
    LongSums<acc_t> sums;
    // Turns logits x of the student and y of the teacher, from `column` on, into gradients in x.
    const auto compare_some = [&](int64_t column, auto& x, auto& y) {
      constexpr int n = sizeof(x) / sizeof(acc_t);
      acc_t z[n], dz[n];
#pragma unroll
      for (int e = 0; e < n; ++e) z[e] = x[e];
      transform_each(of_student, z);
      if (divergence) {
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
          if (kSums && kGradient || !relation.near()) {
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
              const acc_t x_of_one = relation.log_of_ratio(z[e], y[e]);
              const auto at =
                  of.template at<false>(relation.teacher.log_prob(y[e]), relation.student.log_prob(z[e]), x_of_one);
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
        if constexpr (kSums && kGradient)
          as(DivergenceConstant<Divergence::kForwardKl>{});
        else
          with_divergence(args.kind, as);
      } else {
#pragma unroll
        for (int e = 0; e < n; ++e) dz[e] = by.of_q * exponential(relation.student.log_prob(z[e]));
      }
      if (!kGradient) return;
      const int64_t of_label = label - column;
      if (of_label >= 0 && of_label < n) {
#pragma unroll
        for (int e = 0; e < n; ++e)
          if (e == of_label) dz[e] -= by.of_label;
      }
      if (of_student.softcap != acc_t(0)) {
#pragma unroll
        for (int e = 0; e < n; ++e) dz[e] *= of_student.scale * tanh_with_slope(of_student.scale_per_cap * x[e]).slope;
      } else if (!of_student.identity()) {
#pragma unroll
        for (int e = 0; e < n; ++e) dz[e] *= of_student.scale;
      }
#pragma unroll
      for (int e = 0; e < n; ++e) x[e] = dz[e];
    };

    const scalar_t *of_x = row_of(args.student, r), *of_y = row_of(args.teacher, r);
    const bool lines_up = has_packs(args.teacher) && equally_aligned(of_x, of_y);
    const int width = kGradient ? common_width(of_x, gradient) : 16;
    for_columns<kWidth, 1>(
        of_x, begin, end, has_packs(args.student) && (!divergence || lines_up),
        [&](int64_t column, auto) {
          pack_t pack = pack_t::load(of_x + column), of_teacher{};
          if (divergence) of_teacher = pack_t::load(of_y + column);
          acc_t x[kSize], y[kSize];
          to_numbers(pack, x), to_numbers(of_teacher, y);
          compare_some(column, x, y);
          if (!kGradient) return;
          from_numbers(x, pack);
          pack.store(gradient + column, width);
        },
        [&](int64_t column) {
          acc_t x[1] = {load(args.student, column)}, y[1] = {divergence ? load(args.teacher, column) : acc_t(0)};
          compare_some(column, x, y);
          if (kGradient) from_acc(x[0], gradient[column]);
        });
    return sums.total();
  }
};

// Merges what the threads of a row have computed; all get the same bits. `turn` counts the calls for a stats_t.
template <int kWidth, template <typename> class stats_t, typename acc_t>
__device__ stats_t<acc_t> merged(const stats_t<acc_t>& mine, int cluster, int part, unsigned turn) {
  using Group = RowGroup<kWidth>;
  const stats_t<acc_t> of_group = Group::broadcast(Group::reduce(mine));
  if constexpr (kWidth > kWarp)
    if (cluster > 1) return merge_of_cluster(of_group, cluster, part, turn);
  return of_group;
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(2))
    dense_divergence_kernel(DenseDivergenceArgs args, int cluster) {
  using Group = RowGroup<kWidth>;
  using acc_t = acc_type<scalar_t>;
  const int part = kWidth > kWarp ? static_cast<int>(blockIdx.x) % cluster : 0;
  const int64_t begin = split_begin(args.classes, cluster, part), end = split_begin(args.classes, cluster, part + 1);
  const bool writes = part == 0 && Group::rank() == 0;
  const int count = divergence_count(args.kind);
  const DivergenceShares<acc_t> shares(args.kind, args.beta);
  if (kWidth > kWarp && cluster > 1) Cluster::sync();  // all blocks have started
  unsigned turn = 0, turn_of_sums = 0;
  for (int64_t r = Group::number() / cluster; r < args.rows; r += Group::count() / cluster, ++turn) {
    const bool divergence = args.has_divergence(r), reads = divergence || args.has_label(r);
    const int64_t label = args.label(r);
    DenseRow<scalar_t, kWidth> row{args, r, begin, end, divergence, shares, {}};
    NearRow<acc_t>& relation = row.relation;
    // The logit of the label is read before the gradient overwrites it.
    acc_t of_label = 0;
    if (writes && args.writes_sums() && label >= 0)
      of_label = args.student.template transform<acc_t>(r)(row.load(args.student, label));

    acc_t* stats = args.stats_of<acc_t>(r);
    if (args.writes_stats()) {
      DenseStats<acc_t> mine;
#pragma unroll 1
      for (int model = 0; model < 2; ++model) {  // a loop, because two calls would take twice the time to compile
        const bool of_teacher = model == 1;
        if (!(of_teacher ? divergence : reads)) continue;
        const RowStats<acc_t> of_row = row.stats(of_teacher ? args.teacher : args.student);
        (of_teacher ? mine.teacher_max : mine.max) = of_row.max;
        (of_teacher ? mine.teacher_rest : mine.rest) = of_row.rest;
      }
      mine = merged<kWidth>(mine, cluster, part, turn);
      if (writes) {
        stats[0] = reads ? mine.max : acc_t(0), stats[1] = reads ? acc_t(1) + mine.rest : acc_t(0);
        stats[2] = divergence ? mine.teacher_max : acc_t(0),
        stats[3] = divergence ? acc_t(1) + mine.teacher_rest : acc_t(0), stats[4] = acc_t(INFINITY);
      }
      if (args.step == DenseStep::kStatistics) continue;
      relation = {{mine.max, acc_t(1) + mine.rest}, {mine.teacher_max, acc_t(1) + mine.teacher_rest}, acc_t(INFINITY)};
    } else {
      relation = {{stats[0], stats[1]}, {stats[2], stats[3]}, stats[4]};
    }
    if (writes && args.writes_sums())
      args.sum<acc_t>(count, r) = label >= 0 ? -relation.student.log_prob(of_label) : acc_t(0);

    scalar_t* gradient = static_cast<scalar_t*>(args.grad) + r * args.grad_row_stride;
    if (args.writes_gradient() && part == cluster - 1) write_zeros<kWidth>(gradient, args.classes, args.columns);
    DenseCoefficients<acc_t> by;
    DenseSums<acc_t> sums;
    if (args.writes_sums()) {
      bool one_pass = false;
      if (args.step == DenseStep::kWithGradient && args.knows_slopes()) {
        by = args.coefficients<acc_t>(r, false);
        one_pass = divergence && !by.zero();
      }
      // A row that is near needs its logits again. Some classes may prove that it is not, since terms are at least 0.
      bool proves = one_pass && args.overwrites(), again = divergence;
      Group::sync();  // the logit of the label has been read
#pragma unroll 1
      while (again) {
        row.end = proves ? begin + (end - begin) / 8 : end;
        if (one_pass && !proves)
          sums = row.template compare<true, true>(by, gradient);
        else
          sums = row.template compare<true, false>(by, gradient);
        sums = merged<kWidth>(sums, cluster, part, turn_of_sums++);
        if (proves) {
          one_pass = is_clearly_far(args.kind, args.beta, sums.term), proves = false;
          continue;
        }
        // A row of a shard has no divergence of its own.
        again = args.step != DenseStep::kSums && relation.again(args.kind, args.beta, sums.term, sums.above);
        one_pass = one_pass && !again;
      }
      if (writes) {
        if (args.writes_stats()) stats[4] = relation.log_ratio;
        args.sum<acc_t>(2 * count + 1, r) = sums.above;
#pragma unroll
        for (int k = 0; k < kMostDivergences; ++k) {
          if (k >= count) break;
          const bool of_shard = args.step == DenseStep::kSums;
          args.sum<acc_t>(k, r) = of_shard ? sums.term[k] : bounded(args.kind, k, args.beta, sums.term[k]);
          args.sum<acc_t>(count + 1 + k, r) = sums.slope[k];
        }
      }
      if (one_pass) continue;
    }
    if (!args.writes_gradient()) continue;
    Group::sync();  // all logits have been read: other threads may write their gradients
    const bool near = relation.near();
    by = args.writes_sums() ? args.coefficients<acc_t>(r, near, [&](int k) { return sums.slope[k]; })
                            : args.coefficients<acc_t>(r, near);
    if (reads && !by.zero())
      row.template compare<false, true>(by, gradient);
    else
      write_zeros<kWidth>(gradient, begin, end);
  }
}

bool device_runs_clusters() {  // the kernel of float64 has the most registers
  return once_per_device([] { return has_clusters(dense_divergence_kernel<double, kThreads>); });
}

// Returns the blocks of a row, or 0 if a warp processes it.
int blocks_of_row(const DenseDivergenceArgs& args) {
  const int64_t of_student = args.classes * size_of(args.student.dtype);
  const int64_t bytes = of_student + args.classes * size_of(args.teacher.dtype);
  if (of_student <= kWarpRowBytes) return 0;
  int cluster = 1;
  if (!device_runs_clusters()) return cluster;
  while (cluster < kMostBlocks && bytes > cluster * kPartBytes) cluster *= 2;
  return cluster;
}

}  // namespace

cudaError_t dense_divergence(const DenseDivergenceArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const int of_row = blocks_of_row(args), cluster = of_row > 0 ? of_row : 1;
  const int64_t most = ((int64_t(1) << 31) - 1) / cluster;
  const int64_t blocks = cluster * blocks_for(args.rows, of_row > 0 ? 1 : kThreads / kWarp, args.max_blocks, most);
  return with_storage(args.student.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    const auto kernel =
        of_row > 0 ? dense_divergence_kernel<scalar_t, kThreads> : dense_divergence_kernel<scalar_t, kWarp>;
    return launch_clusters(stream, blocks, kThreads, cluster, kernel, args, cluster);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
