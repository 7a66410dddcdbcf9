// row_passes.h - Computes the loss and then the gradient of a row, or of a part of it.
#pragma once

#include "../../ops/cross_entropy.h"
#include "../simd/tile.h"
#include "row_entries.h"

#include <algorithm>

namespace sparse_ce {
namespace cpu {

// Prefetches the entries of a row that are collected soon.
inline void prefetch_entries(const TargetView& target, int64_t r) {
  const auto prefetch = [](const void* array, int64_t begin, int64_t end) {
    for (int64_t byte = begin; byte < end; byte += kLine) __builtin_prefetch(static_cast<const char*>(array) + byte);
  };
  const EntryRange range = target.row(r);
  const int64_t index_size = size_of(target.indices_dtype), value_size = size_of(target.values_dtype);
  prefetch(target.indices, range.begin * index_size, range.end * index_size);
  if (target.values) prefetch(target.values, range.begin * value_size, range.end * value_size);
}

template <typename scalar_t>
const acc_type<scalar_t>* weights_at(const TargetView& target, int64_t column) {
  const auto* weight = static_cast<const acc_type<scalar_t>*>(target.weight);
  return weight ? weight + column : nullptr;
}

// Determines where the gradients of rows are written, and with which stores.
template <typename scalar_t>
class Destinations {
 public:
  explicit Destinations(const BackwardArgs& args)
      : args_(args),
        nontemporal_(use_nontemporal(args.logits, args.grad_logits, args.rows * columns(), sizeof(scalar_t))) {}

  bool nontemporal() const { return nontemporal_; }
  Destination<scalar_t> row(int64_t r, size_t entries) const {
    return {args_.gradient_row<scalar_t>(r), nontemporal_ && worth_it<scalar_t>(columns(), entries)};
  }

 private:
  int64_t columns() const { return args_.vocab - args_.first_class; }

  const BackwardArgs& args_;
  const bool nontemporal_;
};

// The gradient of longer rows is written after they have left the caches, so their exponentials are computed twice.
constexpr int64_t kLongestStored = int64_t(1) << 20;

// Threads process whole rows or spans of kSpan columns. Both use the same spans and merge them in the same order, so
// the result does not depend on the number of threads.
template <typename scalar_t>
class Forward {
  using acc_t = acc_type<scalar_t>;

 public:
  explicit Forward(const ForwardArgs& args)
      : args_(args), columns_(args.target.num_classes), spans_(divide_up(columns_, kSpan)),
        keeps_(!args.row_scale && args.rows > 0 && keeps_row(0)) {}

  int64_t spans() const { return spans_; }
  bool ignored(int64_t r) const { return args_.target.ignored(r); }
  // Returns true if storing a row's exponentials for its gradient pays off.
  bool keeps(int64_t r) const { return args_.row_scale ? keeps_row(r) : keeps_; }

  // Computes a row. `after` is the row that is read next. `entries` receives the entries of an active row with their
  // logits. `stored` receives its exponentials, which may overwrite the logits.
  void write(int64_t r, int64_t after, RowEntries<acc_t>& entries, const Exps<acc_t>& stored = {}) const {
    prefetch_entries(args_.target, r);
    RowStats<acc_t> stats;
    if (ignored(r)) return sum(r, stats, entries);
    const bool overwrites = static_cast<const void*>(stored.exps) == row(r);
    if (overwrites) collect(r, entries);
    for (int64_t t = 0; t < spans_; ++t) stats.merge(span(r, t, after, stored.from(t * kSpan)));
    if (!overwrites) collect(r, entries);  // the logits are in a cache now
    sum(r, stats, entries);
  }

  RowStats<acc_t> span(int64_t r, int64_t t, int64_t after, const Exps<acc_t>& stored = {}) const {
    const int64_t column = t * kSpan;
    const scalar_t* next = t + 1 < spans_ ? row(r) + column + kSpan : row(after);
    return Tile<scalar_t>::stats(row(r) + column, std::min(kSpan, columns_ - column),
                                 args_.template transform<acc_t>(r), args_.options.label_smoothing != 0,
                                 weights_at<scalar_t>(args_.target, column), next, stored);
  }

  void collect(int64_t r, RowEntries<acc_t>& entries) const {
    entries.collect(args_.target, r);
    entries.logits.resize(entries.size());
    entries.gather(row(r), 0, entries.size());
  }

  // Adds the collected entries and writes the outputs of the row.
  void sum(int64_t r, const RowStats<acc_t>& stats, RowEntries<acc_t>& entries) const {
    const bool none = ignored(r);
    args_.write(r, none, stats,
                none ? TargetStats<acc_t>{} : entries.sums(stats.max, args_.template transform<acc_t>(r)));
  }

 private:
  const scalar_t* row(int64_t r) const { return args_.template row<scalar_t>(r); }

  bool keeps_row(int64_t r) const {
    return args_.vocab <= kLongestStored && Tile<scalar_t>::keeps(args_.template transform<acc_t>(r));
  }

  const ForwardArgs& args_;
  const int64_t columns_, spans_;
  const bool keeps_;
};

template <typename scalar_t>
class Backward {
  using acc_t = acc_type<scalar_t>;

 public:
  // Holds the plan of a row's gradient. The logits at its entries are read before the dense pass over their span, which
  // may overwrite them and then finds them in the L2 cache. The gradient at the entries is written last and is rounded
  // to storage once, so p - 1 with p close to 1 keeps its digits in 16 bits.
  struct RowPlan {
    bool zero, gathered;
    GradientCoefficients<acc_t> coefficients;
    RowEntries<acc_t> entries;
  };

