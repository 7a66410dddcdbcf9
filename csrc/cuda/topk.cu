// Finds the k largest logits of a row with one block. Each thread keeps the largest number at each position of its
// packs. The k-th largest of these is a lower bound for the k-th largest logit, and in unordered rows a close one.
//
// The second and last read appends the numbers that reach the bound to a list, in any order. Comparing each one with
// all others gives its rank. The list may be too short because of many ties, or because k exceeds the number of
// positions. The row is then read again, once for each bit of the k-th number and of its class.
#include "device/row_group.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int64_t kListed = 1024;  // per row, or k if that is more
constexpr int64_t kMostBlocks = 528;  // number of blocks with lists

__device__ __forceinline__ int sum_of_block(int mine) { return RowGroup<kThreads>::reduce(Sum<int>{mine}).sum; }

// Calls f(position in the pack, order, class) for all elements of a row.
template <int kUnroll, typename scalar_t, typename function_t>
__device__ __forceinline__ void for_orders(const scalar_t* row, const TopkArgs& args, const function_t& f) {
  using pack_t = Pack<scalar_t>;
  for_columns<kThreads, kUnroll>(
      row, 0, args.columns, true,
      [&](int64_t c, auto count) {
        constexpr int n = decltype(count)::value, kStride = kThreads * pack_t::kSize;
        pack_t packs[n];
        load_packs<kStride>(row + c, count, packs);
#pragma unroll
        for (int u = 0; u < n; ++u) {
          if (!count.has(u)) break;
#pragma unroll
          for (int i = 0; i < pack_t::kSize; ++i)
            f(i, order_of(packs[u].at[i], args.largest), static_cast<int32_t>(c + u * kStride + i));
        }
      },
      [&](int64_t c) { f(0, order_of(row[c], args.largest), static_cast<int32_t>(c)); });
}

// Returns the largest order that at least k numbers reach, or the smallest order if there are fewer. `count` returns
// how many numbers reach an order; all threads must call it.
template <typename order_t, typename count_t>
__device__ order_t kth_largest(int64_t k, const count_t& count) {
  using bits_t = std::make_unsigned_t<order_t>;
  constexpr int kBits = 8 * sizeof(order_t);
  constexpr bits_t kSign = bits_t(1) << (kBits - 1);
  bits_t kth = 0;
#pragma unroll 1
  for (int bit = kBits - 1; bit >= 0; --bit) {
    const auto trial = static_cast<bits_t>(kth | bits_t(1) << bit);
    if (count(static_cast<order_t>(trial ^ kSign)) >= k) kth = trial;
  }
  return static_cast<order_t>(kth ^ kSign);
}

// `lists` is (blocks, room).
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, 4)
    topk_ids_kernel(TopkArgs args, Candidate<scalar_t>* lists, int64_t room) {
  using order_t = order_type<scalar_t>;
  constexpr int kSize = Pack<scalar_t>::kSize;
  SCE_SHARED(int, listed, [1]);
  Candidate<scalar_t>* list = lists + blockIdx.x * room;
  for (int64_t r = blockIdx.x; r < args.rows; r += gridDim.x) {
    const scalar_t* row = args.template row<scalar_t>(r);
    order_t highest[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) highest[i] = std::numeric_limits<order_t>::min();
    for_orders<4>(row, args, [&](int i, order_t order, int32_t) {
      if (order > highest[i]) highest[i] = order;
    });
    order_t least = kth_largest<order_t>(args.k, [&](order_t of) {
      int mine = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) mine += highest[i] >= of;
      return sum_of_block(mine);
    });
    int32_t last = std::numeric_limits<int32_t>::max();  // the last class among those that tie with `least`
    int count = 0;
    for (bool exact = false; true; exact = true) {
      // The barriers of kth_largest separate this store from the reads of the previous list and its length.
      if (threadIdx.x == 0) listed[0] = 0;
      __syncthreads();
      for_orders<4>(row, args, [&](int, order_t order, int32_t id) {
        if (order < least || (order == least && id > last)) return;
        const int at = atomicAdd(&listed[0], 1);
        if (at < room) list[at] = {order, id};
      });
      __syncthreads();
      count = listed[0];
      if (count <= room || exact) break;
      least = kth_largest<order_t>(args.k, [&](order_t of) {
        int mine = 0;
        for_orders<1>(row, args, [&](int, order_t order, int32_t) { mine += order >= of; });
        return sum_of_block(mine);
      });
      last = 0;
#pragma unroll 1
      for (int bit = 30; bit >= 0; --bit) {
        const int32_t end = last | 1 << bit;
        if (end >= args.columns) continue;
        int mine = 0;
        for_orders<1>(row, args,
                      [&](int, order_t order, int32_t id) { mine += order > least || (order == least && id < end); });
        if (sum_of_block(mine) < args.k) last = end;
      }
    }
    for (int at = threadIdx.x; at < count; at += kThreads) {
      const Candidate<scalar_t> mine = list[at];
      int place = 0;
      for (int other = 0; other < count; ++other) place += list[other].before(mine);
      if (place < args.k) args.ids[r * args.k + place] = mine.id;
    }
  }
}

int64_t blocks_of(const TopkArgs& args) { return blocks_for(args.rows, 1, args.max_blocks, kMostBlocks); }
int64_t room_of(const TopkArgs& args) { return std::max(args.k, kListed); }

}  // namespace

size_t workspace_of(const TopkArgs& args) {
  const size_t of_one = args.dtype == DType::kFloat64 ? sizeof(Candidate<double>) : sizeof(Candidate<float>);
  return static_cast<size_t>(blocks_of(args) * room_of(args)) * of_one;
}

cudaError_t topk_ids(const TopkArgs& args, void* workspace, cudaStream_t stream) {
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    static_assert(sizeof(Candidate<scalar_t>) <=
                  (sizeof(scalar_t) == 8 ? sizeof(Candidate<double>) : sizeof(Candidate<float>)));
    return launch(stream, blocks_of(args), kThreads, topk_ids_kernel<scalar_t>, args,
                  static_cast<Candidate<scalar_t>*>(workspace), room_of(args));
  });
}

}  // namespace cuda
}  // namespace sparse_ce
