// tile.h - the two loops over logits that take the CPU's time, for every instruction set.
//
// The bodies are plain C++ marked always_inline; each instruction set instantiates them inside a function with its own
// target attribute, so that one file compiled with the baseline flags holds them all.
#pragma once

#include "../math.h"

#if defined(__x86_64__)
#define SCE_X86 1
#define SCE_AVX2 __attribute__((target("arch=x86-64-v3")))
#if defined(__clang__)
#define SCE_AVX512 __attribute__((target("arch=x86-64-v4,prfchw")))
#else
#define SCE_AVX512 __attribute__((target("arch=x86-64-v4,prfchw,prefer-vector-width=512")))
#endif
#endif

// INSTANCE(set, attribute of its functions) for every instruction set: the tables that kernels_in_use chooses from.
#ifdef SCE_X86
#define SCE_FOR_INSTRUCTION_SETS(INSTANCE) INSTANCE(kDefault, ) INSTANCE(kAvx2, SCE_AVX2) INSTANCE(kAvx512, SCE_AVX512)
#else
#define SCE_FOR_INSTRUCTION_SETS(INSTANCE) INSTANCE(kDefault, )
#endif

namespace sparse_ce {
namespace cpu {

enum class InstructionSet { kDefault, kAvx2, kAvx512 };

// Columns that are converted at a time: few enough that the next ones arrive from memory while these are worked on.
constexpr int64_t kTile = 1024;

// Columns of a span, the least part of a row that a thread takes. The result depends on it, not on the threads. While
// backward writes one span, the next one arrives in the second cache, which has to hold both and a gradient.
constexpr int64_t kSpan = 32 * kTile;

// Logits without a softcap, converted and scaled where they are used.
template <typename scalar_t>
struct Scaled {
  const scalar_t* logits;
  acc_type<scalar_t> scale;
  SCE_HD acc_type<scalar_t> operator[](int64_t i) const { return scale * to_acc(logits[i]); }
};

template <typename scalar_t>
struct TileKernels {
  using acc_t = acc_type<scalar_t>;
  // Statistics of n <= kSpan logits. With `weighted`, also those of label smoothing; class_weight (n,) may be null.
  // `next` is where the logits lie that will be worked on afterwards.
  RowStats<acc_t> (*stats)(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform, bool weighted,
                           const acc_t* class_weight, const scalar_t* next);
  // Gradient of n <= kSpan logits as if none had an entry; gradient may be logits.
  void (*gradient)(const scalar_t* logits, int64_t n, const LogitTransform<acc_t>& transform,
                   const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight, const scalar_t* next,
                   scalar_t* gradient);
  // Gradient at n logits that have entries of the given summed weights; class_weight (n,) may be null. In place of the
  // logits `z`, which are transformed but not yet rounded to storage.
  void (*entries)(acc_t* z, int64_t n, const LogitTransform<acc_t>& transform,
                  const GradientCoefficients<acc_t>& coefficients, const acc_t* class_weight, const acc_t* target_weight);
};

InstructionSet instruction_set_in_use();

// The kernels of the set in use, of a table that has them for each. static: g++ gives templates of templates of unnamed
// namespaces names that other files share, and a linker would keep one of theirs for all.
template <template <typename, InstructionSet> class instance_t, typename scalar_t>
static const auto& kernels_in_use() {
#ifdef SCE_X86
  switch (instruction_set_in_use()) {
    case InstructionSet::kAvx512:
      return instance_t<scalar_t, InstructionSet::kAvx512>::kernels;
    case InstructionSet::kAvx2:
      return instance_t<scalar_t, InstructionSet::kAvx2>::kernels;
    default:
      break;
  }
#endif
  return instance_t<scalar_t, InstructionSet::kDefault>::kernels;
}

template <typename scalar_t>
const TileKernels<scalar_t>& tile_kernels();

}  // namespace cpu
}  // namespace sparse_ce
