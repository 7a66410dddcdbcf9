// Forward reads each logit once; backward reads it once and writes its gradient once. A group of threads takes a row,
// or a part of one where rows are few and long; see plan_of.
#include "row_group.cuh"

#include "cross_entropy.h"

#include <algorithm>

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kUnroll = 4;  // packs in flight per thread where nothing but exp is computed
constexpr int64_t kWarpRowBytes = 8192;  // rows up to here are read by a warp: 16 packs a thread
constexpr int64_t kSplitBytes = 32768;  // the least part of a row that is worth a block
constexpr int kBlocksPerMultiprocessor = 4;  // below this many, rows are split

// ------------------------------------------------------------------------------------------------ forward

// Statistics of the columns [begin, end) of row r, by one thread of a group.
template <int kWidth, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ RowStats<acc_t> scan_row(const ForwardArgs& args, int64_t r, int64_t begin, int64_t end) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const scalar_t* row = args.template row<scalar_t>(r);
  const LogitTransform<acc_t> transform(args.options);
  RowStats<acc_t> stats;

  if (transform.identity() && args.options.label_smoothing == 0) {
    for_columns<kWidth, kUnroll>(
        row, begin, end, true,
        [&](int64_t c, auto count) {
          constexpr int n = decltype(count)::value;
          Pack<scalar_t> packs[n];
#pragma unroll
          for (int u = 0; u < n; ++u) packs[u] = Pack<scalar_t>::load(row + c + u * kWidth * kSize);
          acc_t z[n * kSize];
#pragma unroll
          for (int i = 0; i < n * kSize; ++i) z[i] = to_acc(packs[i / kSize].at[i % kSize]);
          stats.push(z, 0, n * kSize);
        },
        [&](int64_t c) {
          const acc_t z = to_acc(row[c]);
          stats.push(&z, 0, 1);
        });
    return stats;
  }

  const bool smooth = args.options.label_smoothing != 0;
  const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
  for_columns<kWidth, 1>(
      row, begin, end, true,
      [&](int64_t c, auto) {
        const Pack<scalar_t> pack = Pack<scalar_t>::load(row + c);
        acc_t z[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] = transform(to_acc(pack.at[i]));
        stats.push(z, 0, kSize);
        if (smooth) stats.push_weighted(z, weight ? weight + c : nullptr, kSize);
      },
      [&](int64_t c) {
        const acc_t z = transform(to_acc(row[c]));
        stats.push(&z, 0, 1);
        if (smooth) stats.push_weighted(&z, weight ? weight + c : nullptr, 1);
      });
  return stats;
}

// Adds the entries to a row's statistics and writes its loss. All threads of the group; `stats` counts on lane 0.
template <int kWidth, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ void finish_row(const ForwardArgs& args, int64_t r, bool ignored, const RowStats<acc_t>& stats) {
  using Group = RowGroup<kWidth>;
  const scalar_t* row = args.template row<scalar_t>(r);
  const LogitTransform<acc_t> transform(args.options);
  TargetSums<LongSum<acc_t>> sums;  // a row may have a hundred thousand entries
  if (!ignored) {
    const EntryRange range = args.target.row(r);
    if (!range.valid) sums.mass.sum = Limits<acc_t>::kNaN;
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const auto entry = args.target.template entry<acc_t>(i);
      sums.add(args.target.share(entry), stats.max,
               [&] { return entry.column < 0 ? stats.max : transform(to_acc(row[entry.column])); });
    }
  }
  const TargetStats<acc_t> target = Group::reduce(sums.template stats<acc_t>());
  if (Group::rank() == 0) args.write(r, ignored, stats, target);
}

// Part `split` of `splits` of the columns [0, columns), in whole packs.
__host__ __device__ inline int64_t split_begin(int64_t columns, int64_t splits, int64_t split) {
  const int64_t part = ((columns + splits - 1) / splits + 15) / 16 * 16;
  return split * part < columns ? split * part : columns;
}

