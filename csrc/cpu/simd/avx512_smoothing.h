// avx512_smoothing.h - Adds label smoothing to the loops of avx512.h, with a weight for each class.
#pragma once

#include "avx512_columns.h"

#ifdef SCE_X86
namespace sparse_ce {
namespace cpu {
namespace avx512 {

// Provides weights of 1, in the order of a loaded pack of scalar_t logits. The weight of missing columns is 0.
template <typename scalar_t>
struct Ones {
  static constexpr bool kOnes = true;
  SCE_AVX512_INLINE Ones from(int64_t) const { return {}; }
  SCE_AVX512_INLINE void read(Columns<kNarrow>& out) const { read_first(kPack, out); }
  SCE_AVX512_INLINE void read_first(int64_t n, Columns<kNarrow>& out) const {
    const uint32_t first = first_lanes<scalar_t>(n);
    SCE_EACH(k, kNarrow)
    out.vector[k] = _mm512_maskz_mov_ps(static_cast<__mmask16>(first >> 16 * k), _mm512_set1_ps(1));
  }
};

// Provides weights from memory, in the same order.
template <typename scalar_t>
struct ClassWeights {
  static constexpr bool kOnes = false;
  const float* weight;

  SCE_AVX512_INLINE ClassWeights from(int64_t i) const { return {weight + i}; }
  SCE_AVX512_INLINE void read(Columns<kNarrow>& out) const {
    load(weight, out);
    arrange(out);
  }
  SCE_AVX512_INLINE void read_first(int64_t n, Columns<kNarrow>& out) const {
    const uint32_t first = first_columns(n);
    SCE_EACH(k, kNarrow)
    out.vector[k] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(first >> 16 * k), weight + 16 * k);
    arrange(out);
  }

 private:
  SCE_AVX512_INLINE static void arrange(Columns<kNarrow>& x) {
    if constexpr (std::is_same_v<scalar_t, BFloat16>) {  // the even ones, then the odd ones
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      const __m512 low = x.vector[0], high = x.vector[1];
      x.vector[0] = _mm512_permutex2var_ps(low, even, high);
      x.vector[1] = _mm512_permutex2var_ps(low, odd, high);
    }
  }
};

// Combines logits with class weights.
template <typename logits_t, typename weights_t>
struct Weighed : logits_t {
  weights_t weights;
  SCE_AVX512_INLINE Weighed from(int64_t i) const { return {logits_t::from(i), weights.from(i)}; }
};

// Selects the statistics for label smoothing.
struct SmoothedStats : RowStats<float> {};

// Holds per-lane sums of exponents times weights, and of weights.
struct WeighedLanes {
  __m512 exponents, weights;

  SCE_AVX512_INLINE WeighedLanes() { exponents = weights = _mm512_setzero_ps(); }

  // Adds all streams, which are `step` columns apart.
  template <typename weights_t>
  SCE_AVX512_INLINE void push_streams(Columns<kWide> x, const weights_t& of, int64_t step) {
    if constexpr (weights_t::kOnes) {
      SCE_EACH(k, kWide / 2) x.vector[k] = _mm512_add_ps(x.vector[k], x.vector[k + kWide / 2]);
      SCE_EACH(k, kWide / 2) exponents = _mm512_add_ps(exponents, x.vector[k]);
      weights = _mm512_add_ps(weights, _mm512_set1_ps(kWide));
    } else {
      Columns<kWide> o;
      read_streams(of, step, o);
      push(x, o);
    }
  }
  // Adds the first n columns of some packs; other exponents are -inf.
  template <typename weights_t, int count>
  SCE_AVX512_INLINE void push_first(const Columns<count>& x, const weights_t& of, int64_t n) {
    Columns<count> o;
    SCE_EACH(k, count / kNarrow) {
      Columns<kNarrow> part;
      of.from(k * kPack).read_first(in_pack(n, k), part);
      o.vector[2 * k] = part.vector[0];
      o.vector[2 * k + 1] = part.vector[1];
    }
    push(x, o);
  }
  // A class of weight 0 adds 0 even at -inf.
  template <int count>
  SCE_AVX512_INLINE void push(const Columns<count>& x, const Columns<count>& o) {
    SCE_EACH(k, count) {
      const __mmask16 counts = _mm512_cmp_ps_mask(o.vector[k], _mm512_setzero_ps(), _CMP_NEQ_UQ);
      exponents = _mm512_mask3_fmadd_ps(x.vector[k], o.vector[k], exponents, counts);
    }
    SCE_EACH(k, count) weights = _mm512_add_ps(weights, o.vector[k]);
  }
  SCE_AVX512_INLINE void merge(const WeighedLanes& other) {
    exponents = _mm512_add_ps(other.exponents, exponents);
    weights = _mm512_add_ps(other.weights, weights);
  }

