// Plans select and merges the outputs of shards. device/select_kernels.cuh has the kernels that read logits.
#include "device/row_passes.cuh"

#include "launchers.h"
#include "row_plan.h"
#include "storage_launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

// Merges the statistics that several shards of the classes computed for a row into its outputs, with a warp per row and
// a lane per shard. A row has only a few bytes, so the launch takes most of the time.
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

Plan backward_plan(const SelectBackwardArgs& args) {
  const Plan plan = plan_of(args, multiprocessors());
  if (!args.grad_scale || plan.splits == 1) return plan;
  return {plan.width, 1, blocks_of(args, args.rows, 1)};
}

size_t bytes_of_parts(const SelectArgs& args, const Plan& plan) {
  const size_t each = args.dtype == DType::kFloat64 ? sizeof(Scanned<double>) : sizeof(Scanned<float>);
  return plan.splits == 1 ? 0 : static_cast<size_t>(args.rows * plan.splits) * each;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ launchers

// Returns the size of the parts of rows and, if entries' classes are excluded from sums, of ClassesOfRow's tables.
size_t workspace_of(const SelectArgs& args) {
  const size_t slots = args.needs_tail() ? static_cast<size_t>(args.target.entries) * kClassSlots : 0;
  return bytes_of_parts(args, plan_of(args, multiprocessors())) + slots * sizeof(uint32_t);
}

cudaError_t select_forward(const SelectArgs& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const Plan plan = plan_of(args, multiprocessors());
  auto* slots = reinterpret_cast<uint32_t*>(static_cast<char*>(workspace) + bytes_of_parts(args, plan));
  return with_storage(args.dtype, [&](auto storage) {
    return SelectLauncher<decltype(storage)>::forward(args, plan, workspace, slots, stream);
  });
}

cudaError_t select_backward(const SelectBackwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const Plan plan = backward_plan(args);
  return with_storage(args.dtype, [&](auto storage) {
    return SelectLauncher<decltype(storage)>::backward(args, plan, workspace, stream);
  });
}

cudaError_t select_merge(const SelectMergeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const int64_t blocks = blocks_for(args.rows, kThreads / kWarp, args.max_blocks, (int64_t(1) << 31) - 1);
  auto kernel = args.dtype == DType::kFloat64 ? select_merge_shards_kernel<double> : select_merge_shards_kernel<float>;
  return launch(stream, blocks, kThreads, kernel, args);
}

}  // namespace cuda
}  // namespace sparse_ce
