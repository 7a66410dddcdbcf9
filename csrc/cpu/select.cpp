// Computes the statistics and outputs of each row in forward, and its gradient in backward. Rows and spans are
// distributed over threads as for the loss (row_passes.h).
#include "../ops/select.h"
#include "rows/row_entries.h"
#include "rows/row_loops.h"
#include "rows/row_passes.h"

#include <algorithm>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

template <typename scalar_t>
class SelectForward {
  using acc_t = acc_type<scalar_t>;

 public:
  explicit SelectForward(const SelectArgs& args) : args_(args), spans_(divide_up(args.classes(), kSpan)) {}

  int64_t spans() const { return spans_; }

  // Holds the statistics of a span, of all classes and of the classes outside S (`tail`).
  using Span = Scanned<acc_t>;

  // Collects the entries' classes if they must be excluded.
  void prepare(int64_t r, RowEntries<acc_t>& entries) const {
    prefetch_entries(args_.target, r);
    if (!args_.needs_tail() || args_.target.ignored(r)) return;
    entries.template collect<true>(args_.target, r);
    entries.arrange(args_, spans_);
  }

  Span span(int64_t r, int64_t t, int64_t after, const RowEntries<acc_t>& entries) const {
    const scalar_t* next = t + 1 < spans_ ? row(r) + begin_of(t + 1) : row(after) + args_.first_class;
    Span out;
    if (args_.needs_tail()) {
      const auto others = entries.without_entries(t);
      out.all = of_span(r, t, others.bits, next);
      out.tail = out.all.row;
    }
    // Smoothing is relative to the maximum of all classes.
    if (!args_.needs_tail() || args_.needs_smoothing()) out.all = of_span(r, t, nullptr, next);
    return out;
  }

  // Writes the requested outputs of a row. `after` is the row that is read next.
  void write(int64_t r, int64_t after, RowEntries<acc_t>& entries) const {
    prepare(r, entries);
    Span stats;
    for (int64_t t = 0; t < spans_ && !args_.target.ignored(r); ++t) stats.merge(span(r, t, after, entries));
    finish(r, stats, entries);
  }

  // Writes the outputs of a row from the statistics of all its spans.
  void finish(int64_t r, Span row_stats, RowEntries<acc_t>& entries) const {
    const bool ignored = args_.target.ignored(r);
    const EntryRange range = args_.target.row(r);
    const LogitTransform<acc_t> transform = args_.template transform<acc_t>(r);
    if (!ignored && args_.needs_tail()) {
      entries.gather(row(r), 0, entries.size());  // the row is in a cache now
      entries.transform_all(transform, entries.logits.data(), nullptr);
      const SelectStats<acc_t> chosen = of_entries(entries);
      row_stats.chosen = chosen.row;
      if (!args_.needs_smoothing()) row_stats.all.merge(chosen);
    }
    SelectStats<acc_t>& stats = row_stats.all;
    if (args_.outputs.rank && !ignored) {
      const Ranked<acc_t> ranked = args_.template ranked_logit<acc_t>(r, row(r));
      if (!ranked.exists) stats.above = -1;
      if (ranked.compares() && std::isnan(stats.row.rest))  // NaN may not have been counted
        stats.above = Tile<scalar_t>::above(row(r) + begin_of(0), args_.classes(), ranked);
    }
    args_.write_row(r, ignored, false, row_stats, ignored ? TargetStats<acc_t>{} : in_loss(r, stats));
    if (!args_.outputs.log_probs) return;
    if (ignored) return args_.template clear<acc_t>(range);
    const auto z_of = [&](acc_t logit) { return Tile<acc_t>::transformed(logit, transform); };
    for (int64_t i = range.begin; i < range.end; ++i) args_.write_entry(i, false, row(r), z_of, stats.row);
  }

 private:
  const scalar_t* row(int64_t r) const { return args_.template row<scalar_t>(r); }
  int64_t begin_of(int64_t t) const { return args_.first_class + t * kSpan; }
  int64_t size_of(int64_t t) const { return std::min(kSpan, args_.classes_end() - begin_of(t)); }

