#include "../cross_entropy.h"
#include "tile.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

// Fewer logits than this are not worth waking a thread for.
constexpr int64_t kGrain = 16384;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows are shared out whole while there are enough of them; a few long rows are shared out by parts. Both orders work
// on the same parts and merge them in the same sequence, so the result does not depend on the number of threads.
bool split_rows(int64_t rows, int64_t parts) { return rows < int64_t(torch::stable::get_num_threads()) && parts > 1; }

template <typename function_t>
void parallel_rows(int64_t rows, int64_t columns, const function_t& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, rows, grain, f);
}

// Asks for the entries of a row that will soon be collected.
void prefetch_entries(const TargetView& target, int64_t r) {
  const auto prefetch = [](const void* array, int64_t begin, int64_t end) {
    constexpr int64_t kLine = 64;
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

// The entries of a row as arrays, padding left out: each step over them is a loop of independent iterations.
template <typename acc_t>
class RowEntries {
 public:
  std::vector<int64_t> columns;
  std::vector<acc_t> class_weights;  // o, empty where there are no class weights
  std::vector<acc_t> weights;        // w~
  std::vector<acc_t> logits;         // transformed; in backward then the gradient

  size_t size() const { return columns.size(); }

  void clear() { resize(0); }

  void collect(const TargetView& target, int64_t r) {
    const EntryRange range = target.row(r);
    const size_t most = static_cast<size_t>(range.end - range.begin);
    columns.resize(most);
    weights.resize(most);
    size_t kept = 0;
    const auto keep = [&](const Entry<acc_t>& entry) {  // an index out of range was refused before
      columns[kept] = entry.column;
      weights[kept] = entry.value;
      kept += entry.column >= 0;
    };
    with_index(target.indices_dtype, [&](auto index) {
      const auto* indices = static_cast<const decltype(index)*>(target.indices);
      if (!target.values) {
        for (int64_t i = range.begin; i < range.end; ++i) keep(target.entry_of(indices[i], acc_t(1)));
        return;
      }
      with_storage(target.values_dtype, [&](auto storage) {
        const auto* values = static_cast<const decltype(storage)*>(target.values);
        for (int64_t i = range.begin; i < range.end; ++i)
          keep(target.entry_of(indices[i], static_cast<acc_t>(to_acc(values[i]))));
      });
    });
    resize(kept);
    if (target.weight) {
      class_weights.resize(kept);
      for (size_t k = 0; k < kept; ++k) {
        class_weights[k] = target.template class_weight<acc_t>(columns[k]);
        weights[k] *= class_weights[k];
      }
    }
  }

  // Adds up the weights of equal columns, in the order of their entries so that sums are reproducible, and orders the
  // entries by span. Where columns ascend, as in COO and CSR, both are done.
  void arrange(size_t spans) {
    bool ascending = true;
    for (size_t k = 1; k < size(); ++k) ascending &= columns[k - 1] < columns[k];
    if (!ascending && may_repeat()) merge_duplicates();
    span_begin_.assign(spans + 1, 0);
    for (const int64_t column : columns) ++span_begin_[span_of(column) + 1];
    for (size_t t = 1; t <= spans; ++t) span_begin_[t] += span_begin_[t - 1];
    if (!ascending && spans > 1) order_by_span();
    logits.resize(size());
  }

  // In four sums, because one would wait for each addition.
  acc_t mass() const {
    constexpr size_t kSums = 4;
    acc_t sums[kSums] = {};
    size_t k = 0;
    for (; k + kSums <= size(); k += kSums)
      for (size_t i = 0; i < kSums; ++i) sums[i] += weights[k + i];
    for (; k < size(); ++k) sums[0] += weights[k];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  size_t span_begin(size_t t) const { return span_begin_[t]; }

  template <typename scalar_t>
  void gather(const scalar_t* row, const LogitTransform<acc_t>& transform, size_t begin, size_t end) {
    for (size_t k = begin; k < end; ++k) logits[k] = to_acc(row[columns[k]]);
    if (transform.identity()) return;
    for (size_t k = begin; k < end; ++k) logits[k] = transform(logits[k]);
  }

 private:
  static size_t span_of(int64_t column) { return static_cast<uint64_t>(column) / kSpan; }

  void resize(size_t count) {
    columns.resize(count);
    weights.resize(count);
    if (!class_weights.empty()) class_weights.resize(count);
  }

  // False where no column comes twice, as nearly always: a bit for each column modulo 65536.
  bool may_repeat() {
    constexpr size_t kWords = 1024;
    marks_.resize(kWords);
    const auto word = [this](int64_t column) -> uint64_t& {
      return marks_[static_cast<uint64_t>(column) / 64 % kWords];
    };
    uint64_t repeated = 0;
    for (const int64_t column : columns) {
      const uint64_t bit = uint64_t(1) << (column & 63);
      repeated |= word(column) & bit;
      word(column) |= bit;
    }
    for (const int64_t column : columns) word(column) = 0;
    return repeated != 0;
  }

  // By a table of the columns seen: without sorting, and without memory of the vocabulary's size.
  void merge_duplicates() {
    const size_t count = size();
    size_t slots = 8;
    while (slots < 4 * count) slots *= 2;
    if (seen_.size() < slots) seen_.assign(slots, Seen{0, 0});
    const size_t mask = seen_.size() - 1;
    ++row_;
    size_t kept = 0;
    for (size_t k = 0; k < count; ++k) {
      size_t slot = (static_cast<uint64_t>(columns[k]) * 0x9e3779b97f4a7c15u >> 32) & mask;
      while (seen_[slot].row == row_ && columns[seen_[slot].position] != columns[k]) slot = (slot + 1) & mask;
      if (seen_[slot].row == row_) {
        weights[seen_[slot].position] += weights[k];
        continue;
      }
      seen_[slot] = {row_, kept};
      columns[kept] = columns[k];
      if (!class_weights.empty()) class_weights[kept] = class_weights[k];
      weights[kept++] = weights[k];
    }
    resize(kept);
  }

  // A counting sort.
  void order_by_span() {
    position_.resize(size());
    cursor_ = span_begin_;
    for (size_t k = 0; k < size(); ++k) position_[k] = cursor_[span_of(columns[k])]++;
    const auto move = [this](auto& array, auto& scratch) {
      scratch.resize(array.size());
      for (size_t k = 0; k < array.size(); ++k) scratch[position_[k]] = array[k];
      array.swap(scratch);
    };
    move(columns, moved_columns_);
    move(weights, moved_weights_);
    move(class_weights, moved_weights_);
  }

  struct Seen {
    size_t row;       // of another row: the slot is free
    size_t position;  // in columns
  };
  std::vector<Seen> seen_;
  size_t row_ = 0;
  std::vector<uint64_t> marks_;  // all 0 between calls
  std::vector<size_t> span_begin_, cursor_, position_;
  std::vector<int64_t> moved_columns_;
  std::vector<acc_t> moved_weights_;
};

template <typename scalar_t>
class Forward {
  using acc_t = acc_type<scalar_t>;

 public:
  explicit Forward(const ForwardArgs& args)
      : args_(args), columns_(args.target.num_classes), spans_(divide_up(columns_, kSpan)), transform_(args.options) {}

  void run() const {
    if (!split_rows(args_.rows, spans_)) {
      parallel_rows(args_.rows, columns_, [this](int64_t begin, int64_t end) {
        RowEntries<acc_t> entries;
        for (int64_t r = begin; r < end; ++r) {
          prefetch_entries(args_.target, r);
          RowStats<acc_t> stats;
          if (!args_.target.ignored(r))
            for (int64_t t = 0; t < spans_; ++t) stats.merge(span(r, t, std::min(r + 1, end - 1)));
          finish(r, stats, entries);
        }
      });
      return;
    }
    std::vector<RowStats<acc_t>> partial(args_.rows * spans_);
    torch::stable::parallel_for(0, args_.rows * spans_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        if (!args_.target.ignored(i / spans_)) partial[i] = span(i / spans_, i % spans_, i / spans_);
    });
    RowEntries<acc_t> entries;
    for (int64_t r = 0; r < args_.rows; ++r) {
      RowStats<acc_t> stats;
      for (int64_t t = 0; t < spans_; ++t) stats.merge(partial[r * spans_ + t]);
      finish(r, stats, entries);
    }
  }

 private:
  const scalar_t* row(int64_t r) const { return static_cast<const scalar_t*>(args_.logits) + r * args_.row_stride; }

  // `after` is the row that will follow this one.
  RowStats<acc_t> span(int64_t r, int64_t t, int64_t after) const {
    const int64_t column = t * kSpan;
    const scalar_t* next = t + 1 < spans_ ? row(r) + column + kSpan : row(after);
    const bool weighted = args_.options.label_smoothing != 0;
    return tile_kernels<scalar_t>().stats(row(r) + column, std::min(kSpan, columns_ - column), transform_, weighted,
                                          weights_at<scalar_t>(args_.target, column), next);
  }

  void finish(int64_t r, const RowStats<acc_t>& stats, RowEntries<acc_t>& entries) const {
    acc_t* loss = static_cast<acc_t*>(args_.loss);
    acc_t* lse = static_cast<acc_t*>(args_.lse);
    acc_t* residual = static_cast<acc_t*>(args_.lse_residual);
    if (args_.target.ignored(r)) {
      loss[r] = lse[r] = acc_t(0);
      if (residual) residual[r] = acc_t(0);
      return;
    }
    entries.collect(args_.target, r);
    entries.logits.resize(entries.size());
    entries.gather(row(r), transform_, 0, entries.size());
    TargetStats<acc_t> target;
    for (size_t k = 0; k < entries.size(); ++k) {
      const acc_t w = entries.weights[k];
      // A class of weight 0 at a -inf logit adds 0, not 0 * inf.
      if (w != acc_t(0)) target.merge({w * (entries.logits[k] - stats.max), w});
    }
    const RowLoss<acc_t> out(stats, target, args_.options, columns_);
    loss[r] = out.loss;
    lse[r] = out.lse;
    if (residual) residual[r] = out.lse_residual;
  }

  const ForwardArgs& args_;
  const int64_t columns_, spans_;
  const LogitTransform<acc_t> transform_;
};

template <typename scalar_t>
class Backward {
  using acc_t = acc_type<scalar_t>;

  // The logits where a row has entries are read before the dense pass over their span, which may overwrite them and
  // finds them in the second cache; the gradient there is written when the row is done: rounded to storage once, so
  // p - 1 near p = 1 keeps its digits in 16 bits.
  struct RowPlan {
    bool zero;
    GradientCoefficients<acc_t> coefficients;
    RowEntries<acc_t> entries;
  };

 public:
  explicit Backward(const BackwardArgs& args)
      : args_(args), columns_(args.target.num_classes), spans_(divide_up(args.vocab, kSpan)), transform_(args.options) {
    weight_sum_ = args.weight_sum ? *static_cast<const acc_t*>(args.weight_sum) : static_cast<acc_t>(columns_);
  }

  void run() const {
    if (!split_rows(args_.rows, spans_)) {
      parallel_rows(args_.rows, columns_, [this](int64_t begin, int64_t end) {
        RowPlan plan{true, coefficients(0, acc_t(0)), {}};
        // Backwards: the rows that forward read last may still be in a cache.
        for (int64_t r = end - 1; r >= begin; --r) {
          const int64_t after = std::max(begin, r - 1);
          prefetch_entries(args_.target, after);
          make_plan(r, plan);
          for (int64_t t = 0; t < spans_; ++t) write_span(r, t, plan, after);
          write_entries(r, plan);
        }
      });
      return;
    }
    std::vector<RowPlan> plans(args_.rows, RowPlan{true, coefficients(0, acc_t(0)), {}});
    for (int64_t r = 0; r < args_.rows; ++r) make_plan(r, plans[r]);
    torch::stable::parallel_for(0, args_.rows * spans_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = i / spans_;
        write_span(r, i % spans_, plans[r], r);
      }
    });
    for (int64_t r = 0; r < args_.rows; ++r) write_entries(r, plans[r]);
  }

  // d loss / d w_k of every entry, from the logits at the entries alone.
  void run_values() const {
    acc_t* grad_values = static_cast<acc_t*>(args_.grad_values);
    parallel_rows(args_.rows, args_.target.entries / std::max<int64_t>(1, args_.rows), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (args_.target.ignored(r)) continue;
        const GradientCoefficients<acc_t> c = coefficients(r, acc_t(0));
        const EntryRange range = args_.target.row(r);
        for (int64_t i = range.begin; i < range.end; ++i) {
          const auto entry = args_.target.template entry<acc_t>(i);
          if (entry.column < 0) continue;
          const acc_t o = args_.target.template class_weight<acc_t>(entry.column);
          grad_values[i] = -c.d * o * c.log_prob(z_at(r, entry.column));
        }
      }
    });
  }

 private:
  const scalar_t* row(int64_t r) const { return static_cast<const scalar_t*>(args_.logits) + r * args_.row_stride; }
  scalar_t* gradient_row(int64_t r) const { return static_cast<scalar_t*>(args_.grad_logits) + r * args_.grad_row_stride; }
  acc_t z_at(int64_t r, int64_t column) const { return transform_(to_acc(row(r)[column])); }
  acc_t grad(int64_t r) const { return static_cast<const acc_t*>(args_.grad_loss)[r * args_.grad_loss_stride]; }
  acc_t grad_lse(int64_t r) const {
    return args_.grad_lse ? static_cast<const acc_t*>(args_.grad_lse)[r * args_.grad_lse_stride] : acc_t(0);
  }

  GradientCoefficients<acc_t> coefficients(int64_t r, acc_t mass) const {
    const acc_t* residual = static_cast<const acc_t*>(args_.lse_residual);
    return {grad(r), grad_lse(r), mass, static_cast<const acc_t*>(args_.lse)[r], residual ? residual[r] : acc_t(0),
            weight_sum_, args_.options, columns_};
  }

  void make_plan(int64_t r, RowPlan& plan) const {
    RowEntries<acc_t>& entries = plan.entries;
    entries.clear();
    plan.zero = args_.target.ignored(r) || (grad(r) == acc_t(0) && grad_lse(r) == acc_t(0));
    if (plan.zero) return;
    entries.collect(args_.target, r);
    plan.coefficients = coefficients(r, entries.mass());
    entries.arrange(spans_);
  }

  // Every element of the span is written: zeros for an ignored row and for columns beyond the classes. `after` is the row
  // that will follow this one.
  void write_span(int64_t r, int64_t t, RowPlan& plan, int64_t after) const {
    const int64_t begin = t * kSpan, end = std::min(begin + kSpan, args_.vocab);
    const int64_t live = plan.zero ? begin : std::max(begin, std::min(end, columns_));
    const scalar_t* next = t + 1 < spans_ ? row(r) + end : row(after);
    scalar_t* gradient = gradient_row(r);
    if (live > begin) {
      plan.entries.gather(row(r), transform_, plan.entries.span_begin(t), plan.entries.span_begin(t + 1));
      tile_kernels<scalar_t>().gradient(row(r) + begin, live - begin, transform_, plan.coefficients,
                                        weights_at<scalar_t>(args_.target, begin), next, gradient + begin);
    }
    std::fill(reinterpret_cast<char*>(gradient + live), reinterpret_cast<char*>(gradient + end), 0);
  }

  void write_entries(int64_t r, RowPlan& plan) const {
    RowEntries<acc_t>& entries = plan.entries;
    tile_kernels<scalar_t>().entries(entries.logits.data(), entries.size(), transform_, plan.coefficients,
                                     entries.class_weights.empty() ? nullptr : entries.class_weights.data(),
                                     entries.weights.data());
    scalar_t* gradient = gradient_row(r);
    for (size_t k = 0; k < entries.size(); ++k) from_acc(entries.logits[k], gradient[entries.columns[k]]);
  }

  const BackwardArgs& args_;
  const int64_t columns_, spans_;
  const LogitTransform<acc_t> transform_;
  acc_t weight_sum_;
};

}  // namespace

void cross_entropy_forward(const ForwardArgs& args) {
  with_storage(args.dtype, [&](auto storage) { Forward<decltype(storage)>(args).run(); });
}

void cross_entropy_backward(const BackwardArgs& args) {
  with_storage(args.dtype, [&](auto storage) { Backward<decltype(storage)>(args).run(); });
}

void cross_entropy_backward_values(const BackwardArgs& args) {
  with_storage(args.dtype, [&](auto storage) { Backward<decltype(storage)>(args).run_values(); });
}

const char* instruction_set() {
  switch (instruction_set_in_use()) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    default:
      return "default";
  }
}

}  // namespace cpu
}  // namespace sparse_ce
