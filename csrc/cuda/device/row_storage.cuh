// row_storage.cuh - Holds the logits of a thread between the loss and the gradient, in registers or in shared memory.
#pragma once

#include "row_group.cuh"

namespace sparse_ce {
namespace cuda {

// Packs per thread of a block: 64 KiB in total, of which a multiprocessor holds three. With half as many, twice as many
// blocks would share a row, and the statistics of each block would count twice: 1.55 copies instead of 1.15 on an H100
// (8192 x 128256 bfloat16, forward + backward).
constexpr int kSharedPacks = 16;
constexpr int kRegisterPacks = 4, kWarpPacks = 48;  // per thread of a warp, in registers and in shared memory
// Bytes of a block's shared memory for one pack per thread: the logits, and marks of up to eight per pack.
constexpr int64_t kBytesOfPacks = int64_t(16) * kThreads, kBytesOfMarks = int64_t(2) * kThreads;

// Holds a thread's part of a row in registers: `packs` packs, which are indexed at compile time.
template <int packs>
struct InRegisters {
  static constexpr int kUnroll = packs;
  static constexpr int blocks(bool plain) { return plain ? 3 : 2; }  // blocks per multiprocessor
  static constexpr bool kAll = true;  // all packs of a thread are unrolled
  uint4 stored[packs];
  uint4* shared_;  // where `share` copies them

  __device__ explicit InRegisters(int) {
    SCE_DYNAMIC_SHARED(uint4, shared);
    shared_ = shared + threadIdx.x / kWarp * (packs * kWarp);
  }
  __device__ int count() const { return packs; }
  __device__ __forceinline__ void load(int u, const void* from) { stored[u] = *static_cast<const uint4*>(from); }
  __device__ __forceinline__ void set(int u, uint4 pack) { stored[u] = pack; }
  __device__ __forceinline__ uint4 get(int u) const { return stored[u]; }
  // These take an index that is known at run time only.
  __device__ __forceinline__ void set_at(int at, uint4 pack) {
#pragma unroll
    for (int u = 0; u < packs; ++u)
      if (u == at) stored[u] = pack;
  }
  __device__ __forceinline__ uint4 get_at(int at) const {
    uint4 pack = stored[0];
#pragma unroll
    for (int u = 1; u < packs; ++u)
      if (u == at) pack = stored[u];
    return pack;
  }
  __device__ void wait() {}
  // Copies the packs to shared memory, where all threads of the group can read them.
  __device__ void share() const {
#pragma unroll
    for (int u = 0; u < packs; ++u) shared_[u * kWarp + threadIdx.x % kWarp] = stored[u];
    __syncwarp();
  }
  __device__ const uint4* shared() const { return shared_; }
  // Hides the logits from the compiler by a xor with `zero`, which is 0. Otherwise it would keep the converted numbers
  // instead of recomputing them, for which there are no registers.
  __device__ __forceinline__ void unknow(uint32_t zero) {
#pragma unroll
    for (uint4& pack : stored) pack.x ^= zero, pack.y ^= zero, pack.z ^= zero, pack.w ^= zero;
  }
};

// Holds a thread's part of a row in shared memory, to which logits are copied without registers. A thread loads only
// its own part, and reads only this until `share` is called.
template <int kWidth>
struct InSharedMemory {
  static constexpr int kUnroll = 4;
  static constexpr int blocks(bool) { return 3; }
  static constexpr bool kAll = false;
  uint4* stored;
  int packs;

  __device__ explicit InSharedMemory(int packs) : packs(packs) {
    SCE_DYNAMIC_SHARED(uint4, shared);
    stored = shared + threadIdx.x / kWidth * (packs * kWidth) + threadIdx.x % kWidth;
  }
  __device__ int count() const { return packs; }
  __device__ __forceinline__ void load(int u, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    // Does what __pipeline_memcpy_async does, without converting the address again for each pack.
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stored)) + u * (kWidth * 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    __pipeline_memcpy_async(stored + u * kWidth, from, sizeof(uint4));
#endif
  }
  __device__ __forceinline__ void set(int u, uint4 pack) { stored[u * kWidth] = pack; }
  __device__ __forceinline__ uint4 get(int u) const { return stored[u * kWidth]; }
  __device__ __forceinline__ void set_at(int u, uint4 pack) { set(u, pack); }
  __device__ __forceinline__ uint4 get_at(int u) const { return get(u); }
  __device__ void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");  // no read moves before it
#else
    __pipeline_commit();
    __pipeline_wait_prior(0);
#endif
  }
  __device__ void share() const {
    if (kWidth == kWarp) __syncwarp();  // a block has synchronized since its logits arrived
  }
  __device__ const uint4* shared() const { return stored - threadIdx.x % kWidth; }
  __device__ void unknow(uint32_t) {}
};

}  // namespace cuda
}  // namespace sparse_ce
