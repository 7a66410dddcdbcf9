// dtype.h - Defines the dtypes of logits and targets, and their conversion to the arithmetic dtype. Included by host
// code and, through nvcc, by device code.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// A compiler other than nvcc that knows CUDA's names may define SCE_CUDA itself.
#if defined(__CUDACC__) && !defined(SCE_CUDA)
#define SCE_CUDA
#endif

#ifdef SCE_CUDA
#define SCE_HD __host__ __device__ __forceinline__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#define SCE_HD inline __attribute__((always_inline))
#endif

namespace sparse_ce {

enum class DType : int32_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt32, kInt64, kUInt8 };

SCE_HD constexpr int64_t size_of(DType dtype) {
  if (dtype == DType::kUInt8) return 1;
  return dtype == DType::kFloat64 || dtype == DType::kInt64   ? 8
         : dtype == DType::kFloat32 || dtype == DType::kInt32 ? 4
                                                              : 2;
}

template <typename to_t, typename from_t>
SCE_HD to_t bit_cast(from_t x) {
  static_assert(sizeof(to_t) == sizeof(from_t));
  to_t out;
  std::memcpy(&out, &x, sizeof(out));
  return out;
}

#ifdef SCE_CUDA
using Half = __half;
using BFloat16 = __nv_bfloat16;

SCE_HD float to_acc(Half x) { return __half2float(x); }
SCE_HD float to_acc(BFloat16 x) { return __bfloat162float(x); }
SCE_HD void from_acc(float x, Half& out) { out = __float2half_rn(x); }
SCE_HD void from_acc(float x, BFloat16& out) { out = __float2bfloat16_rn(x); }
#else
// These store 16-bit floats as bits. Integer arithmetic is vectorized on every instruction set; library types are not.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

SCE_HD float to_acc(const BFloat16& x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

SCE_HD void from_acc(float x, BFloat16& out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // round to nearest, ties to even
  out.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

SCE_HD float to_acc(const Half& x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  // Multiplying by 2^112 changes the exponent's bias from 15 to 127 and normalizes subnormals.
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // inf and NaN keep their mantissa
  return bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

SCE_HD void from_acc(float x, Half& out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14, adding 0.5 leaves a mantissa with steps of 2^-24, so the FPU rounds to nearest even.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t overflow = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  out.bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? overflow : finite));
}
#endif

SCE_HD float to_acc(float x) { return x; }
SCE_HD double to_acc(double x) { return x; }
SCE_HD void from_acc(float x, float& out) { out = x; }
SCE_HD void from_acc(double x, double& out) { out = x; }

// The arithmetic dtype is float64 for float64 storage, otherwise float32.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same<scalar_t, double>::value, double, float>;

// These are constants rather than function calls, so that device code can use them.
template <typename acc_t>
struct Limits {
  static constexpr acc_t kNaN = std::numeric_limits<acc_t>::quiet_NaN();
  static constexpr acc_t kLowest = std::numeric_limits<acc_t>::lowest();
  static constexpr acc_t kEpsilon = std::numeric_limits<acc_t>::epsilon();
};

// Returns element i of an array whose dtype is known at run time. Targets are less than 1 % of the bytes, so a uniform
// branch is free and saves one template parameter per dtype.
template <typename acc_t>
SCE_HD acc_t load_float(const void* array, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<acc_t>(static_cast<const double*>(array)[i]);
    case DType::kFloat16:
      return static_cast<acc_t>(to_acc(static_cast<const Half*>(array)[i]));
    case DType::kBFloat16:
      return static_cast<acc_t>(to_acc(static_cast<const BFloat16*>(array)[i]));
    default:
      return static_cast<acc_t>(static_cast<const float*>(array)[i]);
  }
}

template <typename acc_t>
SCE_HD void store_float(acc_t x, void* array, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(array)[i] = static_cast<double>(x);
      break;
    case DType::kFloat16:
      from_acc(static_cast<float>(x), static_cast<Half*>(array)[i]);
      break;
    case DType::kBFloat16:
      from_acc(static_cast<float>(x), static_cast<BFloat16*>(array)[i]);
      break;
    default:
      static_cast<float*>(array)[i] = static_cast<float>(x);
  }
}

SCE_HD int64_t load_int(const void* array, DType dtype, int64_t i) {
  return dtype == DType::kInt64 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

// Returns element i of an array of any dtype; bool is stored as kUInt8.
template <typename acc_t>
SCE_HD acc_t load_number(const void* array, DType dtype, int64_t i) {
  if (dtype == DType::kUInt8) return static_cast<acc_t>(static_cast<const uint8_t*>(array)[i]);
  const bool integer = dtype == DType::kInt32 || dtype == DType::kInt64;
  return integer ? static_cast<acc_t>(load_int(array, dtype, i)) : load_float<acc_t>(array, dtype, i);
}

// Returns the address of element i.
inline const void* advance(const void* array, DType dtype, int64_t i) {
  return static_cast<const char*>(array) + i * size_of(dtype);
}
inline void* advance(void* array, DType dtype, int64_t i) { return static_cast<char*>(array) + i * size_of(dtype); }

// Calls f(index{}) with the C++ type that stores an integer dtype.
template <typename function_t>
inline auto with_index(DType dtype, function_t f) {
  return dtype == DType::kInt64 ? f(int64_t{}) : f(int32_t{});
}

// Calls f(storage{}) with the C++ type that stores a floating dtype.
template <typename function_t>
inline auto with_storage(DType dtype, function_t f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat16:
      return f(Half{});
    case DType::kBFloat16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

}  // namespace sparse_ce
