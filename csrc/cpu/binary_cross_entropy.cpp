// Processes each row in spans of columns, and reads each logit once, since classes are independent. A separate loop
// processes runs of classes without entries.
#include "../ops/binary_cross_entropy.h"
#include "rows/binary_classes.h"
#include "rows/row_entries.h"
#include "rows/row_loops.h"
#include "simd/avx512_binary.h"
#include "simd/convert.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kFew = 16;  // entries of a block that are processed one by one

// Sums over classes. Those of a part are added in the arithmetic dtype.
struct Sums {
  double loss = 0, of_scale = 0, of_shift = 0;

  void merge(const Sums& other) {
    loss += other.loss;
    of_scale += other.of_scale;
    of_shift += other.of_shift;
  }
};

template <typename scalar_t>
class Rows {
  using acc_t = acc_type<scalar_t>;
  static constexpr int64_t kBlock = 4 * (4096 + 128) / sizeof(scalar_t);  // as in avx512_columns.h

 public:
  // Holds what the spans of a row share: the sum of the entries of each class that has any, by ascending class.
  struct Row {
    bool ignored = false;
    acc_t grad = 0;
    std::vector<std::pair<int64_t, acc_t>> entries;
  };

  explicit Rows(const BinaryArgs& args)
      : args_(args), unweighted_(args.target), scale_(args.scale<acc_t>()), shift_(args.shift<acc_t>()),
        negative_(args.binary.label_smoothing == 0 && !args.grad_affine && scale_ != acc_t(0)),
        nontemporal_(args.grad_logits &&
                     use_nontemporal(args.logits, args.grad_logits, args.rows * columns(), sizeof(scalar_t))) {
    unweighted_.weight = nullptr;
  }

  int64_t columns() const { return args_.vocab - args_.first_class; }
  int64_t spans() const { return std::max<int64_t>(1, divide_up(columns(), kSpan)); }

  void begin(int64_t r, RowEntries<acc_t>& entries, Row& row) const {
    row.ignored = args_.target.ignored(r);
    row.grad = args_.grad_loss && !row.ignored ? args_.grad_output<acc_t>(r) : acc_t(0);
    row.entries.clear();
    if (row.ignored) return;
    entries.collect(unweighted_, r);
    entries.arrange(args_, static_cast<size_t>(spans()));
    for (size_t k = 0; k < entries.size(); ++k) row.entries.push_back({entries.columns[k], entries.weights[k]});
    const auto before = [](const auto& a, const auto& b) { return a.first < b.first; };
    if (!std::is_sorted(row.entries.begin(), row.entries.end(), before))
      std::sort(row.entries.begin(), row.entries.end(), before);
  }

  // Processes a span of a row: returns its sums, and writes its gradient.
  Sums span(int64_t r, int64_t t, const Row& row) const {
    const int64_t begin = args_.first_class + t * kSpan, end = std::min(begin + kSpan, args_.vocab);
    const int64_t classes_end = row.ignored ? begin : std::clamp(args_.classes_end(), begin, end);
    const scalar_t* x = args_.row<scalar_t>(r);
    scalar_t* to = args_.grad_logits ? args_.gradient_row<scalar_t>(r) : nullptr;
    Sums sums;
    auto next = std::lower_bound(row.entries.begin(), row.entries.end(), begin,
                                 [](const auto& entry, int64_t column) { return entry.first < column; });
    for (int64_t column = begin; column < classes_end; column += kBlock) {
      const int64_t stop = std::min(column + kBlock, classes_end);
      const auto first = next;
      while (next != row.entries.end() && next->first < stop) ++next;
      if (negative_ && next - first <= kFew)
        sums.loss += block(x, column, stop, row.grad, to, first, next);
      else
        any_classes(x, column, stop, row.grad, to, first, next, sums);
    }
    if (to) {
      if (row.grad == acc_t(0)) classes_clear(to, begin, classes_end);
      classes_clear(to, classes_end, end);
    }
    return sums;
  }

  void write(int64_t r, const Row& row, const Sums& sums) const {
    static_cast<acc_t*>(args_.loss)[r] = static_cast<acc_t>(sums.loss);
    if (!args_.grad_affine) return;
    acc_t* affine = static_cast<acc_t*>(args_.grad_affine) + 2 * r;
    affine[0] = row.grad == acc_t(0) ? acc_t(0) : static_cast<acc_t>(row.grad * sums.of_scale);
    affine[1] = row.grad == acc_t(0) ? acc_t(0) : static_cast<acc_t>(row.grad * sums.of_shift);
  }

 private:
  static void classes_clear(scalar_t* to, int64_t begin, int64_t end) {
    if (begin < end)
      std::memset(static_cast<void*>(to + begin), 0, static_cast<size_t>(end - begin) * sizeof(scalar_t));
  }

