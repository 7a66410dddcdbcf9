// A warp takes a row, a pack a lane at a time, in the order of the columns. Hardly a step finds anything.
#include "row_group.cuh"

#include "topk.h"

namespace sparse_ce {
namespace cuda {
namespace {

// The sum of the numbers of the lanes before this one; `all` becomes that of the warp.
__device__ int sum_before(int mine, int& all) {
  const int lane = threadIdx.x % kWarp;
  int sum = mine;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  all = __shfl_sync(0xffffffffu, sum, kWarp - 1);
  return sum - mine;
}

// Puts the wanted among this lane's n logits, the first of which is in column c, where the order has them. All lanes.
template <typename acc_t, int n>
__device__ void put(TopkRow<acc_t>& found, const acc_t (&z)[n], int count, int64_t c) {
  int above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    above += i < count && found.is_above(z[i]);
    equal += i < count && found.is_equal(z[i]);
  }
  if (!__any_sync(0xffffffffu, above + equal > 0)) return;
  int all_above, all_equal;
  int64_t at_above = found.found_above + sum_before(above, all_above);
  int64_t at_equal = found.found_equal + sum_before(equal, all_equal);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (i < count && found.is_above(z[i])) found.put_above(at_above++, c + i);
    if (i < count && found.is_equal(z[i])) found.put_equal(at_equal++, c + i);
  }
  found.found_above += all_above;
  found.found_equal += all_equal;
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) topk_ids_kernel(TopkArgs args) {
  using Group = RowGroup<kWarp>;
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = Pack<scalar_t>::kSize;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    TopkRow<acc_t> found(args, r);
    if (found.without()) continue;
    const scalar_t* row = args.template row<scalar_t>(r);
    const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(scalar_t));
    // What lies before the first pack counts as the end of one that begins before the row.
    for (int64_t first = -misalignment; first < args.columns && !found.full(); first += kWarp * kSize) {
      const int64_t c = first + Group::rank() * kSize;
      acc_t z[kSize];
      int64_t begin = c < 0 ? 0 : c;
      const int64_t end = c + kSize < args.columns ? c + kSize : args.columns;
      const int count = begin < end ? static_cast<int>(end - begin) : 0;
      if (count == kSize) {
        const Pack<scalar_t> pack = Pack<scalar_t>::load(row + begin);
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] = to_acc(pack.at[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] = i < count ? to_acc(row[begin + i]) : acc_t(0);
      }
      put<acc_t, kSize>(found, z, count, begin);
    }
  }
}

}  // namespace

cudaError_t topk_ids(const TopkArgs& args, cudaStream_t stream) {
  return with_storage(args.dtype, [&](auto storage) {
    const int64_t blocks = blocks_for(args.rows, kThreads / kWarp, args.max_blocks, (int64_t(1) << 31) - 1);
    return launch(stream, blocks, kThreads, topk_ids_kernel<decltype(storage)>, args);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
