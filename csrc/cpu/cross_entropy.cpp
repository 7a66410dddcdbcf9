#include "../cross_entropy.h"
#include "row_entries.h"
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
