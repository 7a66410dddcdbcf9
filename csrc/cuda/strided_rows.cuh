// strided_rows.cuh - rows that lie side by side, their classes apart: a thread a row, so that neighbours read
// neighbours.
#pragma once

#include "row_passes.cuh"

namespace sparse_ce {
namespace cuda {

constexpr int kStridedThreads = 128;  // images have few rows: more blocks than of kThreads
constexpr int kStridedUnroll = 8;     // columns in flight per thread
constexpr int64_t kStridedColumns = 64;  // whose sums are made one by one: one over all of a row would round too often

// The rows of this thread: adjacent threads have adjacent ones.
template <typename function_t>
__device__ __forceinline__ void for_rows(int64_t rows, const function_t& f) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t r = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; r < rows; r += stride) f(r);
}

// Statistics of a row.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ RowStats<acc_t> scan_strided(const ForwardArgs& args, const StridedRow<const scalar_t>& row,
                                        const LogitTransform<acc_t>& transform) {
  const bool smooth = args.options.label_smoothing != 0;
  const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
  const int64_t columns = args.target.num_classes;
  RowStats<acc_t> stats;
#pragma unroll 1
  for (int64_t c = 0; c < columns;) {
    const int64_t end = c + kStridedColumns < columns ? c + kStridedColumns : columns;
    RowStats<acc_t> part;
    const auto push = [&](auto count) {
      constexpr int n = decltype(count)::value;
      acc_t z[n];
#pragma unroll
      for (int u = 0; u < n; ++u) z[u] = transform(to_acc(row[c + u]));
      part.push(z, 0, n);
      if (smooth) part.push_weighted(z, weight ? weight + c : nullptr, n);
      c += n;
    };
#pragma unroll 1
    while (c + kStridedUnroll <= end) push(Count<kStridedUnroll>{});
#pragma unroll 1
    while (c < end) push(Count<1>{});
    stats.merge(part);
  }
  return stats;
}

template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, held_blocks<scalar_t>(6)) strided_forward_kernel(ForwardArgs args) {
  using acc_t = acc_type<scalar_t>;
  for_rows(args.rows, [&](int64_t r) {
    const bool ignored = args.target.ignored(r);
    const auto row = args.template strided_row<scalar_t>(r);
    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    RowStats<acc_t> stats;
    TargetSums<LongSum<acc_t>> sums;
    if (!ignored) {
      stats = scan_strided<scalar_t>(args, row, transform);
      const EntryRange range = args.target.row(r);
      if (!range.valid) sums.mass.sum = Limits<acc_t>::kNaN;
      for (int64_t i = range.begin; i < range.end; ++i) {
        const auto entry = args.target.template entry<acc_t>(i);
        sums.add(args.target.share(entry), stats.max,
                 [&] { return entry.column < 0 ? stats.max : transform(to_acc(row[entry.column])); });
      }
    }
    args.write(r, ignored, stats, sums.template stats<acc_t>());
  });
}

// A row is read and written by one thread, so the gradient may be the logits. entry_gradients: see backward_kernel.
template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, held_blocks<scalar_t>(6))
    strided_backward_kernel(BackwardArgs args, EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using acc_t = acc_type<scalar_t>;
  if (args.is_made()) return;
  const int64_t columns = args.target.num_classes;
  // Only where labels are smoothed: an infinite one would be multiplied by 0.
  const acc_t* weight = args.options.label_smoothing == 0 ? nullptr : static_cast<const acc_t*>(args.target.weight);
  for_rows(args.rows, [&](int64_t r) {
    const auto row = args.template strided_row<scalar_t>(r);
    const auto gradient = args.template strided_gradient_row<scalar_t>(r);
    const bool zero = args.template without_gradient<acc_t>(r);
    scalar_t nothing;
    from_acc(acc_t(0), nothing);
    for (int64_t c = zero ? 0 : columns; c < args.vocab; ++c) gradient[c] = nothing;
    if (zero) return;

    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const EntryRange range = args.target.row(r);
    const auto coefficients = args.coefficients(r, mass_of_row<1, acc_t>(args.target, range));
    const auto same = classes_of_row<1>(args.target, range, 0, columns, entry_gradients);
    make_entry_gradients<1>(args, coefficients, transform, same, range, row, 0, columns, entry_gradients);
    const bool plain = transform.identity() && args.options.label_smoothing == 0;
    const auto dense = [&](int64_t c, auto count) {
      constexpr int n = decltype(count)::value;
      scalar_t x[n];
#pragma unroll
      for (int u = 0; u < n; ++u) x[u] = row[c + u];
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const acc_t z = plain ? to_acc(x[u]) : transform(to_acc(x[u]));
        const acc_t g =
            plain ? coefficients.at(z) : coefficients.at(z, weight ? weight[c + u] : acc_t(1)) * transform.slope(z);
        from_acc(g, gradient[c + u]);
      }
    };
    int64_t c = 0;
#pragma unroll 1
    for (; c + kStridedUnroll <= columns; c += kStridedUnroll) dense(c, Count<kStridedUnroll>{});
#pragma unroll 1
    for (; c < columns; ++c) dense(c, Count<1>{});
    write_entry_gradients<1>(args.target, range, 0, columns, entry_gradients, gradient);
  });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, held_blocks<scalar_t>(6))
    strided_backward_values_kernel(BackwardArgs args) {
  using acc_t = acc_type<scalar_t>;
  for_rows(args.rows, [&](int64_t r) {
    if (args.target.ignored(r)) return;
    const GradientCoefficients<acc_t> c = args.coefficients(r, acc_t(0));
    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const EntryRange range = args.target.row(r);
    for (int64_t i = range.begin; i < range.end; ++i)
      args.write_value(i, args.template strided_row<scalar_t>(r), transform, c);
  });
}

template <typename args_t, typename... more_t>
cudaError_t launch_strided(cudaStream_t stream, void (*kernel)(args_t, more_t...), const args_t& args,
                           const more_t&... more) {
  return launch(stream, blocks_of(args, args.rows, kStridedThreads), kStridedThreads, kernel, args, more...);
}

}  // namespace cuda
}  // namespace sparse_ce
