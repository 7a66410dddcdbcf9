// One launch: a second would cost more than it saves. On an H100 7 us at 8192 rows, 11 at 32768, 17 at 65536, in one
// cluster.
#include "row_group.cuh"

#include "cross_entropy.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kRows = 8;  // in flight of a thread
constexpr int64_t kBlockRows = 2 * kRows * kThreads;  // more are worth a cluster
constexpr int kThreadsAlone = 512;  // of a block that has as many to itself

// One block, or those of one cluster, of kWidth threads.
template <typename acc_t, int kWidth>
__global__ void __launch_bounds__(kWidth, kWidth > kThreads ? 1 : held_blocks<acc_t>(3))
    loss_mean_kernel(LossMeanArgs args, int cluster) {
  using Group = RowGroup<kWidth>;
  if (cluster > 1) Cluster::arrive();
  const TargetView& target = args.target;
  const bool asks = args.asks_whether_ignored(), by_index = asks && target.has_width();
  LossMeanStats<double> mine;
#pragma unroll 1
  for (int64_t first = Group::number() * kWidth + Group::rank(); first < target.rows;
       first += Group::count() * kWidth * kRows) {
    const auto row = [&](int u) { return first + Group::count() * kWidth * u; };
    acc_t by[kRows], loss[kRows];
    int64_t index[kRows];
    bool ignored[kRows];
    // What is read of the rows does not depend on each other: behind a branch on one the next would wait for it.
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t r = row(u) < target.rows ? row(u) : first;
      by[u] = args.template weight_of<acc_t>(r);
      loss[u] = args.template loss_of<acc_t>(r);
      index[u] = by_index ? load_int(target.indices, target.indices_dtype, r * target.width) : 0;
      ignored[u] = asks && target.row_mask && !target.row_mask[r];
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (row(u) >= target.rows) break;
      ignored[u] = ignored[u] || (by_index && index[u] == target.ignore_index && target.ignored_from(row(u), 1));
      mine.merge(args.template of<acc_t>(row(u), by[u], loss[u], ignored[u]));
    }
  }
  LossMeanStats<double> stats = Group::reduce(mine);
  if (cluster > 1) {
    Cluster::wait();
    stats = merge_of_cluster(stats, cluster, static_cast<int>(blockIdx.x), 0);
  }
  if (blockIdx.x == 0 && Group::rank() == 0) args.template finish<acc_t>(stats);
}

}  // namespace

cudaError_t loss_mean(const LossMeanArgs& args, cudaStream_t stream) {
  const bool wide = args.target.rows > kBlockRows, clusters = device_has_clusters();
  const int cluster = wide && clusters ? kMostBlocks : 1, threads = wide && !clusters ? kThreadsAlone : kThreads;
  const auto kernel_of = [&](auto acc) {
    using acc_t = decltype(acc);
    return threads == kThreads ? loss_mean_kernel<acc_t, kThreads> : loss_mean_kernel<acc_t, kThreadsAlone>;
  };
  const auto kernel = args.dtype == DType::kFloat64 ? kernel_of(double{}) : kernel_of(float{});
  return launch_clusters(stream, cluster, threads, cluster, kernel, args, cluster);
}

}  // namespace cuda
}  // namespace sparse_ce
