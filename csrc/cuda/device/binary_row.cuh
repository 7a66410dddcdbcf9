// binary_row.cuh - Evaluates the classes of a row under a binary loss, for one thread of its group.
#pragma once

#include "../../ops/binary_cross_entropy.h"
#include "many_entries.cuh"

namespace sparse_ce {
namespace cuda {

// Holds sums over the classes of a row: of the loss, of slopes times logits, and of slopes.
template <typename acc_t>
struct BinarySums {
  acc_t loss = 0, scale = 0, shift = 0;

  SCE_HD void merge(const BinarySums& other) { loss += other.loss, scale += other.scale, shift += other.shift; }
};

// Returns log(1 + product_less_1). In float32 the argument may exceed 1. In float64 a pack has one class, so it is at
// most 1.
SCE_HD float log_1_plus(float product_less_1) { return log1pf(product_less_1); }
SCE_HD double log_1_plus(double product_less_1) { return log_of_1_plus_small(product_less_1); }

// Sums the loss of negative classes. The logarithms of 1 + u become one, of the product. The product less 1 keeps the
// digits of small u.
template <typename acc_t>
struct SoftplusSum {
  acc_t linear = 0, product_less_1 = 0;

  // Adds a class and returns its slope, sigmoid(z).
  __device__ __forceinline__ acc_t add(acc_t z) {
    const acc_t u = small_exponential(-std::fabs(z)), larger_one = reciprocal(acc_t(1) + u);
    linear += larger(z, acc_t(0));
    product_less_1 = multiply_add(product_less_1, u, product_less_1 + u);
    return z < acc_t(0) ? u * larger_one : larger_one;
  }
  __device__ __forceinline__ acc_t total() const { return linear + log_1_plus(product_less_1); }
};

// Processes the columns [begin, end) of row r, for one thread of a group. `kAlike` means that classes without entries
// have the factors 1 and 0.
template <typename scalar_t, int kWidth, BinaryKind kind, bool kAlike>
class BinaryRow {
  using acc_t = acc_type<scalar_t>;
  using pack_t = Pack<scalar_t>;
  using Group = RowGroup<kWidth>;
  using Marks = EntryMarks<kWidth>;
  using word_t = typename pack_t::part_t;
  static constexpr int kSize = pack_t::kSize;
  static constexpr bool kSoftplus = kind == BinaryKind::kPlain && kAlike;
  // The classes of a pack that are evaluated at once. More would need too many registers.
  static constexpr int kPart = kSoftplus ? kSize : 1;
  // Whether the next pack is loaded before a pack is evaluated. Before compute capability 9.0 no registers are left.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kLoadsEarly = false;
#else
  static constexpr bool kLoadsEarly = kSoftplus;
#endif
  static constexpr int kWords = 2048 / Group::kPerBlock, kPlaces = kWords / 2 * 32;  // of a window, with 2 bits each

 public:
  // `factor` multiplies the slopes. The gradient is stored if `stores` is true.
  __device__ BinaryRow(const BinaryArgs& args, const BinaryLoss<kind, acc_t>& of_class, int64_t r, int64_t begin,
                       int64_t end, acc_t factor, bool stores)
      : args_(args), of_class_(of_class), row_(args.template row<scalar_t>(r)),
        gradient_(stores ? args.template gradient_row<scalar_t>(r) : nullptr), begin_(begin), end_(end),
        scale_(args.template scale<acc_t>()), shift_(args.template shift<acc_t>()), factor_(factor), stores_(stores) {}

  // Evaluates all classes. All threads of the group must call this function.
  __device__ __forceinline__ void evaluate(EntryRange range, bool has_entries) {
    // Places count from a 16-byte boundary, so that the bits of a pack are in one word.
    const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row_ + begin_) % 16 / sizeof(scalar_t));
    const Marks marks = marks_of_group();
#pragma unroll 1
    for (int64_t origin = begin_ - (kSize > 1 ? before : 0); origin < end_; origin += kPlaces) {
      const bool marked = has_entries && mark(marks, range, origin);
      dense(marks, origin, marked);
      if (!marked) continue;
      Group::sync();  // the dense gradient has been written
      entries(marks, range, origin);
    }
  }