// One group per row, or per part of a row: then partial (rows, splits) receives the statistics.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(ForwardArgs args, int64_t splits, RowStats<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWidth>;
  const int64_t columns = args.target.num_classes;
  for (int64_t item = Group::number(); item < args.rows * splits; item += Group::count()) {
    const int64_t r = item / splits, split = item % splits;
    const bool ignored = args.target.ignored(r);
    RowStats<acc_type<scalar_t>> stats;
    if (!ignored)
      stats = scan_row<kWidth, scalar_t>(args, r, split_begin(columns, splits, split),
                                         split_begin(columns, splits, split + 1));
    stats = Group::reduce(stats);
    if (splits == 1)
      finish_row<kWidth, scalar_t>(args, r, ignored, stats);
    else if (Group::rank() == 0)
      partial[item] = stats;
  }
}

// One warp per row merges the parts of forward_kernel.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    forward_merge_kernel(ForwardArgs args, int64_t splits, const RowStats<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWarp>;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    RowStats<acc_type<scalar_t>> stats;
    for (int64_t split = Group::rank(); split < splits; split += kWarp) stats.merge(partial[r * splits + split]);
    finish_row<kWarp, scalar_t>(args, r, args.target.ignored(r), Group::reduce(stats));
  }
}

// ------------------------------------------------------------------------------------------------ backward

// The gradient at an entry: made before the dense pass, which may overwrite the logits, and written after it. Rounded
// to storage once, so that p - 1 near p = 1 keeps its digits in 16 bits. column is -1 where there is nothing to write.
template <typename acc_t>
struct EntryGradient {
  int64_t column;
  acc_t value;
};

// Whether equal classes stand side by side, as in a coalesced COO or a CSR tensor. All threads of the group.
template <int kWidth>
__device__ bool is_sorted(const TargetView& target, EntryRange range) {
  bool sorted = true;
  for (int64_t i = range.begin + RowGroup<kWidth>::rank(); i + 1 < range.end; i += kWidth)
    sorted = sorted &&
             load_int(target.indices, target.indices_dtype, i) <= load_int(target.indices, target.indices_dtype, i + 1);
  return RowGroup<kWidth>::all(sorted);
}

// The sum of the weights of entry i's class over its row, in the order of the entries, where i is the first of them;
// 0 where it is not. O(entries) of the row, or O(duplicates) where they are sorted.
template <typename acc_t>
__device__ acc_t class_sum(const TargetView& target, EntryRange range, int64_t i, int64_t column, bool sorted) {
  int64_t k = i;
  if (!sorted) k = range.begin;
  while (sorted && k > range.begin && load_int(target.indices, target.indices_dtype, k - 1) == column) --k;
  acc_t sum = 0;
  for (; k < range.end; ++k) {
    if (load_int(target.indices, target.indices_dtype, k) != column) {
      if (sorted) break;
      continue;
    }
    const acc_t value = target.template entry<acc_t>(k).value;
    if (k < i && value != acc_t(0)) return acc_t(0);
    sum += value;
  }
  return sum;
}

// Fills the gradient of the columns [begin, end) with 0.
template <int kWidth, typename scalar_t>
__device__ void write_zeros(scalar_t* gradient, int64_t begin, int64_t end) {
  Pack<scalar_t> zeros;
  std::memset(&zeros, 0, sizeof(zeros));
  for_columns<kWidth, 1>(
      gradient, begin, end, true, [&](int64_t c, auto) { zeros.store(gradient + c); },
      [&](int64_t c) { gradient[c] = zeros.at[0]; });
}

