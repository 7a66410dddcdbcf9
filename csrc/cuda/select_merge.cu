// Merges the statistics that several shards of the classes computed for a row into its outputs, with a warp per row and
// a lane per shard. A row has only a few bytes, so the launch takes most of the time.
#include "device/row_group.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

template <typename acc_t>
__global__ void __launch_bounds__(kThreads, min_blocks<acc_t>(3)) select_merge_shards_kernel(SelectMergeArgs args) {
  using Group = RowGroup<kWarp>;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    const bool ignored = args.target.ignored(r);
    const EntryRange range = args.target.row(r);
    ShardStats<acc_t> mine;
    for (int64_t shard = Group::rank(); shard < args.shards; shard += kWarp) mine.merge(args.of_shard<acc_t>(shard, r));
    const ShardStats<acc_t> stats = Group::reduce(mine);
    const RowStats<acc_t> of_row = Group::broadcast(stats.all.row);

    bool valid = range.valid;
    for (int64_t i = range.begin + Group::rank(); !ignored && i < range.end; i += kWarp)
      valid = valid && args.target.template column<acc_t>(i) != TargetView::kOutside;
    valid = Group::all(valid);
    if (Group::rank() == 0) args.write_row(r, ignored, !valid, stats, stats.entries);
    if (!args.outputs.log_probs) continue;
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWarp) {
      if (ignored)
        static_cast<acc_t*>(args.log_probs)[i] = acc_t(0);
      else
        args.write_merged_entry(i, !valid, of_row);
    }
  }
}

}  // namespace

cudaError_t select_merge(const SelectMergeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const int64_t blocks = blocks_for(args.rows, kThreads / kWarp, args.max_blocks, (int64_t(1) << 31) - 1);
  auto kernel = args.dtype == DType::kFloat64 ? select_merge_shards_kernel<double> : select_merge_shards_kernel<float>;
  return launch(stream, blocks, kThreads, kernel, args);
}

}  // namespace cuda
}  // namespace sparse_ce
