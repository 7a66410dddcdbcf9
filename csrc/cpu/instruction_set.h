// instruction_set.h - Compiles one source for every instruction set, in files that use the baseline flags.
//
// Loops are plain C++ marked always_inline. Each instruction set instantiates them inside a function with its own
// target attribute.
#pragma once

#include <type_traits>

#if defined(__x86_64__) && !defined(SCE_PORTABLE)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && !defined(SCE_PORTABLE)  // SCE_PORTABLE selects the code for other architectures
#define SCE_X86 1
#define SCE_AVX2 __attribute__((target("arch=x86-64-v3")))
#if defined(__clang__)
#define SCE_AVX512 __attribute__((target("arch=x86-64-v4,prfchw")))
#else
#define SCE_AVX512 __attribute__((target("arch=x86-64-v4,prfchw,prefer-vector-width=512")))
#endif
#endif
#define SCE_INLINE __attribute__((always_inline))
#if defined(SCE_X86) && !defined(__clang__)
#define SCE_RARE __attribute__((cold))  // reduces the code for processors without AVX2, and the time to compile it
#else
#define SCE_RARE
#endif

// Unrolls a loop over registers, which have no addresses.
#define SCE_EACH(k, count) _Pragma("GCC unroll 8") for (int k = 0; k < count; ++k)

namespace sparse_ce {
namespace cpu {

enum class InstructionSet { kDefault, kAvx2, kAvx512 };
template <InstructionSet set>
using Compiled = std::integral_constant<InstructionSet, set>;

// Returns the instruction set of the CPU, or the one that an environment variable selects.
InstructionSet instruction_set_in_use();

#ifdef SCE_X86
template <typename function_t>
SCE_RARE static auto with_default(const function_t& f) {
  return f(Compiled<InstructionSet::kDefault>{});
}
template <typename function_t>
SCE_AVX2 static auto with_avx2(const function_t& f) {
  return f(Compiled<InstructionSet::kAvx2>{});
}
template <typename function_t>
SCE_AVX512 static auto with_avx512(const function_t& f) {
  return f(Compiled<InstructionSet::kAvx512>{});
}
#endif

// Calls f(Compiled<set>{}), compiled for the set in use. f is a lambda marked SCE_INLINE, because only inlined code is
// compiled for the set.
template <typename function_t>
static auto with_instruction_set(const function_t& f) {
#ifdef SCE_X86
  switch (instruction_set_in_use()) {
    case InstructionSet::kAvx512:
      return with_avx512(f);
    case InstructionSet::kAvx2:
      return with_avx2(f);
    default:
      return with_default(f);
  }
#else
  return f(Compiled<InstructionSet::kDefault>{});
#endif
}

// Calls f(), compiled for the set, without inlining it. The copies of an inlined function that calls this share f's
// code, so that large loops are compiled once. f is a lambda marked SCE_INLINE.
template <InstructionSet set>
struct Outlined {
  template <typename function_t>
  SCE_RARE __attribute__((noinline)) static auto call(const function_t& f) {
    return f();
  }
};
#ifdef SCE_X86
template <>
struct Outlined<InstructionSet::kAvx2> {
  template <typename function_t>
  SCE_AVX2 __attribute__((noinline)) static auto call(const function_t& f) {
    return f();
  }
};
template <>
struct Outlined<InstructionSet::kAvx512> {
  template <typename function_t>
  SCE_AVX512 __attribute__((noinline)) static auto call(const function_t& f) {
    return f();
  }
};
#endif

// Flushes numbers below the normal range to 0, because they cost 150 cycles each.
#ifdef SCE_X86
class FlushSubnormals {
 public:
  SCE_INLINE explicit FlushSubnormals(bool flushes = true) : saved_(_mm_getcsr()) {
    if (flushes) _mm_setcsr(saved_ | 0x8040);
  }
  SCE_INLINE ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  const unsigned saved_;
};
#else
struct FlushSubnormals {
  explicit FlushSubnormals(bool = true) {}  // not trivial, so that a variable of this type counts as used
};
#endif

}  // namespace cpu
}  // namespace sparse_ce