// The gradient of the columns [begin, end) as if none had an entry; `gradient` may be `row`.
template <int kWidth, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ void write_dense(const BackwardArgs& args, const GradientCoefficients<acc_t>& c, const scalar_t* row,
                            scalar_t* gradient, int64_t begin, int64_t end) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const LogitTransform<acc_t> transform(args.options);
  const bool by_packs = equally_aligned(row, gradient);

  if (transform.identity() && args.options.label_smoothing == 0) {
    for_columns<kWidth, kUnroll>(
        row, begin, end, by_packs,
        [&](int64_t column, auto count) {
          constexpr int n = decltype(count)::value;
          Pack<scalar_t> packs[n];
#pragma unroll
          for (int u = 0; u < n; ++u) packs[u] = Pack<scalar_t>::load(row + column + u * kWidth * kSize);
#pragma unroll
          for (int u = 0; u < n; ++u) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) from_acc(c.at(to_acc(packs[u].at[i])), packs[u].at[i]);
            packs[u].store(gradient + column + u * kWidth * kSize);
          }
        },
        [&](int64_t column) { from_acc(c.at(to_acc(row[column])), gradient[column]); });
    return;
  }

  const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
  const auto general = [&](scalar_t x, int64_t column, scalar_t& out) {
    const acc_t z = transform(to_acc(x));
    from_acc(c.at(z, weight ? weight[column] : acc_t(1)) * transform.slope(z), out);
  };
  for_columns<kWidth, 1>(
      row, begin, end, by_packs,
      [&](int64_t column, auto) {
        Pack<scalar_t> pack = Pack<scalar_t>::load(row + column);
#pragma unroll
        for (int i = 0; i < kSize; ++i) general(pack.at[i], column + i, pack.at[i]);
        pack.store(gradient + column);
      },
      [&](int64_t column) { general(row[column], column, gradient[column]); });
}

// One group per row, or per part of a row: it alone reads and writes its columns, so the gradient may be the logits.
// entry_gradients has one element for each of the target's entries; each belongs to the group of its row and column.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, 3)
    backward_kernel(BackwardArgs args, int64_t splits, EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using Group = RowGroup<kWidth>;
  using acc_t = acc_type<scalar_t>;
  const int64_t columns = args.target.num_classes;
  const LogitTransform<acc_t> transform(args.options);
  for (int64_t item = Group::number(); item < args.rows * splits; item += Group::count()) {
    const int64_t r = item / splits, split = item % splits;
    const int64_t begin = split_begin(columns, splits, split), end = split_begin(columns, splits, split + 1);
    const scalar_t* row = args.template row<scalar_t>(r);
    scalar_t* gradient = args.template gradient_row<scalar_t>(r);
    if (split == splits - 1) write_zeros<kWidth>(gradient, columns, args.vocab);
    if (args.template without_gradient<acc_t>(r)) {
      write_zeros<kWidth>(gradient, begin, end);
      continue;
    }

    const EntryRange range = args.target.row(r);
    LongSum<acc_t> mass;
    if (!range.valid) mass.sum = Limits<acc_t>::kNaN;
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      mass.add(args.target.share(args.target.template entry<acc_t>(i)));
    }
    const GradientCoefficients<acc_t> c = args.coefficients(r, Group::reduce(TargetStats<acc_t>{0, mass.sum}).mass);

    const bool sorted = range.end - range.begin > kWarp && is_sorted<kWidth>(args.target, range);
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int64_t column = args.target.template entry<acc_t>(i).column;
      if (column < begin || column >= end) continue;  // padding, or another group's
      const acc_t sum = class_sum<acc_t>(args.target, range, i, column, sorted);
      const acc_t o = args.target.template class_weight<acc_t>(column);
      const acc_t z = transform(to_acc(row[column]));
      entry_gradients[i] = {sum == acc_t(0) ? -1 : column, c.at(z, o, sum * o) * transform.slope(z)};
    }
    Group::sync();  // the logits at the entries are read
    write_dense<kWidth>(args, c, row, gradient, begin, end);
    Group::sync();  // the dense gradient is written
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int64_t column = args.target.template entry<acc_t>(i).column;
      if (column < begin || column >= end) continue;
      const EntryGradient<acc_t> entry = entry_gradients[i];
      if (entry.column >= 0) from_acc(entry.value, gradient[entry.column]);
    }
  }
}