  // Returns the statistics of the classes in `kept`; null means all classes.
  SelectStats<acc_t> of_span(int64_t r, int64_t t, const uint32_t* kept, const scalar_t* next) const {
    const int64_t begin = begin_of(t);
    const RequestedStats requested{args_.outputs.entropy, args_.outputs.collision, args_.outputs.mean_logit,
                                   args_.outputs.argmax, args_.needs_smoothing() && !kept};
    const Ranked<acc_t> ranked =
        args_.outputs.rank ? args_.template ranked_logit<acc_t>(r, row(r)) : Ranked<acc_t>{0, false, false, false};
    SelectStats<acc_t> stats = Tile<scalar_t>::select_stats(
        row(r) + begin, size_of(t), args_.template transform<acc_t>(r), requested,
        weights_at<scalar_t>(args_.target, begin), kept, ranked.compares() ? &ranked : nullptr, next);
    if (stats.argmax >= 0) stats.argmax += begin;
    return stats;
  }

  SelectStats<acc_t> of_entries(const RowEntries<acc_t>& entries) const {
    SelectStats<acc_t> stats;
    stats.push(entries.logits.data(), 0, static_cast<int64_t>(entries.size()));
    for (size_t k = 0; args_.outputs.argmax && k < entries.size(); ++k)
      if (entries.logits[k] == stats.row.max &&
          static_cast<uint64_t>(entries.columns[k]) < static_cast<uint64_t>(stats.argmax))
        stats.argmax = entries.columns[k];
    return stats;
  }

  TargetStats<acc_t> in_loss(int64_t r, const SelectStats<acc_t>& stats) const {
    TargetSums<WideSum> sums;
    if (!args_.outputs.loss) return sums.stats<acc_t>();
    const LogitTransform<acc_t> transform = args_.template transform<acc_t>(r);
    const EntryRange range = args_.target.row(r);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto entry = args_.target.template entry<acc_t>(i);
      if (!args_.holds(entry.column)) continue;
      sums.add(args_.target.share(entry), stats.row.max,
               [&] { return Tile<acc_t>::transformed(to_acc(row(r)[entry.column]), transform); });
    }
    return sums.stats<acc_t>();
  }

  const SelectArgs& args_;
  const int64_t spans_;
};

template <typename scalar_t>
class SelectBackward {
  using acc_t = acc_type<scalar_t>;

 public:
  // See Backward in row_passes.h. `raw` are the untransformed logits of the entries, for the gradient of the scale, and
  // `slopes` are dz/d(scale x).
  struct RowPlan {
    bool zero;
    SelectCoefficients<acc_t> coefficients;
    RowEntries<acc_t> entries;
    std::vector<acc_t> raw, slopes, derivatives;
    acc_t common, of_all;  // the common part of all logits, and its contribution to dl/ds
    int64_t most = -1;  // a class that holds most without an entry, if `entries` has it nevertheless
  };

  explicit SelectBackward(const SelectBackwardArgs& args)
      : args_(args), classes_end_(args.classes_end()), spans_(divide_up(args.vocab - args.first_class, kSpan)),
        destinations_(args) {}

  int64_t spans() const { return spans_; }
  RowPlan empty_plan() const {
    return {true, SelectCoefficients<acc_t>({0, 0, 0, 0, 0, 0, args_.options, classes_end_}), {}, {}, {}, {}, 0, 0};
  }

