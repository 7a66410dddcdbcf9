// Nothing here computes much: what counts is that each byte is read and written once, 16 at a time.
#include "row_group.cuh"

#include "linear.h"

#include <algorithm>
#include <type_traits>

namespace sparse_ce {
namespace cuda {
namespace {

// Enough for every multiprocessor, and so few that a scale of 1, which most are, costs no time worth the name.
constexpr int64_t kMostBlocks = 4096;

// n elements side by side, as wide as they can be read and written at once.
template <typename scalar_t, int n>
struct Elements {
  static constexpr int kBytes = n * sizeof(scalar_t);
  using part_t = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes % 8 == 0, uint2, scalar_t>>;
  static constexpr int kParts = kBytes / sizeof(part_t);
  scalar_t at[n];

  __device__ static bool aligned(const scalar_t* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(part_t) == 0; }
  __device__ static Elements load(const scalar_t* p) {
    part_t parts[kParts];
#pragma unroll
    for (int u = 0; u < kParts; ++u) parts[u] = reinterpret_cast<const part_t*>(p)[u];
    Elements elements;
    std::memcpy(elements.at, parts, kBytes);
    return elements;
  }
  __device__ void store(scalar_t* p) const {
    part_t parts[kParts];
    std::memcpy(parts, at, kBytes);
#pragma unroll
    for (int u = 0; u < kParts; ++u) reinterpret_cast<part_t*>(p)[u] = parts[u];
  }
};

template <typename scalar_t>
struct Elements<scalar_t, 1> {
  scalar_t at[1];
  __device__ static Elements load(const scalar_t* p) { return {{*p}}; }
  __device__ void store(scalar_t* p) const { *p = at[0]; }
};

// Shares the elements [0, count) among the threads of the grid: `elements(i, Count<n>)` stands for the n elements at i.
// Where they cannot be read kSize at a time (`by_packs` false) they are all singles.
template <int kSize, typename elements_t>
__device__ __forceinline__ void for_elements(int64_t count, bool by_packs, const elements_t& elements) {
  const int64_t thread = blockIdx.x * int64_t(kThreads) + threadIdx.x, threads = gridDim.x * int64_t(kThreads);
  const int64_t body = by_packs ? count / kSize * kSize : 0;
#pragma unroll 1
  for (int64_t i = thread * kSize; i < body; i += threads * kSize) elements(i, Count<kSize>{});
#pragma unroll 1
  for (int64_t i = body + thread; i < count; i += threads) elements(i, Count<1>{});
}

// ------------------------------------------------------------------------------------------------ accumulate

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void add(const AccumulateArgs& args, acc_t product, scalar_t& total, uint8_t& low) {
  if constexpr (sizeof(scalar_t) == 2)
    accumulate_split(product, args.first, args.last, total, &low);
  else
    accumulate_plain(product, args.first, total);
}

template <typename scalar_t, typename product_t>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(AccumulateArgs args) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  constexpr bool kSplit = sizeof(scalar_t) == 2;
  const product_t* product = static_cast<const product_t*>(args.product);
  scalar_t* total = static_cast<scalar_t*>(args.total);
  const bool reads_low = kSplit && !args.first, writes_low = kSplit && !args.last;
  const bool by_packs = Elements<product_t, kSize>::aligned(product) && Elements<scalar_t, kSize>::aligned(total) &&
                        (!(reads_low || writes_low) || Elements<uint8_t, kSize>::aligned(args.low));
  for_elements<kSize>(args.count, by_packs, [&](int64_t i, auto count) {
    constexpr int n = decltype(count)::value;
    const auto products = Elements<product_t, n>::load(product + i);
    Elements<scalar_t, n> totals{};
    Elements<uint8_t, n> lows{};
    if (!args.first) totals = totals.load(total + i);
    if (reads_low) lows = lows.load(args.low + i);
#pragma unroll
    for (int e = 0; e < n; ++e) add(args, to_acc(products.at[e]), totals.at[e], lows.at[e]);
    totals.store(total + i);
    if (writes_low) lows.store(args.low + i);
  });
}

// ------------------------------------------------------------------------------------------------ clear_ignored_rows

// A warp takes a row. Its lanes look at the same entry at a time, which is one read for them all.
__global__ void __launch_bounds__(kThreads) clear_rows_kernel(ClearRowsArgs args) {
  using Group = RowGroup<kWarp>;
  Pack<uint8_t> zeros;
  std::memset(&zeros, 0, sizeof(zeros));
  for (int64_t r = Group::number(); r < args.target.rows; r += Group::count()) {
    if (!args.target.ignored(r)) continue;
    uint8_t* row = static_cast<uint8_t*>(args.rows) + r * args.row_bytes;
    for_columns<kWarp, 1>(
        row, 0, args.row_bytes, true, [&](int64_t c, auto) { zeros.store(row + c); }, [&](int64_t c) { row[c] = 0; });
  }
}

// ------------------------------------------------------------------------------------------------ scale

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) scale_kernel(ScaleArgs args) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const auto by = *static_cast<const acc_type<scalar_t>*>(args.scale);
  if (by == 1) return;
  scalar_t* values = static_cast<scalar_t*>(args.values);
  for_elements<kSize>(args.count, Elements<scalar_t, kSize>::aligned(values), [&](int64_t i, auto count) {
    constexpr int n = decltype(count)::value;
    auto scaled = Elements<scalar_t, n>::load(values + i);
#pragma unroll
    for (int e = 0; e < n; ++e) from_acc(sparse_ce::scaled(to_acc(scaled.at[e]), by), scaled.at[e]);
    scaled.store(values + i);
  });
}

// ------------------------------------------------------------------------------------------------ launchers

// For `items` of which a block takes `per_block` at a time.
template <typename args_t>
cudaError_t launch(void (*kernel)(args_t), const args_t& args, int64_t items, int64_t per_block, cudaStream_t stream) {
  if (items == 0) return cudaSuccess;
  const int64_t most = args.max_blocks > 0 ? args.max_blocks : kMostBlocks;
  coc_launch_config c;
  c.grid = dim3(static_cast<unsigned>(std::min(most, (items + per_block - 1) / per_block)));
  c.block = dim3(kThreads);
  c.stream = stream;
  return coc_launch(c, kernel, args);
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
    return launch(kernel, args, args.count, kPerBlock, stream);
  });
}

cudaError_t clear_ignored_rows(const ClearRowsArgs& args, cudaStream_t stream) {
  return launch(clear_rows_kernel, args, args.row_bytes > 0 ? args.target.rows : 0, kThreads / kWarp, stream);
}

cudaError_t scale(const ScaleArgs& args, cudaStream_t stream) {
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    return launch(scale_kernel<scalar_t>, args, args.count, kThreads * Pack<scalar_t>::kSize, stream);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
