// A warp takes a row; rows of more than kLongRow entries are taken by their block, one after the other. Each entry is
// read twice, the second time from a cache unless its row is longer than one.
#include "row_group.cuh"

#include "sparse_softmax.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kUnroll = 2;             // packs in flight per thread
constexpr int64_t kLongRow = 2048;     // entries
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kMostBlocks = 1 << 20;

// The entries [begin, end) of a row, at one position of each entry's width.
struct Row {
  int64_t begin, end, position;
};

__device__ Row row_of(const SparseSoftmaxArgs& args, int64_t item) {
  const int64_t r = item / args.width;
  return {args.row_begin(r), args.row_begin(r + 1), item % args.width};
}

// Calls packs(pointer offset, Count<n>) or single(pointer offset) for the elements of a row, as for_columns does; only
// rows that lie in one piece have packs.
template <int kWidth, typename scalar_t, typename packs_t, typename single_t>
__device__ __forceinline__ void for_entries(const SparseSoftmaxArgs& args, const Row& row, const scalar_t* aligned_like,
                                            bool by_packs, const packs_t& packs, const single_t& single) {
  by_packs = by_packs && !args.order && args.width == 1;
  for_columns<kWidth, kUnroll>(aligned_like, row.begin, row.end, by_packs, packs,
                               [&](int64_t i) { single(args.at(i) * args.width + row.position); });
}

template <typename scalar_t>
struct ForwardRow {
  // All threads of the group; contains barriers.
  template <int kWidth>
  __device__ static void run(const SparseSoftmaxArgs& args, const Row& row) {
    using acc_t = acc_type<scalar_t>;
    constexpr int kSize = Pack<scalar_t>::kSize;
    const scalar_t* values = static_cast<const scalar_t*>(args.values);
    scalar_t* result = static_cast<scalar_t*>(args.result);
    RowStats<acc_t> mine;
    for_entries<kWidth>(
        args, row, values, true,
        [&](int64_t i, auto count) {
          constexpr int n = decltype(count)::value;
          Pack<scalar_t> packs[n];
#pragma unroll
          for (int u = 0; u < n; ++u) packs[u] = Pack<scalar_t>::load(values + i + u * kWidth * kSize);
          acc_t z[n * kSize];
#pragma unroll
          for (int e = 0; e < n * kSize; ++e) z[e] = to_acc(packs[e / kSize].at[e % kSize]);
          mine.push(z, 0, n * kSize);
        },
        [&](int64_t i) {
          const acc_t z = to_acc(values[i]);
          mine.push(&z, 0, 1);
        });
    const RowStats<acc_t> stats = RowGroup<kWidth>::broadcast(RowGroup<kWidth>::reduce(mine));
    const SoftmaxRow<acc_t> softmax(stats.max, stats.sum);
    const auto at = [&](scalar_t value, scalar_t& out) {
      const acc_t z = to_acc(value);
      from_acc(args.log ? softmax.template at<true>(z) : softmax.template at<false>(z), out);
    };
    for_entries<kWidth>(
        args, row, values, equally_aligned(values, result),
        [&](int64_t i, auto count) {
#pragma unroll
          for (int u = 0; u < decltype(count)::value; ++u) {
            Pack<scalar_t> pack = Pack<scalar_t>::load(values + i + u * kWidth * kSize);
#pragma unroll
            for (int e = 0; e < kSize; ++e) at(pack.at[e], pack.at[e]);
            pack.store(result + i + u * kWidth * kSize);
          }
        },
        [&](int64_t i) { at(values[i], result[i]); });
  }
};