  void make_plan(int64_t r, RowPlan& plan) const {
    RowEntries<acc_t>& entries = plan.entries;
    entries.clear();
    plan.common = plan.of_all = 0;
    plan.zero = args_.target.ignored(r);
    if (plan.zero) return;
    entries.template collect<true>(args_.target, r);
    plan.zero = args_.template without_row_gradient<acc_t>(r) && !any_grad(entries);
    if (plan.zero) return entries.clear();
    // Without a loss, a target's weights only determine its entries.
    const acc_t mass = args_.grad_loss ? entries.mass() : acc_t(0);
    double grad_sum = 0;
    for (size_t k = 0; k < entries.size(); ++k)
      grad_sum += args_.template grad_output_of_entry<acc_t>(entries.positions[k]);
    plan.coefficients = args_.select_coefficients(r, mass, static_cast<acc_t>(grad_sum));
    for (size_t k = 0; k < entries.size(); ++k) {
      const acc_t in_loss = args_.grad_loss ? plan.coefficients.d * entries.weights[k] : acc_t(0);
      entries.weights[k] = in_loss - args_.template grad_output_of_entry<acc_t>(entries.positions[k]);
    }
    plan.most = hidden_class(r, plan);
    if (plan.most >= 0) entries.add(plan.most, args_.target);
    if (args_.grad_scale) {
      plan.common = args_.template common_logit<acc_t>(r);
      plan.of_all = args_.scale_of_all(plan.common, plan.coefficients, entries.mass());
    }
    entries.arrange(args_, spans_);
  }

  // Writes every element of the span. Returns its contribution to dl/ds.
  acc_t write_span(int64_t r, int64_t t, int64_t after, RowPlan& plan) const {
    const int64_t begin = args_.first_class + t * kSpan, end = std::min(begin + kSpan, args_.vocab);
    const int64_t nonzero_end = plan.zero ? begin : std::max(begin, std::min(end, classes_end_));
    scalar_t* gradient = args_.template gradient_row<scalar_t>(r);
    acc_t of_scale = 0;
    if (nonzero_end > begin) {
      const LogitTransform<acc_t> transform = args_.template transform<acc_t>(r);
      RowEntries<acc_t>& entries = plan.entries;
      const size_t first = entries.span_begin(t), last = entries.span_begin(t + 1);
      entries.gather(row(r), first, last);
      const scalar_t* next = t + 1 < spans_ ? row(r) + end : row(after);
      const SelectCoefficients<acc_t>& c = plan.coefficients;
      const acc_t* weights = weights_at<scalar_t>(args_.target, begin);
      const int64_t n = nonzero_end - begin;
      const Destination<scalar_t> to = destinations_.row(r, entries.size()).from(begin);
      if (!c.more() && !args_.grad_scale)
        Tile<scalar_t>::gradient(row(r) + begin, n, transform, args_.options.label_smoothing != 0, c, weights, next,
                                 to);
      else if (args_.grad_scale || !Tile<scalar_t>::select_gradient(row(r) + begin, n, transform, c, weights, next, to))
        of_scale = write_tiles(r, t, nonzero_end, transform, plan, to);
    }
    std::fill(reinterpret_cast<char*>(gradient + nonzero_end), reinterpret_cast<char*>(gradient + end), 0);
    return of_scale;
  }

  // `of_scale` is the sum over the spans.
  void write_entries(int64_t r, acc_t of_scale, RowPlan& plan) const {
    RowEntries<acc_t>& entries = plan.entries;
    const LogitTransform<acc_t> transform = args_.template transform<acc_t>(r);
    scalar_t* gradient = args_.template gradient_row<scalar_t>(r);
    for (const int64_t column : entries.columns) __builtin_prefetch(gradient + column, 1);
    const SelectCoefficients<acc_t>& outside = plan.coefficients;
    const SelectCoefficients<acc_t> inside = outside.of_classes(/*inside=*/true);
    plan.raw = entries.logits;
    plan.slopes.assign(entries.size(), acc_t(1));
    plan.derivatives.resize(entries.size());
    entries.transform_all(transform, entries.logits.data(), plan.slopes.data());
    Tile<scalar_t>::derivative(entries.logits.data(), entries.size(), inside,
                               entries.class_weights.empty() ? nullptr : entries.class_weights.data(), nullptr,
                               plan.derivatives.data());
    for (size_t k = 0; k < entries.size(); ++k) {
      acc_t derivative = plan.derivatives[k] - entries.weights[k];
      const bool hidden = entries.columns[k] == plan.most;
      if (hidden || inside.holds_most(entries.logits[k])) {
        double others = entries.elsewhere;
        for (size_t i = 0; i < entries.size(); ++i) others += i == k ? 0 : static_cast<double>(entries.weights[i]);
        const acc_t o = entries.class_weights.empty() ? acc_t(1) : entries.class_weights[k];
        derivative = (hidden ? outside : inside).at_most(entries.logits[k], o, static_cast<acc_t>(others));
      }
      if (args_.grad_scale) of_scale += args_.scale_term(derivative * plan.slopes[k], plan.raw[k], plan.common);
      from_acc(derivative * (transform.scale * plan.slopes[k]), gradient[entries.columns[k]]);
    }
    if (args_.grad_scale)
      static_cast<acc_t*>(args_.grad_scale)[r] =
          (of_scale + plan.of_all) * static_cast<acc_t>(args_.options.logit_scale);
  }

