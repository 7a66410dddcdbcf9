// Launches the kernels of the loss. Forward reads each logit once; backward reads it once and writes its gradient once.
// A group of threads processes a row, or a part of it if rows are few and long; see plan_of. Rows that fit into
// registers or shared memory use one_pass.cu.
#include "device/row_passes.cuh"
#include "device/strided_rows.cuh"
#include "launchers.h"
#include "row_plan.h"

namespace sparse_ce {
namespace cuda {
namespace {

// Rows up to kWarpRowBytes are read by a warp, and longer ones too if there are many. For a few thousand classes, the
// communication within a block dominates (65536 x 5000 bfloat16 on an H100: 1.5 ms instead of .7).
constexpr int64_t kWarpRowBytes = 8192, kLongWarpRowBytes = 24560, kManyRows = 2048;
// With so few classes and enough rows, each row is processed by a thread, because a warp has hardly one class per lane.
constexpr int64_t kThreadClasses = 32, kManyThreads = 16384;
// The smallest part of a row for a block is two steps of its loop. It is half a step if split rows are so few that some
// multiprocessors are idle (predicted for an H100: 1 x 1M bfloat16 takes 6 us, and 10 us with 64 blocks).
constexpr int64_t kSplitBytes = 32768, kLeastSplitBytes = 8192;
constexpr int kBlocksPerMultiprocessor = 4;  // with fewer blocks, rows are split
constexpr int64_t kBlocksIfCached = 12;  // per multiprocessor, which runs three, if the gradient may be up to date
// Adjacent rows are split if they have at least kSharedClasses classes, until each multiprocessor has twice the threads
// that it runs. A part has at least as many classes as are summed together, and a warp must merge the parts quickly.
constexpr int64_t kSharedClasses = 128, kSharingThreads = 2048, kMostParts = 512;

// ------------------------------------------------------------------------------------------------ forward

// One group processes a row, or a part of a row. For parts, partial (rows, splits) receives the statistics.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(4))
    forward_kernel(ForwardArgs args, int64_t splits, RowStats<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWidth>;
  using acc_t = acc_type<scalar_t>;
  const int64_t columns = args.target.num_classes;
  for (int64_t item = Group::number(); item < args.rows * splits; item += Group::count()) {
    const auto [r, split] = part_of(item, splits);
    const bool ignored = args.target.ignored(r);
    RowStats<acc_t> stats;
    if (!ignored)
      stats = scan_row<kWidth, scalar_t>(args, r, split_begin(columns, splits, split),
                                         split_begin(columns, splits, split + 1));
    stats = Group::reduce(stats);
    if (splits == 1)
      finish_row<kWidth>(args, r, ignored, args.template row<scalar_t>(r), args.template transform<acc_t>(r), stats);
    else if (Group::rank() == 0)
      partial[item] = stats;
  }
}

// One warp per row merges the parts of forward_kernel or strided_forward_kernel.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(4))
    forward_merge_kernel(ForwardArgs args, int64_t splits, const RowStats<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWarp>;
  using acc_t = acc_type<scalar_t>;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    RowStats<acc_t> stats;
    for (int64_t split = Group::rank(); split < splits; split += kWarp) stats.merge(partial[r * splits + split]);
    finish_row<kWarp>(args, r, args.target.ignored(r), args.template any_row<scalar_t>(r),
                      args.template transform<acc_t>(r), Group::reduce(stats));
  }
}

// ------------------------------------------------------------------------------------------------ backward

// One group processes a row, or a part of a row. Only this group reads and writes its columns, so the gradient may be
// the logits.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(3))
    backward_kernel(BackwardArgs args, int64_t splits, EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using Group = RowGroup<kWidth>;
  using acc_t = acc_type<scalar_t>;
  if (args.is_up_to_date()) return;
  const int64_t first_class = args.first_class, classes = args.classes();
  for (int64_t item = Group::number(); item < args.rows * splits; item += Group::count()) {
    const auto [r, split] = part_of(item, splits);
    const int64_t begin = first_class + split_begin(classes, splits, split);
    const int64_t end = first_class + split_begin(classes, splits, split + 1);
    const scalar_t* row = args.template row<scalar_t>(r);
    scalar_t* gradient = args.template gradient_row<scalar_t>(r);
    if (split == splits - 1) write_zeros<kWidth>(gradient, args.classes_end(), args.vocab);
    if (args.template without_gradient<acc_t>(r)) {
      write_zeros<kWidth>(gradient, begin, end);
      continue;
    }

    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const EntryRange range = args.target.row(r);
    const GradientCoefficients<acc_t> c = args.coefficients(r, mass_of_row<kWidth, acc_t>(args.target, range));
    const auto same = classes_of_row<kWidth>(args.target, range, begin, end, entry_gradients);
    make_entry_gradients<kWidth>(args, c, transform, same, range, row, begin, end, entry_gradients);
    Group::sync();  // all logits at the entries have been read
    write_dense<kWidth>(args, c, transform, row, gradient, begin, end);
    Group::sync();  // the dense gradient has been written
    write_entry_gradients<kWidth>(args.target, range, begin, end, entry_gradients, gradient);
  }
}

// One warp per row computes the gradient for the values of its entries, and reads only the logits at the entries.
// grad_values is 0 on entry. With six blocks a thread has 40 registers. Without this bound ptxas assigns 32 and spills
// (sm_80).
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(6)) backward_values_kernel(BackwardArgs args) {
  using Group = RowGroup<kWarp>;
  using acc_t = acc_type<scalar_t>;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    if (args.target.ignored(r)) continue;
    const auto row = args.template any_row<scalar_t>(r);
    const GradientCoefficients<acc_t> c = args.coefficients(r, acc_t(0));
    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const EntryRange range = args.target.row(r);
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWarp) args.write_value(i, row, transform, c);
  }
}

