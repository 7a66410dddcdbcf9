// Implements element-wise kernels of the linear head. They are bound by memory: each byte is read and written once, in
// packs of 16 bytes.
#include "device/row_group.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

// Enough blocks for every multiprocessor, and few enough that the common scale of 1 costs almost no time.
constexpr int64_t kMostBlocks = 4096;

// Distributes the elements [0, count) over `threads`, of which this is number `thread`. `elements(i, Count<n>)`
// processes the n elements at i. If `by_packs` is false, n is always 1.
template <int kSize, typename elements_t>
__device__ __forceinline__ void for_elements(int64_t count, bool by_packs, int64_t thread, int64_t threads,
                                             const elements_t& elements) {
  const int64_t body = by_packs ? count / kSize * kSize : 0;
#pragma unroll 1
  for (int64_t i = thread * kSize; i < body; i += threads * kSize) elements(i, Count<kSize>{});
#pragma unroll 1
  for (int64_t i = body + thread; i < count; i += threads) elements(i, Count<1>{});
}

// Distributes the elements over the threads of the grid.
template <int kSize, typename elements_t>
__device__ __forceinline__ void for_elements(int64_t count, bool by_packs, const elements_t& elements) {
  for_elements<kSize>(count, by_packs, blockIdx.x * int64_t(kThreads) + threadIdx.x, gridDim.x * int64_t(kThreads),
                      elements);
}

// ------------------------------------------------------------------------------------------------ accumulate

template <typename scalar_t, typename product_t>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(AccumulateArgs args) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  constexpr bool kSplit = sizeof(scalar_t) == 2;
  const product_t* product = static_cast<const product_t*>(args.product);
  scalar_t* total = static_cast<scalar_t*>(args.total);
  const bool reads_low = kSplit && !args.first, writes_low = kSplit && !args.last;
  const bool by_packs = Pack<product_t, kSize>::aligned(product) && Pack<scalar_t, kSize>::aligned(total) &&
                        (!(reads_low || writes_low) || Pack<uint8_t, kSize>::aligned(args.low));
  for_elements<kSize>(args.count, by_packs, [&](int64_t i, auto count) {
    constexpr int n = decltype(count)::value;
    const auto products = Pack<product_t, n>::load(product + i);
    Pack<scalar_t, n> totals{};
    Pack<uint8_t, n> lows{};
    if (!args.first) totals = totals.load(total + i);
    if (reads_low) lows = lows.load(args.low + i);
#pragma unroll
    for (int e = 0; e < n; ++e)
      accumulate_element(to_acc(products.at[e]), args.first, args.last, totals.at[e], lows.at, e);
    totals.store(total + i);
    if (writes_low) lows.store(args.low + i);
  });
}

// ------------------------------------------------------------------------------------------------ scale

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) scale_kernel(ScaleArgs args) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const auto factor = args.factor<acc_type<scalar_t>>();
  if (factor.by == 1) return;
  const auto scale = [&](scalar_t* values, int64_t thread, int64_t threads) {
    const bool by_packs = Pack<scalar_t, kSize>::aligned(values);
    for_elements<kSize>(args.count, by_packs, thread, threads, [&](int64_t i, auto count) {
      constexpr int n = decltype(count)::value;
      auto pack = Pack<scalar_t, n>::load(values + i);
#pragma unroll
      for (int e = 0; e < n; ++e) from_acc(factor(to_acc(pack.at[e])), pack.at[e]);
      pack.store(values + i);
    });
  };
  scalar_t* values = static_cast<scalar_t*>(args.values);
  const int64_t block = blockIdx.x, blocks = gridDim.x;
  if (args.rows == 1) return scale(values, block * kThreads + threadIdx.x, blocks * kThreads);
#pragma unroll 1
  for (int64_t r = block; r < args.rows; r += blocks) scale(values + r * args.row_stride, threadIdx.x, kThreads);
}

// ------------------------------------------------------------------------------------------------ launchers

template <typename args_t>
cudaError_t launch_for(int64_t items, int64_t per_block, void (*kernel)(args_t), const args_t& args,
                       cudaStream_t stream) {
  if (items == 0) return cudaSuccess;
  return launch(stream, blocks_for(items, per_block, args.max_blocks, kMostBlocks), kThreads, kernel, args);
}

}  // namespace

cudaError_t accumulate(const AccumulateArgs& args, cudaStream_t stream) {
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    constexpr int kPerBlock = kThreads * Pack<scalar_t>::kSize;
    auto kernel = accumulate_kernel<scalar_t, acc_type<scalar_t>>;
    if constexpr (sizeof(scalar_t) < sizeof(double)) {
      if (args.product_dtype == DType::kFloat16) kernel = accumulate_kernel<scalar_t, Half>;
      if (args.product_dtype == DType::kBFloat16) kernel = accumulate_kernel<scalar_t, BFloat16>;
    }
    return launch_for(args.count, kPerBlock, kernel, args, stream);
  });
}

cudaError_t scale(const ScaleArgs& args, cudaStream_t stream) {
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    const bool packed = args.rows == 1;  // otherwise a block processes a row
    return launch_for(packed ? args.count : args.rows, packed ? kThreads * Pack<scalar_t>::kSize : 1,
                      scale_kernel<scalar_t>, args, stream);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