 private:
  const scalar_t* row(int64_t r) const { return args_.template row<scalar_t>(r); }

  // Returns the class that holds most if it has no entry and the dense pass would lose the digits of its gradient, or
  // -1. Its probability is at least that of the collision, and at least exp(-entropy).
  int64_t hidden_class(int64_t r, const RowPlan& plan) const {
    const SelectCoefficients<acc_t>& c = plan.coefficients;
    const bool loses =
        (c.of_entropy != acc_t(0) && c.entropy < acc_t(0.5)) || (c.of_squares != acc_t(0) && c.collision > acc_t(-0.5));
    if (!loses) return -1;
    const auto transform = args_.template transform<acc_t>(r);
    const acc_t least = c.lse - acc_t(0.5);
    for (const int64_t column : plan.entries.columns)
      if (args_.holds(column) && Tile<acc_t>::transformed(to_acc(row(r)[column]), transform) >= least) return -1;
    const int64_t first = args_.first_class;
    const int64_t at = Tile<scalar_t>::first_from(least, row(r) + first, classes_end_ - first, transform);
    return at < 0 ? -1 : first + at;
  }

  bool any_grad(const RowEntries<acc_t>& entries) const {
    return std::any_of(entries.positions.begin(), entries.positions.begin() + static_cast<int64_t>(entries.size()),
                       [&](int64_t i) { return args_.template grad_output_of_entry<acc_t>(i) != acc_t(0); });
  }

  // Writes a span up to column `nonzero_end` as if its classes had no entries; those with entries do not change dl/ds.
  acc_t write_tiles(int64_t r, int64_t t, int64_t nonzero_end, const LogitTransform<acc_t>& transform,
                    const RowPlan& plan, const Destination<scalar_t>& to) const {
    alignas(64) acc_t buffer[kTile], derivative[kTile], slopes_of_tile[kTile];
    acc_t* const slopes = transform.softcap == acc_t(0) ? nullptr : slopes_of_tile;
    acc_t of_scale = 0;
    typename RowEntries<acc_t>::Others others;
    if (args_.grad_scale) others = plan.entries.without_entries(t);
    const int64_t span = args_.first_class + t * kSpan;
    for (int64_t begin = span; begin < nonzero_end; begin += kTile) {
      const int64_t n = std::min(kTile, nonzero_end - begin);
      const acc_t* z = transformed(row(r) + begin, n, transform, buffer, slopes);
      Tile<scalar_t>::derivative(z, n, plan.coefficients, weights_at<scalar_t>(args_.target, begin),
                                 args_.grad_scale ? others.bits + (begin - span) / 32 : nullptr, derivative);
      Tile<scalar_t>::chain(row(r) + begin, slopes, derivative, n, transform, args_.grad_scale ? &of_scale : nullptr,
                            plan.common, to.from(begin - span));
    }
    return of_scale;
  }

  const SelectBackwardArgs& args_;
  const int64_t classes_end_, spans_;
  const Destinations<scalar_t> destinations_;
};