// ------------------------------------------------------------------------------------------------ launchers

// Plans adjacent rows: a thread processes a row, or a part of a row.
Plan plan_of_strided(const CrossEntropyArgs& args, int multiprocessors) {
  int64_t parts = 1;
  if (args.target.num_classes >= kSharedClasses && args.rows > 0)
    parts = std::min({std::max<int64_t>(1, kSharingThreads * multiprocessors / args.rows_to_plan()),
                      divide_up(args.target.num_classes, kStridedColumns), kMostParts});
  return {1, parts, blocks_of(args, args.rows * parts, kStridedThreads)};
}

// Converts rows with few classes to strided rows if there are many.
ForwardArgs by_threads(ForwardArgs args) {
  if (few_classes(args)) args.strided = {args.rows, 0, 1, args.row_stride};
  return args;
}
BackwardArgs by_threads(BackwardArgs args) {
  if (!few_classes(args)) return args;
  args.strided = {args.rows, 0, 1, args.row_stride};
  args.grad_strided = {args.rows, 0, 1, args.grad_row_stride};
  return args;
}

}  // namespace

bool few_classes(const CrossEntropyArgs& args) {
  const bool whole = args.first_class == 0 && args.classes_end() == args.target.num_classes;
  return args.strided.inner == 0 && whole && args.target.num_classes <= kThreadClasses &&
         args.rows_to_plan() >= kManyThreads;
}

Plan plan_of(const CrossEntropyArgs& args, int multiprocessors) {
  if (args.strided.inner > 0) return plan_of_strided(args, multiprocessors);
  const int64_t row_bytes = args.classes() * size_of(args.dtype);
  const int64_t rows = args.rows_to_plan();
  const bool many = rows >= kManyRows;
  if (row_bytes <= (many ? kLongWarpRowBytes : kWarpRowBytes))
    return {kWarp, 1, blocks_of(args, args.rows, kThreads / kWarp)};
  const int64_t enough = int64_t(kBlocksPerMultiprocessor) * multiprocessors;
  const int64_t by_rows = divide_up(enough, rows);
  int64_t by_bytes = row_bytes / kSplitBytes;
  if (by_bytes > 1 && rows * by_bytes < multiprocessors) by_bytes = row_bytes / kLeastSplitBytes;
  const int64_t splits = std::max<int64_t>(1, std::min(by_rows, by_bytes));
  return {kThreads, splits, blocks_of(args, args.rows * splits, 1)};
}

size_t workspace_of(const ForwardArgs& args) {
  if (few_classes(args) || one_pass_of(args)) return 0;
  const Plan plan = plan_of(args, multiprocessors());
  const size_t each = args.dtype == DType::kFloat64 ? sizeof(RowStats<double>) : sizeof(RowStats<float>);
  return plan.splits == 1 ? 0 : static_cast<size_t>(args.rows * plan.splits) * each;
}