  explicit Backward(const BackwardArgs& args)
      : args_(args), classes_end_(args.classes_end()), spans_(divide_up(args.vocab - args.first_class, kSpan)),
        destinations_(args) {}

  int64_t spans() const { return spans_; }
  // Returns true if the gradient from stored exponentials uses non-temporal stores.
  bool stores_nontemporal() const { return destinations_.nontemporal() && worth_it_of_stored<scalar_t>(); }
  RowPlan empty_plan() const { return {true, false, {0, 0, 0, 0, 0, 0, args_.options, classes_end_}, {}}; }

  // Writes the gradient of a row. `after` is the row that is read next. `plan` is working memory; it holds the row's
  // entries if Forward has `collected` them.
  void write(int64_t r, int64_t after, bool collected, RowPlan& plan) const {
    prefetch_entries(args_.target, after);
    make_plan(r, collected, plan);
    for (int64_t t = 0; t < spans_; ++t) write_span(r, t, after, plan);
    write_entries(r, plan);
  }

  // Writes the gradient from the exponentials that Forward stored, without the logits.
  void write_stored(int64_t r, const Exps<acc_t>& stored, RowPlan& plan) const {
    plan.zero = args_.template without_gradient<acc_t>(r);
    const int64_t nonzero_end = plan.zero ? 0 : classes_end_;
    scalar_t* gradient = args_.template gradient_row<scalar_t>(r);
    std::fill(reinterpret_cast<char*>(gradient + nonzero_end), reinterpret_cast<char*>(gradient + args_.vocab), 0);
    if (plan.zero) return;
    plan.coefficients = args_.coefficients(r, plan.entries.mass());
    plan.entries.merge_repeated();
    Destination<scalar_t> to = destinations_.row(r, plan.entries.size());
    to.nontemporal = to.nontemporal && stores_nontemporal();
    Tile<scalar_t>::gradient(stored, nonzero_end, args_.template transform<acc_t>(r),
                             args_.options.label_smoothing != 0, plan.coefficients,
                             weights_at<scalar_t>(args_.target, 0), to);
    write_entries(r, plan);
  }

  void make_plan(int64_t r, bool collected, RowPlan& plan) const {
    RowEntries<acc_t>& entries = plan.entries;
    plan.zero = args_.template without_gradient<acc_t>(r);
    if (plan.zero) return entries.clear();
    if (!collected) entries.collect(args_.target, r);
    plan.coefficients = args_.coefficients(r, entries.mass());
    plan.gathered = collected;
    entries.arrange(args_, spans_, collected);
  }

  // Writes every element of the span: zeros for an ignored row and for columns beyond the classes.
  void write_span(int64_t r, int64_t t, int64_t after, RowPlan& plan) const {
    const int64_t begin = args_.first_class + t * kSpan, end = std::min(begin + kSpan, args_.vocab);
    const int64_t nonzero_end = plan.zero ? begin : std::max(begin, std::min(end, classes_end_));
    const scalar_t* next = t + 1 < spans_ ? row(r) + end : row(after);
    scalar_t* gradient = args_.template gradient_row<scalar_t>(r);
    if (nonzero_end > begin) {
      const auto transform = args_.template transform<acc_t>(r);
      if (!plan.gathered) plan.entries.gather(row(r), plan.entries.span_begin(t), plan.entries.span_begin(t + 1));
      Tile<scalar_t>::gradient(row(r) + begin, nonzero_end - begin, transform, args_.options.label_smoothing != 0,
                               plan.coefficients, weights_at<scalar_t>(args_.target, begin), next,
                               destinations_.row(r, plan.entries.size()).from(begin));
    }
    std::fill(reinterpret_cast<char*>(gradient + nonzero_end), reinterpret_cast<char*>(gradient + end), 0);
  }

  void write_entries(int64_t r, RowPlan& plan) const {
    RowEntries<acc_t>& entries = plan.entries;
    scalar_t* gradient = args_.template gradient_row<scalar_t>(r);
    for (const int64_t column : entries.columns) __builtin_prefetch(gradient + column, 1);
    Tile<scalar_t>::entries(entries.logits.data(), entries.size(), args_.template transform<acc_t>(r),
                            plan.coefficients, entries.class_weights.empty() ? nullptr : entries.class_weights.data(),
                            entries.weights.data(), entries.elsewhere);
    constexpr size_t kTogether = 64;  // rounded in vectors
    scalar_t rounded[kTogether];
    for (size_t begin = 0; begin < entries.size(); begin += kTogether) {
      const size_t count = std::min(kTogether, entries.size() - begin);
      SCE_SIMD()
      for (size_t k = 0; k < count; ++k) from_acc(entries.logits[begin + k], rounded[k]);
      for (size_t k = 0; k < count; ++k) gradient[entries.columns[begin + k]] = rounded[k];
    }
  }

  // Writes the gradient for the values of the row's entries. Reads only the logits at the entries.
  void write_values(int64_t r) const {
    if (args_.target.ignored(r)) return;
    const GradientCoefficients<acc_t> c = args_.coefficients(r, acc_t(0));
    const auto transform = args_.template transform<acc_t>(r);
    const EntryRange range = args_.target.row(r);
    for (int64_t i = range.begin; i < range.end; ++i) args_.write_value(i, row(r), transform, c);
  }

 private:
  const scalar_t* row(int64_t r) const { return args_.template row<scalar_t>(r); }

  const BackwardArgs& args_;
  const int64_t classes_end_, spans_;
  const Destinations<scalar_t> destinations_;
};

}  // namespace cpu
}  // namespace sparse_ce
