// packs.cuh - Defines packs of adjacent elements, which are read and written with the widest possible instructions.
#pragma once

#include "../../core/scalar_math.h"
#include "launch.cuh"

#include <cstring>
#include <type_traits>

namespace sparse_ce {
namespace cuda {

// The default size is 16 bytes, which one instruction loads or stores. Doubles are not packed; see for_columns.
template <typename scalar_t, int size = sizeof(scalar_t) == sizeof(double) ? 1 : 16 / sizeof(scalar_t)>
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
  __device__ void store(scalar_t* p) const { store_by<part_t, 0, kParts>(p); }
  // Stores 16 bytes at an address that is aligned to `width` bytes and no more; see common_width.
  __device__ __forceinline__ void store(scalar_t* p, int width) const {
    static_assert(kBytes == 16, "an aligned pack is stored by one instruction");
    if (width == 16) {
      uint4 part;
      std::memcpy(&part, at, sizeof(part));
      // Stores to the L2 cache like any store. The intrinsic keeps the compiler from merging it with the narrow ones
      // below.
      __stcg(reinterpret_cast<uint4*>(p), part);
    } else if (width == 8) {
      store_by<uint2, 0, 2>(p);
    } else {
      if (sizeof(scalar_t) == 4 || width == 4) return store_by<uint32_t, 0, 4>(p);
      p[0] = at[0];
      store_by<uint32_t, 1, 3>(p);  // aligned to every second element
      p[kSize - 1] = at[kSize - 1];
    }
  }

 private:
  // Stores `count` parts, beginning with element `first`.
  template <typename to_t, int first, int count>
  __device__ __forceinline__ void store_by(scalar_t* p) const {
    constexpr int kOfPart = sizeof(to_t) / sizeof(scalar_t);
#pragma unroll
    for (int u = 0; u < count; ++u) {
      scalar_t of_part[kOfPart];  // copying all elements at once would go through local memory
#pragma unroll
      for (int e = 0; e < kOfPart; ++e) of_part[e] = at[first + u * kOfPart + e];
      to_t part;
      std::memcpy(&part, of_part, sizeof(part));
      reinterpret_cast<to_t*>(p + first)[u] = part;
    }
  }
};

// Returns element e of those in a word. The upper half of a float32 is a bfloat16.
template <typename scalar_t>
__device__ __forceinline__ float number_of(uint32_t word, int e) {
  if constexpr (std::is_same<scalar_t, BFloat16>::value) {
    word = e == 0 ? word << 16 : word & 0xffff0000u;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  } else {
    scalar_t numbers[sizeof(word) / sizeof(scalar_t)];
    std::memcpy(numbers, &word, sizeof(word));
    return to_acc(numbers[e]);
  }
}

// Finds the largest number in packs, ignoring NaN. 16-bit numbers are compared in pairs, as stored.
template <typename scalar_t>
struct LargestOf {
  using acc_t = acc_type<scalar_t>;
  acc_t most = -acc_t(INFINITY);

  __device__ __forceinline__ void push(uint4 words) {
    Pack<scalar_t> pack;
    std::memcpy(pack.at, &words, sizeof(words));
#pragma unroll
    for (const scalar_t& x : pack.at) most = larger(to_acc(x), most);
  }
  __device__ acc_t number() const { return larger(most, Limits<acc_t>::kLowest); }
};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // compute capability 7.5 has no maximum of pairs
template <typename scalar_t>
struct LargestOfPairs {
  uint32_t most = std::is_same<scalar_t, BFloat16>::value ? 0xff80ff80u : 0xfc00fc00u;  // -inf

  __device__ __forceinline__ void push(uint4 words) { push(words.x), push(words.y), push(words.z), push(words.w); }
  __device__ __forceinline__ void push(uint32_t word) {
    if constexpr (std::is_same<scalar_t, BFloat16>::value)
      asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(word));
    else
      asm("max.f16x2 %0, %0, %1;" : "+r"(most) : "r"(word));
  }
  __device__ float number() const {
    return fmaxf(fmaxf(number_of<scalar_t>(most, 0), number_of<scalar_t>(most, 1)), Limits<float>::kLowest);
  }
};
template <>
struct LargestOf<BFloat16> : LargestOfPairs<BFloat16> {};
template <>
struct LargestOf<Half> : LargestOfPairs<Half> {};
#endif