// One warp per row: the gradient for the values of its entries, from the logits at the entries alone. grad_values is 0
// on entry.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) backward_values_kernel(BackwardArgs args) {
  using Group = RowGroup<kWarp>;
  using acc_t = acc_type<scalar_t>;
  const LogitTransform<acc_t> transform(args.options);
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    if (args.target.ignored(r)) continue;
    const scalar_t* row = args.template row<scalar_t>(r);
    const GradientCoefficients<acc_t> c = args.coefficients(r, acc_t(0));
    const EntryRange range = args.target.row(r);
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWarp) args.write_value(i, row, transform, c);
  }
}

// ------------------------------------------------------------------------------------------------ launchers

int multiprocessors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 1;
  return count;
}

int64_t blocks_of(const CrossEntropyArgs& args, int64_t groups, int per_block) {
  return blocks_for(groups, per_block, args.max_blocks, (int64_t(1) << 31) - 1);
}

}  // namespace

Plan plan_of(const CrossEntropyArgs& args, int multiprocessors) {
  const int64_t row_bytes = args.target.num_classes * size_of(args.dtype);
  if (row_bytes <= kWarpRowBytes) return {kWarp, 1, blocks_of(args, args.rows, kThreads / kWarp)};
  const int64_t wanted = int64_t(kBlocksPerMultiprocessor) * multiprocessors;
  const int64_t by_rows = (wanted + args.rows - 1) / args.rows, by_bytes = row_bytes / kSplitBytes;
  const int64_t splits = std::max<int64_t>(1, std::min(by_rows, by_bytes));
  return {kThreads, splits, blocks_of(args, args.rows * splits, 1)};
}

size_t cross_entropy_forward_workspace(const CrossEntropyArgs& args) {
  const Plan plan = plan_of(args, multiprocessors());
  const size_t each = args.dtype == DType::kFloat64 ? sizeof(RowStats<double>) : sizeof(RowStats<float>);
  return plan.splits == 1 ? 0 : static_cast<size_t>(args.rows * plan.splits) * each;
}

cudaError_t cross_entropy_forward(const ForwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const Plan plan = plan_of(args, multiprocessors());
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    auto* partial = static_cast<RowStats<acc_type<scalar_t>>*>(workspace);
    const auto run = [&](auto kernel) {
      return launch(stream, plan.blocks, kThreads, kernel, args, plan.splits, partial);
    };
    const cudaError_t error =
        plan.width == kWarp ? run(forward_kernel<scalar_t, kWarp>) : run(forward_kernel<scalar_t, kThreads>);
    if (error != cudaSuccess || plan.splits == 1) return error;
    return launch(stream, blocks_of(args, args.rows, kThreads / kWarp), kThreads, forward_merge_kernel<scalar_t>, args,
                  plan.splits, partial);
  });
}

size_t cross_entropy_backward_workspace(const CrossEntropyArgs& args) {
  const size_t each = args.dtype == DType::kFloat64 ? sizeof(EntryGradient<double>) : sizeof(EntryGradient<float>);
  return static_cast<size_t>(args.target.entries) * each;
}

cudaError_t cross_entropy_backward(const BackwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const Plan plan = plan_of(args, multiprocessors());
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    auto* entries = static_cast<EntryGradient<acc_type<scalar_t>>*>(workspace);
    const auto run = [&](auto kernel) {
      return launch(stream, plan.blocks, kThreads, kernel, args, plan.splits, entries);
    };
    return plan.width == kWarp ? run(backward_kernel<scalar_t, kWarp>) : run(backward_kernel<scalar_t, kThreads>);
  });
}

cudaError_t cross_entropy_backward_values(const BackwardArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return with_storage(args.dtype, [&](auto storage) {
    return launch(stream, blocks_of(args, args.rows, kThreads / kWarp), kThreads,
                  backward_values_kernel<decltype(storage)>, args);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
