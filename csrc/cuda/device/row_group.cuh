// row_group.cuh - Defines the group of threads that processes a row, and how it reads the row.
#pragma once

#include "launch.cuh"
#include "packs.cuh"

#include <algorithm>

namespace sparse_ce {
namespace cuda {

constexpr int kThreads = 256;  // per block
constexpr int kWarp = 32;

// Blocks per multiprocessor. There are fewer if each number takes two registers.
template <typename scalar_t>
constexpr int min_blocks(int blocks) {
  return sizeof(scalar_t) == sizeof(double) ? (blocks + 1) / 2 : blocks;
}

// Returns the number of blocks for `items`, of which a block processes `per_block` at a time. Tests set `limit`; 0
// means none.
inline int64_t blocks_for(int64_t items, int64_t per_block, int64_t limit, int64_t most) {
  return std::min(limit > 0 ? limit : most, (items + per_block - 1) / per_block);
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(1); }

// Represents kWidth threads that process a row: some or all lanes of a warp (several rows per block, for short rows),
// or a block, which may be a larger one. All threads of the group must call each function together.
template <int kWidth>
struct RowGroup {
  static constexpr int kLanes = kWidth < kWarp ? kWidth : kWarp;  // per warp
  static_assert(kWidth % kThreads == 0 || (kWidth == kLanes && kWarp % kLanes == 0),
                "a group is lanes of a warp, or a block");
  static constexpr int kPerBlock = kWidth < kThreads ? kThreads / kWidth : 1;

  __device__ static int rank() { return threadIdx.x % kWidth; }
  // These number the groups of the whole grid, in the order in which they process rows.
  __device__ static int64_t number() { return blockIdx.x * int64_t(kPerBlock) + threadIdx.x / kWidth; }
  __device__ static int64_t count() { return gridDim.x * int64_t(kPerBlock); }

  // Returns the lanes of a warp that belong to the group.
  __device__ static unsigned lanes() {
    return (0xffffffffu >> (kWarp - kLanes)) << (threadIdx.x % kWarp / kLanes * kLanes);
  }

  // Synchronizes the group and orders its memory accesses.
  __device__ static void sync() {
    if (kWidth <= kWarp)
      __syncwarp(lanes());
    else
      __syncthreads();
  }

  // Broadcasts the result of reduce from lane 0. The threads of a block already have the same result.
  template <template <typename> class stats_t, typename acc_t>
  __device__ static stats_t<acc_t> broadcast(const stats_t<acc_t>& reduced) {
    if (kWidth > kWarp) return reduced;
    constexpr int kFields = sizeof(stats_t<acc_t>) / sizeof(acc_t);
    acc_t fields[kFields];
    std::memcpy(fields, &reduced, sizeof(reduced));
#pragma unroll
    for (int i = 0; i < kFields; ++i) fields[i] = __shfl_sync(lanes(), fields[i], 0, kLanes);
    stats_t<acc_t> first;
    std::memcpy(&first, fields, sizeof(first));
    return first;
  }

  __device__ static bool all(bool value) {
    return kWidth <= kWarp ? __all_sync(lanes(), value) : __syncthreads_and(value);
  }

  // Merges one stats_t per thread in a fixed order. Only the result of lane 0 is valid, because a merge need not be
  // symmetric in the last bit. Contains barriers, but none after the last read. `fresh` means that a barrier has
  // followed the previous call for this stats_t.
  template <bool fresh = false, template <typename> class stats_t, typename acc_t>
  __device__ static stats_t<acc_t> reduce(stats_t<acc_t> mine) {
    constexpr int kFields = sizeof(stats_t<acc_t>) / sizeof(acc_t);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      mine.merge(shuffle_xor<stats_t, acc_t, kFields>(mine, offset));
    if (kWidth <= kWarp) return mine;

    constexpr int kWarps = kWidth > kWarp ? kWidth / kWarp : 1;
    SCE_SHARED(acc_t, partial, [kWarps][kFields]);
    if (!fresh) __syncthreads();  // the values of the previous call may still be in use
    if (threadIdx.x % kWarp == 0) std::memcpy(partial[threadIdx.x / kWarp], &mine, sizeof(mine));
    __syncthreads();
    stats_t<acc_t> total;
    for (int w = 0; w < kWarps; ++w) {
      stats_t<acc_t> part;
      std::memcpy(&part, partial[w], sizeof(part));
      total.merge(part);
    }
    return total;
  }

 private:
  template <template <typename> class stats_t, typename acc_t, int kFields>
  __device__ static stats_t<acc_t> shuffle_xor(const stats_t<acc_t>& mine, int offset) {
    acc_t fields[kFields];
    std::memcpy(fields, &mine, sizeof(mine));
#pragma unroll
    for (int i = 0; i < kFields; ++i) fields[i] = __shfl_xor_sync(lanes(), fields[i], offset);
    stats_t<acc_t> other;
    std::memcpy(&other, fields, sizeof(other));
    return other;
  }
};

// These compute the maximum and the sum of some numbers.
template <typename acc_t>
struct Largest {
  acc_t max = Limits<acc_t>::kLowest;
  SCE_HD void merge(Largest other) { max = larger(other.max, max); }
};
template <typename acc_t>
struct Sum {
  acc_t sum = 0;
  SCE_HD void merge(Sum other) { sum += other.sum; }
};
// Holds the sums of RowStats for threads that already know the row's maximum. A thread that has logits with this
// maximum leaves one out of `sum`; left_out is the number of these threads.
template <typename acc_t>
struct OtherSums {
  acc_t sum = 0, left_out = 0;
  SCE_HD void merge(OtherSums other) { sum += other.sum, left_out += other.left_out; }
  // Returns RowStats::rest, where `unit` is the exponential of the maximum.
  SCE_HD acc_t rest(acc_t unit) const { return sum / unit + (left_out - acc_t(1)); }
};
template <typename acc_t>
struct RowSums {
  OtherSums<acc_t> others;
  acc_t weighted = 0, weight = 0;
  SCE_HD void merge(RowSums with) { others.merge(with.others), weighted += with.weighted, weight += with.weight; }
};

// Hides from the compiler how a number, or a pointer to global memory, was computed.
__device__ __forceinline__ void hide(int& number) {
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(number));
#endif
}
__device__ __forceinline__ void hide(int64_t& number) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(number));
#endif
}
template <typename number_t>
__device__ __forceinline__ void hide(number_t*& global) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(global));
  __builtin_assume(__isGlobal(global));
