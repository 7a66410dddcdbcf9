// packs.cuh - elements that lie side by side, read and written as wide as they can be at once.
#pragma once

#include "launch.cuh"

#include <cstring>
#include <type_traits>

namespace sparse_ce {
namespace cuda {

// Without a second size 16 bytes: one load or store instruction.
template <typename scalar_t, int size = 16 / sizeof(scalar_t)>
struct Pack {
  static constexpr int kSize = size;
  static constexpr int kBytes = size * sizeof(scalar_t);
  using part_t = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes % 8 == 0, uint2, scalar_t>>;
  static constexpr int kParts = kBytes / sizeof(part_t);
  scalar_t at[size];

  __device__ static bool aligned(const scalar_t* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(part_t) == 0; }
  __device__ static Pack load(const scalar_t* p) {
    part_t parts[kParts];
#pragma unroll
    for (int u = 0; u < kParts; ++u) parts[u] = reinterpret_cast<const part_t*>(p)[u];
    Pack pack;
    std::memcpy(pack.at, parts, kBytes);
    return pack;
  }
  __device__ void store(scalar_t* p) const {
    part_t parts[kParts];
    std::memcpy(parts, at, kBytes);
#pragma unroll
    for (int u = 0; u < kParts; ++u) reinterpret_cast<part_t*>(p)[u] = parts[u];
  }
};

// Whether packs of one lie where those of the other do.
__device__ inline bool equally_aligned(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

// So many packs in flight.
template <int n>
struct Count {
  static constexpr int value = n;
};

}  // namespace cuda
}  // namespace sparse_ce