template <typename scalar_t>
void run_forward(const SelectArgs& args) {
  using Span = typename SelectForward<scalar_t>::Span;
  using Entries = RowEntries<acc_type<scalar_t>>;
  const SelectForward<scalar_t> forward(args);
  const int64_t spans = forward.spans();
  if (!split_rows(args.rows, spans)) {
    parallel_rows(args.rows, args.classes(), [&](int64_t begin, int64_t end) {
      Entries entries;
      for (int64_t r = begin; r < end; ++r) forward.write(r, std::min(r + 1, end - 1), entries);
    });
    return;
  }
  std::vector<Entries> entries(args.rows);
  for (int64_t r = 0; r < args.rows; ++r) forward.prepare(r, entries[r]);
  std::vector<Span> partial(args.rows * spans);
  parallel_spans(args.rows, spans, [&](int64_t r, int64_t t) {
    if (!args.target.ignored(r)) partial[r * spans + t] = forward.span(r, t, r, entries[r]);
  });
  for (int64_t r = 0; r < args.rows; ++r) {
    Span stats;
    for (int64_t t = 0; t < spans; ++t) stats.merge(partial[r * spans + t]);
    forward.finish(r, stats, entries[r]);
  }
}

template <typename acc_t>
void run_merge(const SelectMergeArgs& args) {
  parallel_rows(args.rows, args.shards, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const bool ignored = args.target.ignored(r);
      const EntryRange range = args.target.row(r);
      ShardStats<acc_t> stats;
      for (int64_t shard = 0; shard < args.shards; ++shard) stats.merge(args.of_shard<acc_t>(shard, r));
      args.write_row(r, ignored, false, stats, stats.entries);
      if (!args.outputs.log_probs) continue;
      if (ignored) args.template clear<acc_t>(range);
      for (int64_t i = range.begin; i < range.end && !ignored; ++i) args.write_merged_entry(i, false, stats.all.row);
    }
  });
}

template <typename scalar_t>
void run_backward(const SelectBackwardArgs& args) {
  using acc_t = acc_type<scalar_t>;
  const SelectBackward<scalar_t> backward(args);
  const int64_t spans = backward.spans();
  if (!split_rows(args.rows, spans)) {
    parallel_rows(args.rows, args.vocab, [&](int64_t begin, int64_t end) {
      auto plan = backward.empty_plan();
      // Backward runs in reverse order, because the rows that forward read last may still be in a cache.
      for (int64_t r = end - 1; r >= begin; --r) {
        prefetch_entries(args.target, std::max(begin, r - 1));
        backward.make_plan(r, plan);
        acc_t of_scale = 0;
        for (int64_t t = 0; t < spans; ++t) of_scale += backward.write_span(r, t, std::max(begin, r - 1), plan);
        backward.write_entries(r, of_scale, plan);
      }
    });
    return;
  }
  std::vector<typename SelectBackward<scalar_t>::RowPlan> plans(args.rows, backward.empty_plan());
  for (int64_t r = 0; r < args.rows; ++r) backward.make_plan(r, plans[r]);
  std::vector<acc_t> of_scale(args.rows * spans);
  parallel_spans(args.rows, spans,
                 [&](int64_t r, int64_t t) { of_scale[r * spans + t] = backward.write_span(r, t, r, plans[r]); });
  for (int64_t r = 0; r < args.rows; ++r) {
    acc_t sum = 0;
    for (int64_t t = 0; t < spans; ++t) sum += of_scale[r * spans + t];
    backward.write_entries(r, sum, plans[r]);
  }
}

}  // namespace

void select_forward(const SelectArgs& args) {
  with_storage(args.dtype, [&](auto storage) { run_forward<decltype(storage)>(args); });
}

void select_merge(const SelectMergeArgs& args) {
  args.dtype == DType::kFloat64 ? run_merge<double>(args) : run_merge<float>(args);
}

void select_backward(const SelectBackwardArgs& args) {
  with_storage(args.dtype, [&](auto storage) { run_backward<decltype(storage)>(args); });
}

}  // namespace cpu
}  // namespace sparse_ce
