// strided_rows.cuh - Processes adjacent rows with strided classes, one thread per row, so that adjacent threads read
// adjacent addresses. If rows are few and have many classes, a thread processes a part of a row, and its warp the same
// part of the next rows.
#pragma once

#include "row_passes.cuh"

namespace sparse_ce {
namespace cuda {

constexpr int kStridedThreads = 128;  // smaller than kThreads, because images have few rows
// Columns in flight per thread: more if it only reads and computes nothing but exp. Loops of float64 are not unrolled.
template <typename scalar_t>
constexpr int kStridedUnroll = sizeof(scalar_t) < sizeof(double) ? 16 : 1;
template <typename scalar_t>
constexpr int kStridedGeneralUnroll = (kStridedUnroll<scalar_t> + 1) / 2;
constexpr int64_t kStridedColumns = 64;  // columns per sum: a single sum over a row would round too often

// Calls f(r, part) for this thread's rows, or for parts of all rows. Adjacent threads have adjacent rows.
template <typename function_t>
__device__ __forceinline__ void for_rows(int64_t rows, int64_t parts, const function_t& f) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; item < rows * parts; item += stride) {
    RowPart at{item, 0};
    if (parts > 1) at = {item % rows, item / rows};  // see part_of
    f(at.row, at.split);
  }
}

// Calls f(column, count) for the columns [begin, end), with `most` columns at once, and half as many at the end.
template <int most, typename function_t>
__device__ __forceinline__ void for_strided_columns(int64_t begin, int64_t end, const function_t& f) {
  int64_t c = begin;
#pragma unroll 1
  for (; c + most <= end; c += most) f(c, Count<most>{});
  if constexpr (most > 1) for_strided_columns<most / 2>(c, end, f);
}

// Returns the statistics of the columns [begin, end) of a row.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ RowStats<acc_t> scan_strided(const ForwardArgs& args, const StridedRow<const scalar_t>& row,
                                        const LogitTransform<acc_t>& transform, int64_t begin, int64_t end) {
  const bool smooth = args.options.label_smoothing != 0, plain = transform.identity() && !smooth;
  const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
  RowStats<acc_t> stats;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kStridedColumns) {
    const int64_t to = first + kStridedColumns < end ? first + kStridedColumns : end;
    OnlineStats<acc_t> part;
    if (plain) {
      for_strided_columns<kStridedUnroll<scalar_t>>(first, to, [&](int64_t c, auto count) {
        constexpr int n = decltype(count)::value;
        acc_t z[n];
#pragma unroll
        for (int u = 0; u < n; ++u) z[u] = to_acc(row[c + u]);
        part.push(z);
      });
    } else {
      for_strided_columns<kStridedGeneralUnroll<scalar_t>>(first, to, [&](int64_t c, auto count) {
        constexpr int n = decltype(count)::value;
        acc_t z[n];
#pragma unroll
        for (int u = 0; u < n; ++u) z[u] = to_acc(row[c + u]);
        by_softcap(transform, [&](const auto& of_logit) {
#pragma unroll
          for (int u = 0; u < n; ++u) z[u] = of_logit(z[u]);
        });
        part.push(z);
        if (smooth) part.push_weighted(z, weight ? weight + c : nullptr, n);
      });
    }
    stats.merge(part.finish());
  }
  return stats;
}

// Writes the losses if `parts` is 1. Otherwise writes partial (rows, parts) statistics for forward_merge_kernel.
template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, min_blocks<scalar_t>(8))
    strided_forward_kernel(ForwardArgs args, int64_t parts, RowStats<acc_type<scalar_t>>* partial) {
  using acc_t = acc_type<scalar_t>;
  const int64_t columns = args.target.num_classes;
  for_rows(args.rows, parts, [&](int64_t r, int64_t part) {
    const bool ignored = args.target.ignored(r);
    const auto row = args.template strided_row<scalar_t>(r);
    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    RowStats<acc_t> stats;
    if (!ignored)
      stats = scan_strided<scalar_t>(args, row, transform, split_begin(columns, parts, part),
                                     split_begin(columns, parts, part + 1));
    if (parts == 1)
      finish_row<1>(args, r, ignored, row, transform, stats);
    else
      partial[r * parts + part] = stats;
  });
}

// Writes the gradient of the columns [begin, end) as if no column had an entry; `gradient` may be `row`.
template <typename scalar_t, typename acc_t>
__device__ void write_strided(const BackwardArgs& args, const GradientCoefficients<acc_t>& coefficients,
                              const LogitTransform<acc_t>& transform, const StridedRow<const scalar_t>& row,
                              const StridedRow<scalar_t>& gradient, int64_t begin, int64_t end) {
  // Weights are used only with label smoothing; otherwise an infinite weight would be multiplied by 0.
  const acc_t* weight = args.options.label_smoothing == 0 ? nullptr : static_cast<const acc_t*>(args.target.weight);
  constexpr int kMost = kStridedGeneralUnroll<scalar_t>;
  const auto write = [&](auto unroll, const auto& to_gradient) {
    for_strided_columns<decltype(unroll)::value>(begin, end, [&](int64_t c, auto count) {
      constexpr int n = decltype(count)::value;
      acc_t x[n];
#pragma unroll
      for (int u = 0; u < n; ++u) x[u] = to_acc(row[c + u]);
      to_gradient(c, x);
#pragma unroll
      for (int u = 0; u < n; ++u) from_acc(x[u], gradient[c + u]);
    });
  };
  if (args.plain()) {
    const FoldedGradient<acc_t> plain(coefficients);
    return write(Count<kMost>{}, [&](int64_t, auto& x) {
#pragma unroll
      for (acc_t& of_one : x) of_one = plain.at(of_one);
    });
  }
  by_softcap(transform, [&](const LogitTransform<acc_t>& of_logit) {
    const DenseGradient<acc_t> dense(coefficients, of_logit);
    write(Count<(kMost + 1) / 2>{}, [&](int64_t c, auto& x) {
      to_bases(of_logit, x);
#pragma unroll
      for (int u = 0; u < int(sizeof(x) / sizeof(x[0])); ++u) x[u] = dense.at(x[u], weight ? weight[c + u] : acc_t(1));
    });
  });
}