#endif
}

constexpr int kMostBlocks = 8;  // per cluster, portable

// Returns what `ask` returns for the current device, which is asked once.
template <typename ask_t>
bool once_per_device(const ask_t& ask) {
  static std::atomic<int> known[kMostDevices];  // 0 means not yet asked
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  if (known[device] == 0) known[device] = ask() ? 1 : -1;
  return known[device] > 0;
}

// Returns how many clusters of `cluster` blocks run at the same time on the current device, or 0 if this is unknown.
inline int64_t query_resident_clusters(const void* kernel, int cluster, int64_t shared) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  const cudaError_t error =
      cluster > 1 ? cudaOccupancyMaxActiveClusters(&count, kernel, &config)
                  : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, kThreads, config.dynamicSmemBytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return cluster > 1 ? count : int64_t(count) * multiprocessors();
}

// Returns true if the current device runs clusters of kMostBlocks blocks of `kernel`. A small MIG slice may hold fewer
// blocks, although its compute capability supports clusters.
template <typename... parameters_t>
bool has_clusters(void (*kernel)(parameters_t...), int64_t shared = 0) {
  return supports_clusters(kernel) &&
         query_resident_clusters(reinterpret_cast<const void*>(kernel), kMostBlocks, shared) > 0;
}

// Merges the statistics of the blocks of a cluster in a fixed order, so that all blocks get the same bits. `part` is
// this block. All threads of the cluster must call this function, after Cluster::arrive and wait. `turn` counts the
// calls for a stats_t: a block that is ahead uses another buffer. Contains a barrier.
template <template <typename> class stats_t, typename acc_t>
__device__ stats_t<acc_t> merge_of_cluster(const stats_t<acc_t>& mine, int cluster, int part, unsigned turn) {
  constexpr int kFields = sizeof(mine) / sizeof(acc_t);
  SCE_SHARED(acc_t, all, [2][kMostBlocks * kFields]);
  acc_t* now = all[turn % 2];
  const auto block = static_cast<int>(threadIdx.x);
  if (block < cluster) {
    acc_t fields[kFields];
    std::memcpy(fields, &mine, sizeof(mine));
    acc_t* to = Cluster::of_block(now, block) + part * kFields;
#pragma unroll
    for (int i = 0; i < kFields; ++i) to[i] = fields[i];
  }
  Cluster::sync();
  using Lanes = RowGroup<kMostBlocks>;  // each lane holds a block's statistics, which is faster than a loop
  stats_t<acc_t> of_block;
  if (Lanes::rank() < cluster) std::memcpy(&of_block, now + Lanes::rank() * kFields, sizeof(of_block));
  return Lanes::broadcast(Lanes::reduce(of_block));
}

// Distributes the columns [begin, end) of a row over a group. Single columns come first, up to a 16-byte boundary, then
// packs, of which each thread has kUnroll in flight, then single columns. A thread's columns ascend. All columns
// of float64 are single: its arithmetic takes so many instructions that packs would double the time to compile.
//
// `packs(column, count)` processes the packs at column, column + stride, ... that are in `count`, where stride is
// kWidth * Pack::kSize. `count` is a Count<kUnroll> while every thread has that many packs, and then one Some<kUnroll>.
// `single(column)` processes one element. If `by_packs` is false, all columns are single.
template <int kWidth, int kUnroll, typename scalar_t, typename packs_t, typename single_t>
__device__ __forceinline__ void for_columns(const scalar_t* row, int64_t begin, int64_t end, bool by_packs,
                                            const packs_t& packs, const single_t& single) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const int rank = RowGroup<kWidth>::rank();
  if constexpr (kSize == 1) {
#pragma unroll 1
    for (int64_t c = begin + rank; c < end; c += kWidth) single(c);
  } else {
    const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row + begin) % 16 / sizeof(scalar_t));
    int64_t body = begin + (kSize - misalignment) % kSize;
    if (body > end || !by_packs) body = end;
    const int64_t tail = body + (end - body) / kSize * kSize;

    // Loops with few iterations are not unrolled, because they would otherwise make up most of the kernel.
#pragma unroll 1
    for (int64_t c = begin + rank; c < body; c += kWidth) single(c);
    constexpr int64_t kStride = int64_t(kWidth) * kSize;
    const int64_t mine = int64_t(rank) * kSize;
    int64_t c = body + mine;
    // Omits `mine` if there is a last step. Otherwise the threads of a warp would leave one by one, and it would wait
    // twice.
    const int64_t full = tail - (kUnroll == 1 ? 0 : kUnroll * kStride - mine - 1);
#pragma unroll 1
    for (; c < full; c += kUnroll * kStride) packs(c, Count<kUnroll>{});
    if constexpr (kUnroll > 1)
      if (c < tail) packs(c, Some<kUnroll>{static_cast<int>((tail - c - 1) / kStride) + 1});
#pragma unroll 1
    for (int64_t s = tail + rank; s < end; s += kWidth) single(s);
  }
}

}  // namespace cuda
}  // namespace sparse_ce
