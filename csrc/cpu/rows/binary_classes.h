// binary_classes.h - Evaluates the losses of some classes of binary cross entropy, and their derivatives. Each loop is
// compiled once for all dtypes of the same arithmetic.
#pragma once

#include "../../core/binary_math.h"
#include "../instruction_set.h"
#include "../memory/nontemporal.h"

#include <type_traits>

namespace sparse_ce {
namespace cpu {

constexpr int64_t kPart = 256;  // columns of a loop over classes with different factors
constexpr int64_t kRun = 1024;  // columns of a loop over classes without entries

// Calls f with the loss of a class.
template <typename acc_t, typename function_t>
auto with_loss(const BinaryOptions& options, const function_t& f) {
  const auto of_kind = [&](auto kind) {
    constexpr BinaryKind of = decltype(kind)::value;
    return whole_exponents(options) ? f(BinaryLoss<of, acc_t, true>(options)) : f(BinaryLoss<of, acc_t>(options));
  };
  switch (binary_kind(options)) {
    case BinaryKind::kPlain:
      return f(BinaryLoss<BinaryKind::kPlain, acc_t>(options));
    case BinaryKind::kFocal:
      return of_kind(std::integral_constant<BinaryKind, BinaryKind::kFocal>{});
    default:
      return of_kind(std::integral_constant<BinaryKind, BinaryKind::kClipped>{});
  }
}

// Computes lower_per_higher of n logits, for a loop that evaluates their losses. A processor keeps more classes of two
// short loops in flight than of a long one.
template <typename acc_t>
SCE_HD void set_ratios(const acc_t* x, int64_t n, acc_t scale, acc_t shift, acc_t* to) {
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) to[i] = Sigmoid<acc_t>::lower_per_higher(scale * x[i] + shift);
}

// Returns the sum of the losses of negative classes whose weights are `weights`, or 1 if that is null. Unless `to` is
// null, computes factor times the derivatives. Prefetches elements of `size` bytes from `next` on.
template <bool weighted, typename loss_t, typename acc_t>
double sum_of_negatives(const loss_t& of_class, const acc_t* x, int64_t n, acc_t scale, acc_t shift, acc_t grad,
                        const acc_t* weights, const void* next, int64_t size, acc_t* to) {
  return with_instruction_set([&](auto) SCE_INLINE {
    const loss_t of = of_class;
    const acc_t by = scale, plus = shift, factor = grad;
    const acc_t *logits = x, *w = weights;
    acc_t* const slopes = to;
    const char* const soon = static_cast<const char*>(next);
    const int64_t bytes = size;
    alignas(64) acc_t ratios[kRun];
    set_ratios(logits, n, by, plus, ratios);
    const auto terms = [&](int64_t i) SCE_INLINE { return of.at(by * logits[i] + plus, ratios[i]); };
    const auto prefetch = [&](int64_t i) SCE_INLINE {
      for (int64_t byte = 0; byte < kWideLanes * bytes; byte += kLine) __builtin_prefetch(soon + i * bytes + byte);
    };
    if (!slopes) {
      const auto loss = [&](int64_t i)
                            SCE_INLINE { return weighted ? expected(w[i], terms(i).negative) : terms(i).negative; };
      return double(sum_in_lanes<acc_t, kWideLanes>(0, n, loss, prefetch));
    }
    const auto loss_with_slope = [&](int64_t i) SCE_INLINE {
      const auto at = terms(i);
      slopes[i] = (weighted ? w[i] * at.negative_slope : at.negative_slope) * factor;
      return weighted ? expected(w[i], at.negative) : at.negative;
    };
    return double(sum_in_lanes<acc_t, kWideLanes>(0, n, loss_with_slope, prefetch));
  });
}

// Holds some classes with their factors.
template <typename acc_t>
struct BinaryClasses {
  alignas(64) acc_t x[kPart], negative[kPart], positive[kPart], loss[kPart], slope[kPart];

  template <typename loss_t>
  void evaluate(const loss_t& of_class, acc_t scale, acc_t shift, int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      const loss_t of = of_class;
      const acc_t by = scale, plus = shift;
      // Compilers do not vectorize accesses to aligned members.
      const acc_t *of_x = x, *of_negative = negative, *of_positive = positive;
      acc_t *to_loss = loss, *to_slope = slope;
      alignas(64) acc_t ratios[kPart];
      set_ratios(of_x, n, by, plus, ratios);
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const auto terms = of.at(by * of_x[i] + plus, ratios[i]);
        to_loss[i] = expected(of_negative[i], terms.negative) + expected(of_positive[i], terms.positive);
        to_slope[i] = of_negative[i] * terms.negative_slope + of_positive[i] * terms.positive_slope;
      }
    });
  }
};

template <typename function_t>
double sum_of(int64_t n, const function_t& term) {
  return with_instruction_set([&](auto) SCE_INLINE {
    using acc_t = std::decay_t<decltype(term(0))>;
    return double(sum_in_lanes<acc_t, kWideLanes>(0, n, term));
  });
}

}  // namespace cpu
}  // namespace sparse_ce