template <typename scalar_t>
struct BackwardRow {
  // All threads of the group; contains barriers.
  template <int kWidth>
  __device__ static void run(const SparseSoftmaxArgs& args, const Row& row) {
    using acc_t = acc_type<scalar_t>;
    constexpr int kSize = Pack<scalar_t>::kSize;
    const scalar_t* grad = static_cast<const scalar_t*>(args.grad);
    const scalar_t* output = static_cast<const scalar_t*>(args.output);
    scalar_t* result = static_cast<scalar_t*>(args.result);
    const bool by_packs = equally_aligned(grad, output) && equally_aligned(grad, result);
    LongSum<acc_t> mine;
    const auto term = [&](scalar_t g, scalar_t y) {
      return args.log ? SoftmaxGradient<acc_t>::template term<true>(to_acc(g), to_acc(y))
                      : SoftmaxGradient<acc_t>::template term<false>(to_acc(g), to_acc(y));
    };
    for_entries<kWidth>(
        args, row, grad, by_packs,
        [&](int64_t i, auto count) {
#pragma unroll
          for (int u = 0; u < decltype(count)::value; ++u) {
            const Pack<scalar_t> g = Pack<scalar_t>::load(grad + i + u * kWidth * kSize);
            const Pack<scalar_t> y = Pack<scalar_t>::load(output + i + u * kWidth * kSize);
            acc_t sum = 0;
#pragma unroll
            for (int e = 0; e < kSize; ++e) sum += term(g.at[e], y.at[e]);
            mine.add(sum);
          }
        },
        [&](int64_t i) { mine.add(term(grad[i], output[i])); });
    const SoftmaxGradient<acc_t> total =
        RowGroup<kWidth>::broadcast(RowGroup<kWidth>::reduce(SoftmaxGradient<acc_t>{mine.sum}));
    const auto at = [&](scalar_t g, scalar_t y, scalar_t& out) {
      from_acc(
          args.log ? total.template at<true>(to_acc(g), to_acc(y)) : total.template at<false>(to_acc(g), to_acc(y)),
          out);
    };
    for_entries<kWidth>(
        args, row, grad, by_packs,
        [&](int64_t i, auto count) {
#pragma unroll
          for (int u = 0; u < decltype(count)::value; ++u) {
            Pack<scalar_t> g = Pack<scalar_t>::load(grad + i + u * kWidth * kSize);
            const Pack<scalar_t> y = Pack<scalar_t>::load(output + i + u * kWidth * kSize);
#pragma unroll
            for (int e = 0; e < kSize; ++e) at(g.at[e], y.at[e], g.at[e]);
            g.store(result + i + u * kWidth * kSize);
          }
        },
        [&](int64_t i) { at(grad[i], output[i], result[i]); });
  }
};

// Elements that no row has: offsets that do not begin at 0 or end at the number of entries. NaN, not memory's remains.
template <typename scalar_t>
__device__ void fill_rest(const SparseSoftmaxArgs& args) {
  scalar_t* result = static_cast<scalar_t*>(args.result);
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * args.width + threadIdx.x; i < end * args.width; i += kThreads)
      from_acc(Limits<acc_type<scalar_t>>::kNaN, result[args.at(i / args.width) * args.width + i % args.width]);
  };
  fill(0, args.row_begin(0));
  fill(args.row_begin(args.rows), args.entries);
}

// Five blocks leave 48 registers a thread; of its own accord ptxas takes 40 and spills around the divisions (sm_90).
template <typename scalar_t, template <typename> class row_t>
__global__ void __launch_bounds__(kThreads, 5) rows_kernel(SparseSoftmaxArgs args) {
  if (blockIdx.x == 0) fill_rest<scalar_t>(args);
  const int64_t items = args.rows * args.width;
  for (int64_t first = int64_t(blockIdx.x) * kWarps; first < items; first += int64_t(gridDim.x) * kWarps) {
    const int64_t mine = first + threadIdx.x / kWarp;
    if (mine < items) {
      const Row row = row_of(args, mine);
      if (row.end - row.begin <= kLongRow) row_t<scalar_t>::template run<kWarp>(args, row);
    }
    for (int64_t item = first; item < first + kWarps && item < items; ++item) {
      const Row row = row_of(args, item);
      if (row.end - row.begin > kLongRow) row_t<scalar_t>::template run<kThreads>(args, row);
    }
  }
}

template <template <typename> class row_t>
cudaError_t launch_rows(const SparseSoftmaxArgs& args, cudaStream_t stream) {
  const int64_t items = args.rows * args.width;
  if (items == 0 || args.entries == 0) return cudaSuccess;
  const int64_t blocks = blocks_for(items, kWarps, args.max_blocks, kMostBlocks);
  return with_storage(args.dtype, [&](auto storage) {
    return launch(stream, blocks, kThreads, rows_kernel<decltype(storage), row_t>, args);
  });
}

}  // namespace

cudaError_t sparse_softmax(const SparseSoftmaxArgs& args, cudaStream_t stream) {
  return launch_rows<ForwardRow>(args, stream);
}

cudaError_t sparse_softmax_backward(const SparseSoftmaxArgs& args, cudaStream_t stream) {
  return launch_rows<BackwardRow>(args, stream);
}

}  // namespace cuda
}  // namespace sparse_ce