  // Writes statistics relative to the exponent `highest`.
  SCE_AVX512_INLINE void write(double highest, RowStats<float>& stats) const {
    const double weight = _mm512_reduce_add_ps(weights);
    stats.weighted = static_cast<float>((_mm512_reduce_add_ps(exponents) - weight * highest) * kLn2);
    stats.weight = static_cast<float>(weight);
  }
};

// Select what a gradient reads: the logits, or the weights of their classes.
struct ItsLogits {
  template <typename logits_t>
  SCE_AVX512_INLINE const logits_t& operator()(const logits_t& logits) const {
    return logits;
  }
};
struct ItsWeights {
  template <typename logits_t>
  SCE_AVX512_INLINE auto operator()(const logits_t& logits) const {
    return logits.weights;
  }
};

// Subtracts nothing from the gradients. read(of, x) reads data of the classes.
struct Nothing {
  SCE_AVX512_INLINE explicit Nothing(float) {}
  template <int count, typename read_t>
  SCE_AVX512_INLINE void operator()(const read_t&, Columns<count>&) const {}
};

// Subtracts a share by weight from the gradients.
template <typename weights_t>
class Share {
 public:
  SCE_AVX512_INLINE explicit Share(float each) : each_(each) {}

  template <int count, typename read_t>
  SCE_AVX512_INLINE void operator()(const read_t& read, Columns<count>& x) const {
    const __m512 each = _mm512_set1_ps(each_);
    if constexpr (weights_t::kOnes) {
      SCE_EACH(k, count) x.vector[k] = _mm512_sub_ps(x.vector[k], each);
    } else {
      Columns<count> o;
      read(ItsWeights{}, o);
      SCE_EACH(k, count) x.vector[k] = _mm512_fnmadd_ps(each, o.vector[k], x.vector[k]);
    }
  }

 private:
  const float each_;
};

// Selects the loss without or with label smoothing.
template <typename logits_t>
struct Smoothing {
  static constexpr bool kIs = false;
  using Stats = RowStats<float>;
  using Less = Nothing;
};
template <typename logits_t, typename weights_t>
struct Smoothing<Weighed<logits_t, weights_t>> {
  static constexpr bool kIs = true;
  using Stats = SmoothedStats;
  using Less = Share<weights_t>;
};

// Calls f(logits), or with `smoothed` f(logits with weights). If class_weight is null, every weight is 1.
template <typename logits_t, typename function_t>
SCE_AVX512 auto by_smoothing(const logits_t& logits, bool smoothed, const float* class_weight, const function_t& f) {
  using scalar_t = typename logits_t::Storage;
  if (!smoothed) return f(logits);
  if (!class_weight) return f(Weighed<logits_t, Ones<scalar_t>>{logits, {}});
  return f(Weighed<logits_t, ClassWeights<scalar_t>>{logits, {class_weight}});
}

}  // namespace avx512
}  // namespace cpu
}  // namespace sparse_ce
#endif