// Convert a pack to numbers, and numbers to a rounded pack. Two 16-bit numbers share a register, and the device
// converts them together. Converting them one by one would first need a register for each.
template <typename scalar_t, int size>
__device__ __forceinline__ void to_numbers(const Pack<scalar_t, size>& pack, acc_type<scalar_t> (&x)[size]) {
#pragma unroll
  for (int e = 0; e < size; ++e) {
    if constexpr (sizeof(scalar_t) == 2 && size % 2 == 0) {
      uint32_t word;
      std::memcpy(&word, &pack.at[e / 2 * 2], sizeof(word));
      x[e] = number_of<scalar_t>(word, e % 2);
    } else {
      x[e] = to_acc(pack.at[e]);
    }
  }
}
template <typename scalar_t, int size>
__device__ __forceinline__ void from_numbers(const acc_type<scalar_t> (&x)[size], Pack<scalar_t, size>& pack) {
  if constexpr (sizeof(scalar_t) == 2 && size % 2 == 0) {
#pragma unroll
    for (int e = 0; e < size; e += 2) {
      const auto two = [&] {
        if constexpr (std::is_same<scalar_t, BFloat16>::value)
          return __floats2bfloat162_rn(x[e], x[e + 1]);
        else
          return __floats2half2_rn(x[e], x[e + 1]);
      }();
      std::memcpy(&pack.at[e], &two, sizeof(two));
    }
  } else {
#pragma unroll
    for (int e = 0; e < size; ++e) from_acc(x[e], pack.at[e]);
  }
}

// Loads the class weights from `weight` on, or sets them to 1 if `weight` is null. Uses 16-byte loads if they are
// aligned, as for packs of aligned rows.
template <typename acc_t, int count>
__device__ __forceinline__ void load_weights(const acc_t* weight, acc_t (&o)[count]) {
  using Weights = Pack<acc_t>;
#pragma unroll
  for (acc_t& of_one : o) of_one = acc_t(1);
  if (!weight) return;
  if (count % Weights::kSize == 0 && Weights::aligned(weight)) {
#pragma unroll
    for (int e = 0; e < count; ++e)
      if (e % Weights::kSize == 0) {
        const Weights pack = Weights::load(weight + e);
        std::memcpy(o + e, pack.at, sizeof(pack));
      }
  } else {
#pragma unroll
    for (int e = 0; e < count; ++e) o[e] = weight[e];
  }
}

// Returns the largest alignment, at most 16 bytes, that both addresses share relative to each other. Packs of one array
// can be written to the other with stores of this width.
__device__ inline int common_width(const void* a, const void* b) {
  const auto apart = static_cast<int>((reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16) | 16;
  return apart & -apart;
}
__device__ inline bool equally_aligned(const void* a, const void* b) { return common_width(a, b) == 16; }

// Represents `n` packs of a thread, `stride` elements apart.
template <int n>
struct Count {
  static constexpr int value = n;
  __device__ static constexpr bool has(int) { return true; }
};
// Represents the packs at the end of a row, of which only the first ones may be present.
template <int n>
struct Some {
  static constexpr int value = n;
  int present;
  __device__ bool has(int u) const { return u < present; }
};

// Issues all loads before it uses the first result. Missing packs are 0.
template <int64_t stride, typename scalar_t, typename count_t>
__device__ __forceinline__ void load_packs(const scalar_t* first, count_t count,
                                           Pack<scalar_t> (&packs)[count_t::value]) {
#pragma unroll
  for (int u = 0; u < count_t::value; ++u) {
    packs[u] = Pack<scalar_t>{};
    if (count.has(u)) packs[u] = Pack<scalar_t>::load(first + u * stride);
  }
}

}  // namespace cuda
}  // namespace sparse_ce