  using Entries = typename std::vector<std::pair<int64_t, acc_t>>::const_iterator;

  // Returns the loss of a block of classes, of which the entries [first, last) are not only negative. The others are
  // processed as if the logits of the entries were -inf, which adds nothing.
  double block(const scalar_t* x, int64_t begin, int64_t end, acc_t grad, scalar_t* to, Entries first,
               Entries last) const {
    scalar_t* const gradient = to ? to + begin : nullptr;
    if (first == last) return negatives(x + begin, x + begin, begin, end - begin, grad, gradient);
    scalar_t logits[kBlock];
    std::copy(x + begin, x + end, logits);
    acc_t slopes[kFew];
    double loss = 0;
    for (auto entry = first; entry != last; ++entry) {
      const auto terms = terms_at(scale_ * static_cast<acc_t>(to_acc(x[entry->first])) + shift_);
      const auto by = args_.template coefficients<acc_t>(entry->first, entry->second);
      loss += by.loss(terms);
      slopes[entry - first] = by.slope(terms);
      from_acc(scale_ < acc_t(0) ? acc_t(INFINITY) : -acc_t(INFINITY), logits[entry->first - begin]);
    }
    loss += negatives(logits, x + begin, begin, end - begin, grad, gradient);
    for (auto entry = first; gradient && grad != acc_t(0) && entry != last; ++entry)
      from_acc(slopes[entry - first] * (grad * scale_), to[entry->first]);
    return loss;
  }

  BinaryTerms<acc_t> terms_at(acc_t z) const {
    return with_loss<acc_t>(args_.binary, [&](const auto& of) { return of.at(z); });
  }
  // Processes classes with any factors.
  void any_classes(const scalar_t* x, int64_t begin, int64_t end, acc_t grad, scalar_t* to, Entries next, Entries last,
                   Sums& sums) const {
    for (int64_t column = begin; column < end; column += kPart) {
      const int64_t n = std::min(kPart, end - column);
      BinaryClasses<acc_t> classes;
      set_factors(classes, column, n);
      for (; next != last && next->first < column + n; ++next) {
        const auto by = args_.template coefficients<acc_t>(next->first, next->second);
        classes.negative[next->first - column] = by.negative, classes.positive[next->first - column] = by.positive;
      }
      part(x + column, n, grad, to ? to + column : nullptr, classes, sums);
    }
  }

  // Returns the sum of the losses of negative classes from `column` on, at most kBlock. x are the logits of `source`,
  // of which some may be -inf. The same columns take the same instructions wherever the gradient is stored, so that
  // results have the same bits.
  double negatives(const scalar_t* x, const scalar_t* source, int64_t column, int64_t n, acc_t grad,
                   scalar_t* to) const {
    const acc_t factor = grad * scale_;
    if (grad == acc_t(0)) to = nullptr;
    double loss = 0;
    int64_t begin = 0;
#ifdef SCE_X86
    if constexpr (std::is_same_v<acc_t, float>) {
      if (instruction_set_in_use() == InstructionSet::kAvx512 && args_.alike() &&
          binary_kind(args_.binary) == BinaryKind::kPlain) {
        // A gradient that does not start a cache line is stored in a buffer first.
        const bool buffers = to && nontemporal_ && before_line(to, n) > 0;
        alignas(64) scalar_t gradient[kBlock];
        begin = avx512::whole_packs(n);
        loss += avx512::negatives(x, begin, scale_, shift_, factor, source + kSpan,
                                  Destination<scalar_t>{buffers ? gradient : to, nontemporal_ && !buffers});
        if (buffers) stream_copy<InstructionSet::kAvx512>(gradient, begin, to);
      }
    }
#endif
    for (; begin < n; begin += kRun)
      loss += run(x + begin, source + begin + kRun, column + begin, std::min(kRun, n - begin), factor,
                  to ? to + begin : nullptr);
    return loss;
  }

  // Does the same for at most kRun classes. `next` are the logits that are processed next.
  double run(const scalar_t* x, const scalar_t* next, int64_t column, int64_t n, acc_t factor, scalar_t* to) const {
    alignas(64) acc_t logits[kRun], slopes[kRun];
    alignas(64) scalar_t gradient[kRun];
    const acc_t* z =
        with_instruction_set([&](auto set) SCE_INLINE { return widened<decltype(set)::value>(x, n, logits); });
    const acc_t* w = static_cast<const acc_t*>(args_.target.weight);
    if (w) w += column;
    const double loss = with_loss<acc_t>(args_.binary, [&](const auto& of) {
      using loss_t = std::decay_t<decltype(of)>;
      const auto sum = w ? sum_of_negatives<true, loss_t, acc_t> : sum_of_negatives<false, loss_t, acc_t>;
      return sum(of, z, n, scale_, shift_, factor, w, next, sizeof(scalar_t), to ? slopes : nullptr);
    });
    if (!to) return loss;
    with_instruction_set([&](auto set) SCE_INLINE {
      constexpr InstructionSet kSet = decltype(set)::value;
      narrow<kSet>(n, [&](int64_t i) { return slopes[i]; }, slopes, nontemporal_ ? gradient : to);
      if (nontemporal_) stream_copy<kSet>(gradient, n, to);
    });
    return loss;
  }

