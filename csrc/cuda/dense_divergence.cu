// Assigns a row to a warp, to a block, or to a cluster of blocks. Both models' rows are read up to three times: for
// their statistics, for the sums over their classes, and for the gradient; under forward KL the last two are one. Each
// block of a cluster reads its part of the columns, so that few rows are in flight and are still in the L2 cache when
// they are read again.
#include "device/dense_row.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int64_t kWarpRowBytes = 8192;  // of the student; a block processes longer rows
constexpr int64_t kPartBytes = 65536;  // of both rows; 17 MB in the two blocks that each multiprocessor of an H100 runs

// Merges what the threads of a row have computed; all get the same bits. `turn` counts the calls.
template <int kWidth, template <typename> class stats_t, typename acc_t>
__device__ stats_t<acc_t> merged(const stats_t<acc_t>& mine, int cluster, int part, unsigned turn) {
  using Group = RowGroup<kWidth>;
  const stats_t<acc_t> of_group = Group::broadcast(Group::reduce(mine));
  if constexpr (kWidth > kWarp)
    if (cluster > 1) return merge_of_cluster(of_group, cluster, part, turn);
  return of_group;
}

template <typename scalar_t, int kWidth, bool kForwardKl>
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
  unsigned turn = 0;
  for (int64_t r = Group::number() / cluster; r < args.rows; r += Group::count() / cluster) {
    const bool divergence = args.has_divergence(r), reads = divergence || args.has_label(r);
    const int64_t label = args.label(r);
    DenseRow<scalar_t, kWidth, kForwardKl> row{args, r, begin, end, divergence, shares, {}};
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
      mine = merged<kWidth>(mine, cluster, part, turn++);
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
      if (kForwardKl && args.step == DenseStep::kWithGradient) {
        by = args.coefficients<acc_t>(r, false);
        one_pass = divergence && by.of_slope[0] != acc_t(0);
      }
      // A row that is near needs its logits again. Some classes may prove that it is not, since terms are at least 0.
      bool proves = one_pass && args.overwrites(), again = divergence;
      Group::sync();  // the logit of the label has been read
#pragma unroll 1
      while (again) {
        row.end = proves ? begin + (end - begin) / 8 : end;
        if (kForwardKl && one_pass && !proves)
          sums = row.template compare<true, kForwardKl>(by, gradient);
        else
          sums = row.template compare<true, false>(by, gradient);
        sums = merged<kWidth>(sums, cluster, part, turn++);
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
  return once_per_device([] { return has_clusters(dense_divergence_kernel<double, kThreads, false>); });
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
    const auto run = [&](auto forward_kl) {
      constexpr bool kForwardKl = decltype(forward_kl)::value;
      const auto kernel = of_row > 0 ? dense_divergence_kernel<scalar_t, kThreads, kForwardKl>
                                     : dense_divergence_kernel<scalar_t, kWarp, kForwardKl>;
      return launch_clusters(stream, blocks, kThreads, cluster, kernel, args, cluster);
    };
    return args.kind == Divergence::kForwardKl ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace cuda
}  // namespace sparse_ce