cudaError_t cross_entropy_forward(const ForwardArgs& original, void* workspace, cudaStream_t stream) {
  if (original.rows == 0) return cudaSuccess;
  const ForwardArgs args = by_threads(original);
  if (const OnePass form = one_pass_of(args)) return cross_entropy_one_pass(form, args, nullptr, stream);
  const Plan plan = plan_of(args, multiprocessors());
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    auto* partial = static_cast<RowStats<acc_type<scalar_t>>*>(workspace);
    auto kernel = plan.width == 1       ? strided_forward_kernel<scalar_t>
                  : plan.width == kWarp ? forward_kernel<scalar_t, kWarp>
                                        : forward_kernel<scalar_t, kThreads>;
    const int threads = plan.width == 1 ? kStridedThreads : kThreads;
    const cudaError_t error = launch(stream, plan.blocks, threads, kernel, args, plan.splits, partial);
    if (error != cudaSuccess || plan.splits == 1) return error;
    return launch(stream, blocks_of(args, args.rows, kThreads / kWarp), kThreads, forward_merge_kernel<scalar_t>, args,
                  plan.splits, partial);
  });
}

// Returns the size of the entries' gradients and of the tables of ClassesOfRow.
size_t bytes_of_entries(const CrossEntropyArgs& args) {
  const size_t each = args.dtype == DType::kFloat64 ? sizeof(EntryGradient<double>) : sizeof(EntryGradient<float>);
  const bool tables = args.target.offsets || args.target.width > kWarp;  // shorter rows need no tables
  return static_cast<size_t>(args.target.entries) * (each + (tables ? kSumSlots * sizeof(uint32_t) : 0));
}

size_t workspace_of(const BackwardArgs& args) {
  const bool shared = args.strided.inner > 0 && plan_of(args, multiprocessors()).splits > 1;
  const size_t mass = args.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return bytes_of_entries(args) + (shared ? static_cast<size_t>(args.rows) * mass : 0);
}

// Launches the kernels for parts of rows, and before and after them the kernels for their entries.
template <typename scalar_t, typename acc_t>
cudaError_t launch_parts(const BackwardArgs& args, const Plan& plan, EntryGradient<acc_t>* entries,
                         cudaStream_t stream) {
  auto* masses = reinterpret_cast<acc_t*>(reinterpret_cast<char*>(entries) + bytes_of_entries(args));
  const int64_t blocks = blocks_of(args, args.rows, kThreads / kWarp);
  cudaError_t error = launch(stream, blocks, kThreads, make_entries_kernel<scalar_t>, args, masses, entries);
  if (error == cudaSuccess)
    error = launch(stream, plan.blocks, kStridedThreads, strided_parts_kernel<scalar_t>, args, plan.splits, masses);
  if (error == cudaSuccess) error = launch(stream, blocks, kThreads, write_entries_kernel<scalar_t>, args, entries);
  return error;
}

cudaError_t cross_entropy_backward(const BackwardArgs& original, void* workspace, cudaStream_t stream) {
  if (original.rows == 0) return cudaSuccess;
  const BackwardArgs args = by_threads(original);
  Plan plan = plan_of(args, multiprocessors());
  // Blocks cost time even if the gradient is up to date, and otherwise a block can process several rows.
  if (args.expected) plan.blocks = std::min<int64_t>(plan.blocks, kBlocksIfCached * multiprocessors());
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    auto* entries = static_cast<EntryGradient<acc_type<scalar_t>>*>(workspace);
    if (plan.width == 1 && plan.splits > 1) return launch_parts<scalar_t>(args, plan, entries, stream);
    if (plan.width == 1)
      return launch(stream, plan.blocks, kStridedThreads, strided_backward_kernel<scalar_t>, args, entries);
    auto kernel = plan.width == kWarp ? backward_kernel<scalar_t, kWarp> : backward_kernel<scalar_t, kThreads>;
    return launch(stream, plan.blocks, kThreads, kernel, args, plan.splits, entries);
  });
}

cudaError_t cross_entropy_backward_values(const BackwardArgs& original, cudaStream_t stream) {
  if (original.rows == 0) return cudaSuccess;
  const BackwardArgs args = by_threads(original);
  const Plan plan = plan_of(args, multiprocessors());
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    if (plan.width == 1 && plan.splits == 1)
      return launch(stream, plan.blocks, kStridedThreads, strided_backward_values_kernel<scalar_t>, args);
    return launch(stream, blocks_of(args, args.rows, kThreads / kWarp), kThreads, backward_values_kernel<scalar_t>,
                  args);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