  __device__ BinarySums<acc_t> sums() const { return {loss_.sum, of_scale_.sum, of_shift_.sum}; }

 private:
  __device__ static Marks marks_of_group() {
    SCE_SHARED(uint64_t, words, [2048 / 2]);
    const int first = Group::kPerBlock > 1 ? static_cast<int>(threadIdx.x) / kWidth * kWords : 0;
    return {reinterpret_cast<uint32_t*>(words) + first, kPlaces};
  }

  __device__ static word_t load_word(const scalar_t* from) {
    static_assert(sizeof(word_t) == sizeof(pack_t), "a pack is loaded by one instruction");
    return *reinterpret_cast<const word_t*>(from);
  }

  // Returns the place of a class in the window at `origin`, or -1 if this group has no such class in the window.
  __device__ int place_of(int64_t column, int64_t origin) const {
    const bool inside = begin_ <= column && column < end_ && origin <= column && column < origin + kPlaces;
    return inside ? static_cast<int>(column - origin) : -1;
  }

  // Marks the classes of a window that have entries, and returns true if there are any.
  __device__ bool mark(const Marks& marks, EntryRange range, int64_t origin) const {
    Group::sync();  // the marks of the previous window may still be in use
    marks.clear();
    Group::sync();
    bool none = true;
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int place = place_of(args_.target.template entry<acc_t>(i).column, origin);
      if (place < 0) continue;
      marks.mark(place);
      none = false;
    }
    Group::sync();
    return !Group::all(none);
  }

  // Evaluates the classes of a window that have no entries, first those that fill no pack.
  __device__ __forceinline__ void dense(const Marks& marks, int64_t origin, bool marked) {
    constexpr int kStep = kWidth * kSize;
    const int low = origin < begin_ ? static_cast<int>(begin_ - origin) : 0;
    const int high = end_ - origin < kPlaces ? static_cast<int>(end_ - origin) : kPlaces;
    int first = (low + kSize - 1) / kSize * kSize, last = high / kSize * kSize;
    if (first > high) first = high;
    if (last < first) last = first;
    if constexpr (kSize > 1) {
      static_assert(2 * (kSize - 1) <= kWidth, "each thread evaluates at most one class");
      const int of_first = low + Group::rank(), of_last = of_first - first + last;
      const int single = of_first < first ? of_first : of_last;
      if (single < high && !(marked && marks.any(single, 1))) evaluate_one(origin + single, acc_t(0));
    }
    int width = common_width(row_, gradient_);
    // The compiler must not compute these in each step.
    const scalar_t* from = row_ + origin;
    scalar_t* to = stores_ ? gradient_ + origin : nullptr;
    if (kSoftplus) hide(from), hide(to), hide(width);
    int place = first + Group::rank() * kSize;
    word_t next{};
    if (kLoadsEarly && place < last) next = load_word(from + place);
#pragma unroll 1
    for (; place < last; place += kStep) {
      if (!kLoadsEarly) next = load_word(from + place);
      pack_t pack;
      std::memcpy(&pack, &next, sizeof(pack));
      if (kLoadsEarly && place + kStep < last) next = load_word(from + (place + kStep));
      const unsigned skipped = marked ? marks.any(place, kSize) : 0u;
      SoftplusSum<acc_t> softplus;
      acc_t loss = 0;
      Pack<scalar_t, kPart> parts[kSize / kPart];
      std::memcpy(parts, &pack, sizeof(pack));
#pragma unroll
      for (int u = 0; u < kSize / kPart; ++u)
        loss += evaluate_part(origin + place + u * kPart, skipped >> (u * kPart), parts[u], softplus);
      loss_.add(kSoftplus ? softplus.total() : loss);
      if (!stores_) continue;
      std::memcpy(&pack, parts, sizeof(pack));
      if constexpr (kSize == 1)
        pack.store(to + place);
      else
        pack.store(to + place, width);
    }
  }

  // Evaluates some classes of a pack, and replaces their logits by gradients, except those of classes that are skipped.
  // Returns the loss, or adds it to `softplus`.
  __device__ __forceinline__ acc_t evaluate_part(int64_t column, unsigned skipped, Pack<scalar_t, kPart>& part,
                                                 SoftplusSum<acc_t>& softplus) {
    acc_t x[kPart], z[kPart], slope[kPart], loss = 0;
    to_numbers(part, x);
#pragma unroll
    for (int e = 0; e < kPart; ++e) z[e] = multiply_add(scale_, x[e], shift_);
    if (kSoftplus && skipped != 0) {
#pragma unroll
      for (int e = 0; e < kPart; ++e)
        if (skipped >> e & 1u) z[e] = -acc_t(INFINITY);  // has loss and slope 0
    }
    if constexpr (kSoftplus) {
#pragma unroll
      for (int e = 0; e < kPart; ++e) slope[e] = softplus.add(z[e]);
    } else if ((skipped & 1u) == 0) {
      const auto terms = of_class_.at(z[0]);
      const auto c = args_.template coefficients<acc_t>(column, acc_t(0));
      loss = kAlike ? terms.negative : c.loss(terms), slope[0] = kAlike ? terms.negative_slope : c.slope(terms);
    } else {
      slope[0] = 0;
    }
    if (args_.grad_affine) add_slopes(x, slope);
    if (!stores_) return loss;
#pragma unroll
    for (acc_t& of_one : slope) of_one *= factor_;
    Pack<scalar_t, kPart> out;
    from_numbers(slope, out);
    if (skipped != 0) {
#pragma unroll
      for (int e = 0; e < kPart; ++e)
        if (skipped >> e & 1u) out.at[e] = part.at[e];
    }
    part = out;
    return loss;
  }

  // Evaluates a class with the sum of its entries.
  __device__ __forceinline__ void evaluate_one(int64_t column, acc_t sum) {
    const acc_t x[1] = {to_acc(row_[column])};
    const auto terms = of_class_.at(multiply_add(scale_, x[0], shift_));
    const auto c = args_.template coefficients<acc_t>(column, sum);
    const acc_t slope[1] = {c.slope(terms)};
    loss_.add(c.loss(terms));
    if (args_.grad_affine) add_slopes(x, slope);
    if (stores_) from_acc(factor_ * slope[0], gradient_[column]);
  }

  // Adds slopes to the sums for scale and shift. A logit of -inf has the slope 0 as a negative class.
  template <int n>
  __device__ __forceinline__ void add_slopes(const acc_t (&x)[n], const acc_t (&slope)[n]) {
    acc_t of_scale = 0, of_shift = 0;
#pragma unroll
    for (int e = 0; e < n; ++e) of_scale += expected(slope[e], x[e]), of_shift += slope[e];
    of_scale_.add(of_scale), of_shift_.add(of_shift);
  }

  // Evaluates the classes of a window that have entries.
  __device__ __forceinline__ void entries(const Marks& marks, EntryRange range, int64_t origin) {
    const auto add = [&](int place, acc_t sum) { evaluate_one(origin + place, sum); };
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const auto entry = args_.target.template entry<acc_t>(i);
      const int place = place_of(entry.column, origin);
      if (place >= 0 && !marks.several(place)) add(place, entry.value);
    }
    if (range.end - range.begin == 1 || Group::all(!marks.any_several())) return;
    RepeatedEntries<kWidth, acc_t>(args_.target, range, origin, marks).for_each_class(kPlaces, add);
  }

  const BinaryArgs& args_;
  const BinaryLoss<kind, acc_t>& of_class_;
  const scalar_t* row_;
  scalar_t* gradient_;
  const int64_t begin_, end_;
  const acc_t scale_, shift_, factor_;
  const bool stores_;
  LongSum<acc_t> loss_, of_scale_, of_shift_;
};

}  // namespace cuda
}  // namespace sparse_ce