  // Sets the factors of classes without entries.
  void set_factors(BinaryClasses<acc_t>& classes, int64_t column, int64_t n) const {
    const acc_t* w = static_cast<const acc_t*>(args_.target.weight);
    const acc_t* p = static_cast<const acc_t*>(args_.pos_weight);
    const acc_t target = acc_t(0.5) * static_cast<acc_t>(args_.binary.label_smoothing);
    std::fill_n(classes.negative, n, acc_t(1) - target);
    std::fill_n(classes.positive, n, target);
    with_instruction_set([&](auto) SCE_INLINE {
      acc_t *negative = classes.negative, *positive = classes.positive;
      const auto multiply = [=](acc_t* factors, const acc_t* by) SCE_INLINE {
        if (!by) return;
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) factors[i] *= by[column + i];
      };
      if (target != acc_t(0)) multiply(positive, p), multiply(positive, w);  // 0 times an infinite weight is NaN
      multiply(negative, w);
    });
  }

  void part(const scalar_t* x, int64_t n, acc_t grad, scalar_t* to, BinaryClasses<acc_t>& classes, Sums& sums) const {
    with_instruction_set([&](auto) SCE_INLINE {
      acc_t* to_x = classes.x;
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) to_x[i] = static_cast<acc_t>(to_acc(x[i]));
    });
    with_loss<acc_t>(args_.binary, [&](const auto& of) { classes.evaluate(of, scale_, shift_, n); });
    const acc_t *loss = classes.loss, *slope = classes.slope, *of_x = classes.x;
    sums.loss += sum_of(n, [=](int64_t i) SCE_INLINE { return loss[i]; });
    if (grad == acc_t(0)) return;
    if (args_.grad_affine) {
      sums.of_scale += sum_of(n, [=](int64_t i) SCE_INLINE { return expected(slope[i], of_x[i]); });
      sums.of_shift += sum_of(n, [=](int64_t i) SCE_INLINE { return slope[i]; });
    }
    if (!to) return;
    with_instruction_set([&](auto) SCE_INLINE {
      const acc_t factor = grad * scale_;
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) from_acc(slope[i] * factor, to[i]);
    });
  }

  const BinaryArgs& args_;
  TargetView unweighted_;
  const acc_t scale_, shift_;
  const bool negative_, nontemporal_;  // negative_ is true if classes without entries are negative
};

template <typename scalar_t>
void run(const BinaryArgs& args) {
  using Row = typename Rows<scalar_t>::Row;
  const Rows<scalar_t> rows(args);
  const int64_t spans = rows.spans();
  if (!split_rows(args.rows, spans)) {
    parallel_rows(args.rows, rows.columns(), [&](int64_t begin, int64_t end) {
      RowEntries<acc_type<scalar_t>> entries;
      Row row;
      for (int64_t r = begin; r < end; ++r) {
        rows.begin(r, entries, row);
        Sums sums;
        for (int64_t t = 0; t < spans; ++t) sums.merge(rows.span(r, t, row));
        rows.write(r, row, sums);
      }
    });
    return;
  }
  std::vector<Row> each(static_cast<size_t>(args.rows));
  std::vector<Sums> partial(static_cast<size_t>(args.rows * spans));
  RowEntries<acc_type<scalar_t>> entries;
  for (int64_t r = 0; r < args.rows; ++r) rows.begin(r, entries, each[static_cast<size_t>(r)]);
  parallel_spans(args.rows, spans, [&](int64_t r, int64_t t) {
    partial[static_cast<size_t>(r * spans + t)] = rows.span(r, t, each[static_cast<size_t>(r)]);
  });
  for (int64_t r = 0; r < args.rows; ++r) {
    Sums sums;
    for (int64_t t = 0; t < spans; ++t) sums.merge(partial[static_cast<size_t>(r * spans + t)]);
    rows.write(r, each[static_cast<size_t>(r)], sums);
  }
}

}  // namespace

void binary_cross_entropy(const BinaryArgs& args) {
  with_storage(args.dtype, [&](auto storage) { run<decltype(storage)>(args); });
}

}  // namespace cpu
}  // namespace sparse_ce
