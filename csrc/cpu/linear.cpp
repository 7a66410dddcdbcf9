#include "../core/errors.h"
#include "../ops/linear.h"
#include "../torch_calls.h"
#include "instruction_set.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kGrain = 32768;  // with fewer elements, waking a thread does not pay off

template <typename scalar_t, typename product_t>
SCE_HD void accumulate_elements(const AccumulateArgs& args, int64_t begin, int64_t end) {
  const product_t* __restrict product = static_cast<const product_t*>(args.product);
  scalar_t* __restrict total = static_cast<scalar_t*>(args.total);
  uint8_t* __restrict low = args.low;
  const bool first = args.first, last = args.last;
  for (int64_t i = begin; i < end; ++i) accumulate_element(to_acc(product[i]), first, last, total[i], low, i);
}

template <typename scalar_t>
SCE_HD void accumulate_body(const AccumulateArgs& args, int64_t begin, int64_t end) {
  switch (args.product_dtype) {
    case DType::kBFloat16:
      return accumulate_elements<scalar_t, BFloat16>(args, begin, end);
    case DType::kFloat16:
      return accumulate_elements<scalar_t, Half>(args, begin, end);
    default:
      return accumulate_elements<scalar_t, acc_type<scalar_t>>(args, begin, end);
  }
}

template <typename scalar_t>
SCE_HD void scale_body(scalar_t* values, ScaleArgs::Factor<acc_type<scalar_t>> factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) from_acc(factor(to_acc(values[i])), values[i]);
}

}  // namespace

void accumulate(const AccumulateArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    torch::stable::parallel_for(0, args.count, kGrain, [&](int64_t begin, int64_t end) {
      with_instruction_set([&](auto) SCE_INLINE { accumulate_body<decltype(storage)>(args, begin, end); });
    });
  });
}

void scale(const ScaleArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    using acc_t = acc_type<scalar_t>;
    const auto factor = args.template factor<acc_t>();
    if (!factor.known)  // only possible if `expected` is given
      fail("expected must be finite, nonzero and at least 2^-40 times scale, got ",
           *static_cast<const acc_t*>(args.expected), " for scale ", *static_cast<const acc_t*>(args.scale),
           "; use inplace='backward', which expects no grad_output");
    if (factor.by == 1) return;
    const auto scale = [&](scalar_t* values, int64_t count) {
      with_instruction_set([&](auto) SCE_INLINE { scale_body(values, factor, count); });
    };
    scalar_t* values = static_cast<scalar_t*>(args.values);
    if (args.rows == 1) {
      torch::stable::parallel_for(0, args.count, kGrain,
                                  [&](int64_t begin, int64_t end) { scale(values + begin, end - begin); });
      return;
    }
    const int64_t grain = std::max<int64_t>(1, kGrain / args.count);
    torch::stable::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) scale(values + r * args.row_stride, args.count);
    });
  });
}

// SPARSE_CE_CPU_BFLOAT16 = native | float32 forces one of the two, so that both can be tested.
bool multiplies_bfloat16() {
  static const bool native = [] {
    const char* wish = std::getenv("SPARSE_CE_CPU_BFLOAT16");
    if (wish && *wish) return std::strcmp(wish, "native") == 0;
#ifdef SCE_X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return false;
#endif
  }();
  return native;
}

}  // namespace cpu
}  // namespace sparse_ce