// Fills the columns [begin, end) of a gradient with 0.
template <typename scalar_t>
__device__ void write_strided_zeros(const StridedRow<scalar_t>& gradient, int64_t begin, int64_t end) {
  scalar_t zero;
  from_acc(acc_type<scalar_t>(0), zero);
  for (int64_t c = begin; c < end; ++c) gradient[c] = zero;
}

// One thread reads and writes a row, so the gradient may be the logits. See backward_kernel for entry_gradients.
template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, min_blocks<scalar_t>(7))
    strided_backward_kernel(BackwardArgs args, EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using acc_t = acc_type<scalar_t>;
  if (args.is_up_to_date()) return;
  const int64_t columns = args.target.num_classes;
  for_rows(args.rows, 1, [&](int64_t r, int64_t) {
    const auto row = args.template strided_row<scalar_t>(r);
    const auto gradient = args.template strided_gradient_row<scalar_t>(r);
    const bool zero = args.template without_gradient<acc_t>(r);
    write_strided_zeros(gradient, zero ? 0 : columns, args.vocab);
    if (zero) return;

    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const EntryRange range = args.target.row(r);
    const auto coefficients = args.coefficients(r, mass_of_row<1, acc_t>(args.target, range));
    const auto same = classes_of_row<1>(args.target, range, 0, columns, entry_gradients);
    make_entry_gradients<1>(args, coefficients, transform, same, range, row, 0, columns, entry_gradients);
    write_strided(args, coefficients, transform, row, gradient, 0, columns);
    write_entry_gradients<1>(args.target, range, 0, columns, entry_gradients, gradient);
  });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, min_blocks<scalar_t>(6))
    strided_backward_values_kernel(BackwardArgs args) {
  using acc_t = acc_type<scalar_t>;
  for_rows(args.rows, 1, [&](int64_t r, int64_t) {
    if (args.target.ignored(r)) return;
    const GradientCoefficients<acc_t> c = args.coefficients(r, acc_t(0));
    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const EntryRange range = args.target.row(r);
    for (int64_t i = range.begin; i < range.end; ++i)
      args.write_value(i, args.template strided_row<scalar_t>(r), transform, c);
  });
}

// ------------------------------------------------------------------------------------------------ backward of parts

// Computes what the parts of a row share: `masses` (rows,) of its entries, and the entries' gradients, which need the
// logits. Uses a warp per row.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(4))
    make_entries_kernel(BackwardArgs args, acc_type<scalar_t>* masses,
                        EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using Group = RowGroup<kWarp>;
  using acc_t = acc_type<scalar_t>;
  if (args.is_up_to_date()) return;
  const int64_t columns = args.target.num_classes;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    if (args.template without_gradient<acc_t>(r)) continue;
    const EntryRange range = args.target.row(r);
    const acc_t mass = mass_of_row<kWarp, acc_t>(args.target, range);
    if (Group::rank() == 0) masses[r] = mass;
    const auto same = classes_of_row<kWarp>(args.target, range, 0, columns, entry_gradients);
    make_entry_gradients<kWarp>(args, args.coefficients(r, mass), args.template transform<acc_t>(r), same, range,
                                args.template strided_row<scalar_t>(r), 0, columns, entry_gradients);
  }
}

// One thread reads and writes a part of a row, so the gradient may be the logits. The last parts come first, because
// their logits may still be in the L2 cache after forward.
template <typename scalar_t>
__global__ void __launch_bounds__(kStridedThreads, min_blocks<scalar_t>(8))
    strided_parts_kernel(BackwardArgs args, int64_t parts, const acc_type<scalar_t>* masses) {
  using acc_t = acc_type<scalar_t>;
  if (args.is_up_to_date()) return;
  const int64_t columns = args.target.num_classes;
  for_rows(args.rows, parts, [&](int64_t r, int64_t before) {
    const int64_t part = parts - 1 - before;
    const int64_t begin = split_begin(columns, parts, part), end = split_begin(columns, parts, part + 1);
    const auto gradient = args.template strided_gradient_row<scalar_t>(r);
    const bool zero = args.template without_gradient<acc_t>(r);
    write_strided_zeros(gradient, zero ? begin : end, part == parts - 1 ? args.vocab : end);
    if (!zero)
      write_strided(args, args.coefficients(r, masses[r]), args.template transform<acc_t>(r),
                    args.template strided_row<scalar_t>(r), gradient, begin, end);
  });
}

// Writes the gradients of make_entries_kernel over the dense gradient. Uses a warp per row. As for
// backward_values_kernel, ptxas assigns too few registers without a number of blocks (sm_100).
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(6))
    write_entries_kernel(BackwardArgs args, const EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using Group = RowGroup<kWarp>;
  using acc_t = acc_type<scalar_t>;
  if (args.is_up_to_date()) return;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    if (args.template without_gradient<acc_t>(r)) continue;
    write_entry_gradients<kWarp>(args.target, args.target.row(r), 0, args.target.num_classes, entry_gradients,
                                 args.template strided_gradient_row<scalar_t>(r));
  }
}

}  // namespace cuda
}  // namespace sparse_ce
