// Processes each row in spans of columns: statistics of both rows, sums over their classes, and the gradient. A thread
// processes all spans of a row in turn, while the row is in its cache.
#include "../ops/dense_divergence.h"
#include "rows/dense_classes.h"
#include "rows/row_loops.h"
#include "simd/tile.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

// Holds q and the weighed slopes of a row between its sums and its gradient.
template <typename acc_t>
struct Kept {
  std::vector<acc_t> q, slope;

  void resize(int64_t columns) {
    q.resize(static_cast<size_t>(columns));
    slope.resize(static_cast<size_t>(columns));
  }
};

// Sums over classes. Parts are summed in the arithmetic dtype.
struct Sums {
  double divergence[kMostDivergences] = {}, slope[kMostDivergences] = {}, above = 0;  // above is that of q - p

  void merge(const Sums& other) {
    above += other.above;
    for (int k = 0; k < kMostDivergences; ++k) divergence[k] += other.divergence[k], slope[k] += other.slope[k];
  }
};

template <typename acc_t>
struct Stats {
  RowStats<acc_t> student, teacher;
  void merge(const Stats& other) { student.merge(other.student), teacher.merge(other.teacher); }
};

template <typename acc_t>
class Rows {
 public:
  // Holds what the spans of a row share.
  struct Row {
    int64_t r;
    bool divergence, reads;  // reads is false if the row has neither divergence nor label
    bool writes = false;  // false if the gradient is 0
    NearRow<acc_t> relation{{0, 1}, {0, 1}, acc_t(INFINITY)};
    DenseCoefficients<acc_t> by{};
  };

  explicit Rows(const DenseDivergenceArgs& args)
      : args_(args), count_(divergence_count(args.kind)), spans_(std::max<int64_t>(1, divide_up(args.columns, kSpan))) {
  }

  int64_t spans() const { return spans_; }

  Row begin(int64_t r) const {
    const bool divergence = args_.has_divergence(r);
    return {r, divergence, divergence || args_.has_label(r)};
  }

  Stats<acc_t> stats(const Row& row, int64_t t) const {
    Stats<acc_t> stats;
    if (row.reads) stats.student = stats_of(args_.student, row.r, t);
    if (row.divergence) stats.teacher = stats_of(args_.teacher, row.r, t);
    return stats;
  }

  void write(const Row& row, const Stats<acc_t>& stats) const {
    acc_t* of_row = args_.stats_of<acc_t>(row.r);
    of_row[0] = row.reads ? stats.student.max : acc_t(0);
    of_row[1] = row.reads ? stats.student.total() : acc_t(0);
    of_row[2] = row.divergence ? stats.teacher.max : acc_t(0);
    of_row[3] = row.divergence ? stats.teacher.total() : acc_t(0);
    of_row[4] = acc_t(INFINITY);
  }
  void read_stats(Row& row) const {
    const acc_t* of_row = args_.stats_of<acc_t>(row.r);
    row.relation = {{of_row[0], of_row[1]}, {of_row[2], of_row[3]}, of_row[4]};
  }

  // Returns true if the sums of a row must be computed again. A row of a shard has no divergence of its own.
  bool again(Row& row, const Sums& sums) const {
    if (!row.divergence || args_.step == DenseStep::kSums) return false;
    acc_t divergence[kMostDivergences];
    for (int k = 0; k < kMostDivergences; ++k) divergence[k] = static_cast<acc_t>(sums.divergence[k]);
    return row.relation.again(args_.kind, args_.beta, divergence, static_cast<acc_t>(sums.above));
  }
  // Relates a long row whose first classes have so small a share of a divergence that it is likely to be near. If it is
  // not, its sums are right, too.
  void guess(Row& row) const {
    if (!row.divergence || args_.classes < 8 * kPart || args_.step == DenseStep::kSums) return;
    Sums total;
    part(row, 0, kPart, nullptr, true, false, total);
    for (double& sum : total.divergence) sum *= double(args_.classes) / double(kPart);
    again(row, total);
  }
  // Returns true if the terms of some classes, which are at least 0, show that the row is not near.
  bool is_far(const Row& row) const {
    Sums total;
    for (int64_t column = 0; column < args_.classes; column += kPart) {
      part(row, column, std::min(kPart, args_.classes - column), nullptr, true, false, total);
      Row copy = row;  // which `again` changes
      if (!again(copy, total)) return true;
    }
    return false;
  }

  // Writes log_ratio, D, C and the sum of q - p.
  void write(const Row& row, const Sums& sums) const {
    if (args_.writes_stats()) args_.stats_of<acc_t>(row.r)[4] = row.relation.log_ratio;
    args_.sum<acc_t>(2 * count_ + 1, row.r) = static_cast<acc_t>(sums.above);
    for (int k = 0; k < count_; ++k) {
      const acc_t divergence = static_cast<acc_t>(sums.divergence[k]);
      const bool of_shard = args_.step == DenseStep::kSums;
      args_.sum<acc_t>(k, row.r) = of_shard ? divergence : bounded(args_.kind, k, args_.beta, divergence);
      args_.sum<acc_t>(count_ + 1 + k, row.r) = args_.knows_slopes() && row.divergence && !row.relation.near()
                                                    ? acc_t(-1)
                                                    : static_cast<acc_t>(sums.slope[k]);
    }
  }
  // Writes the loss of the label. Its logit is read before the gradient overwrites it.
  void write_label_loss(const Row& row) const {
    const int64_t label = args_.label(row.r);
    const acc_t x = label >= 0 ? load<acc_t>(args_.student, row.r, label) : acc_t(0);
    const acc_t loss =
        -row.relation.student.log_prob(Tile<acc_t>::transformed(x, args_.student.template transform<acc_t>(row.r)));
    args_.sum<acc_t>(count_, row.r) = label >= 0 ? loss : acc_t(0);
  }

  void read_coefficients(Row& row) const {
    row.by = args_.coefficients<acc_t>(row.r, row.relation.near());
    row.writes = row.reads && !row.by.zero();
  }

  // Processes a span of a row that is read: returns its sums, keeps what its gradient needs, or writes the gradient.
  Sums span(const Row& row, int64_t t, Kept<acc_t>* kept, bool sums, bool gradient) const {
    Sums total;
    const auto [begin, end] = classes_of(t, sums ? row.reads : row.writes);
    for (int64_t column = begin; column < end; column += kPart)
      part(row, column, std::min(kPart, end - column), kept, sums, gradient, total);
    if (gradient) clear(row.r, t, end);
    return total;
  }
  // Writes the gradient of a span from what was kept.
  void write_kept(const Row& row, int64_t t, const Kept<acc_t>& kept) const {
    const auto [begin, end] = classes_of(t, row.writes);
    for (int64_t column = begin; column < end; column += kPart)
      write_part(row, column, std::min(kPart, end - column), kept.q.data() + column, kept.slope.data() + column);
    clear(row.r, t, end);
  }

 private:
  int64_t size() const { return size_of(args_.student.dtype); }

  std::pair<int64_t, int64_t> classes_of(int64_t t, bool any) const {
    const int64_t begin = t * kSpan;
    return {begin, any ? std::max(begin, std::min(begin + kSpan, args_.classes)) : begin};
  }

  // Clears the gradient of a span from `begin` on.
  void clear(int64_t r, int64_t t, int64_t begin) const {
    char* row = static_cast<char*>(args_.grad) + r * args_.grad_row_stride * size();
    std::fill(row + begin * size(), row + std::min((t + 1) * kSpan, args_.columns) * size(), 0);
  }

  RowStats<acc_t> stats_of(const DenseLogits& x, int64_t r, int64_t t) const {
    const int64_t begin = t * kSpan, n = std::min(kSpan, args_.classes - begin);
    const auto transform = x.template transform<acc_t>(r);
    RowStats<acc_t> stats;
    if (n <= 0) return stats;
    with_storage(x.dtype, [&](auto storage) {
      using scalar_t = decltype(storage);
      if constexpr (std::is_same_v<acc_type<scalar_t>, acc_t>) {
        if (x.column_stride == 1) {
          const auto* at = static_cast<const scalar_t*>(x.data) + r * x.row_stride + begin;
          stats = Tile<scalar_t>::stats(at, n, transform, false, nullptr, at);
          return;
        }
      }
      acc_t z[kPart];
      for (int64_t i = 0; i < n; i += kPart) {
        const int64_t m = std::min(kPart, n - i);
        for (int64_t k = 0; k < m; ++k) z[k] = load<acc_t>(x, r, begin + i + k);
        stats.merge(Tile<acc_t>::stats(z, m, transform, false, nullptr, z));
      }
    });
    return stats;
  }

  void part(const Row& row, int64_t column, int64_t n, Kept<acc_t>* kept, bool sums, bool gradient, Sums& total) const {
    Classes<acc_t> classes;
    if (row.relation.near()) {
      load_logits(row, column, n, classes);
      const bool all_near = classes.relate(row.relation, n);
      with_divergence(args_.kind, [&](auto kind) {
        const auto& log_ratio = row.relation.log_ratio;
        all_near ? classes.template compare_near<kind.value, true>(args_.beta, log_ratio, n)
                 : classes.template compare_near<kind.value, false>(args_.beta, log_ratio, n);
      });
      if (sums) total.above += sum(classes.above, n);
      for (int k = 0; sums && k < count_; ++k) {
        total.divergence[k] += sum(classes.term[k], n);
        total.slope[k] += args_.knows_slopes() ? 0 : sum(classes.slope_sum[k], n);
      }
    } else if (load_log_probs(args_.student, row.r, column, n, row.relation.student, classes.log_q); row.divergence) {
      load_log_probs(args_.teacher, row.r, column, n, row.relation.teacher, classes.log_p);
      classes.compare(args_.kind, args_.beta, n);
      for (int k = 0; sums && k < count_; ++k) {
        total.divergence[k] += sum(classes.term[k], n);
        total.slope[k] += args_.knows_slopes() ? 0 : sum(classes.slope[k], n);
      }
    } else {
      classes.exponentiate(n);
      std::fill(classes.slope[0], classes.slope[0] + n, acc_t(0));
    }
    if (!gradient && !kept) return;
    if (row.divergence) classes.weigh_slopes(row.by, count_, n);
    if (gradient) return write_part(row, column, n, classes.q, classes.slope[0]);
    std::copy(classes.q, classes.q + n, kept->q.data() + column);
    std::copy(classes.slope[0], classes.slope[0] + n, kept->slope.data() + column);
  }

  void load_logits(const Row& row, int64_t column, int64_t n, Classes<acc_t>& classes) const {
    const DenseLse<acc_t> none{0, 1};
    load_log_probs(args_.student, row.r, column, n, none, classes.log_q);
    load_log_probs(args_.teacher, row.r, column, n, none, classes.log_p);
  }

  void write_part(const Row& row, int64_t column, int64_t n, const acc_t* q, const acc_t* slope) const {
    const int64_t label = args_.label(row.r), in_part = label - column;
    const bool has_label = in_part >= 0 && in_part < n && row.by.of_label != acc_t(0);
    const DenseLogits& x = args_.student;
    // The gradient may overwrite the logit.
    const acc_t logit = has_label ? load<acc_t>(x, row.r, label) : acc_t(0);
    write_gradient(args_, row.r, column, n, row.by.of_q, q, slope);
    if (!has_label) return;
    // q - 1 is rounded to storage once.
    const acc_t dz = q[in_part] * row.by.of_q + slope[in_part] - row.by.of_label;
    const auto transform = x.template transform<acc_t>(row.r);
    const acc_t at_label = dz * (transform.scale * transform.with_slope(logit).of_cap);
    store_float(at_label, args_.grad, x.dtype, row.r * args_.grad_row_stride + label);
  }

  const DenseDivergenceArgs& args_;
  const int count_;
  const int64_t spans_;
};

// Processes a row. merged(total, f) calls f(span) for all spans of the row and merges the results in order. `kept` is
// memory for a row, or null.
template <typename acc_t, typename merged_t>
void run_row(const DenseDivergenceArgs& args, const Rows<acc_t>& rows, int64_t r, Kept<acc_t>* kept,
             const merged_t& merged) {
  auto row = rows.begin(r);
  if (args.writes_stats()) rows.write(row, merged(Stats<acc_t>{}, [&](int64_t t) { return rows.stats(row, t); }));
  if (args.step == DenseStep::kStatistics) return;
  rows.read_stats(row);
  if (args.writes_sums()) rows.write_label_loss(row);
  const bool both = args.step == DenseStep::kWithGradient;
  if (both) rows.read_coefficients(row);  // those of q follow from the sums unless these are known
  if (args.writes_sums()) rows.guess(row);
  bool one_pass =
      both && args.knows_slopes() && row.writes && !row.relation.near() && (!args.overwrites() || rows.is_far(row));
  if (!row.writes) kept = nullptr;
  if (args.writes_sums()) {
    Sums sums;
    do {
      if (row.relation.near()) kept = nullptr, one_pass = false;  // the gradient needs the corrected log_ratio
      sums = merged(Sums{}, [&](int64_t t) { return rows.span(row, t, kept, true, one_pass); });
    } while (rows.again(row, sums));
    rows.write(row, sums);
  }
  if (one_pass || !args.writes_gradient()) return;
  rows.read_coefficients(row);
  merged(Sums{}, [&](int64_t t) {
    if (!kept) return rows.span(row, t, nullptr, false, true);
    rows.write_kept(row, t, *kept);
    return Sums{};
  });
}

template <typename acc_t>
void run(const DenseDivergenceArgs& args) {
  const Rows<acc_t> rows(args);
  const int64_t spans = rows.spans();
  Kept<acc_t>* const none = nullptr;
  if (split_rows(args.rows, spans)) {
    for (int64_t r = 0; r < args.rows; ++r)
      run_row(args, rows, r, none, [&](auto total, const auto& f) {
        std::vector<decltype(total)> parts(static_cast<size_t>(spans));
        parallel_spans(1, spans, [&](int64_t, int64_t t) { parts[static_cast<size_t>(t)] = f(t); });
        for (const auto& part : parts) total.merge(part);
        return total;
      });
    return;
  }
  parallel_rows(args.rows, args.columns, [&](int64_t begin, int64_t end) {
    Kept<acc_t> kept;
    if (args.step == DenseStep::kWithGradient && !args.knows_slopes()) kept.resize(args.classes);
    for (int64_t r = begin; r < end; ++r)
      run_row(args, rows, r, kept.q.empty() ? none : &kept, [&](auto total, const auto& f) {
        for (int64_t t = 0; t < spans; ++t) total.merge(f(t));
        return total;
      });
  });
}

}  // namespace

void dense_divergence(const DenseDivergenceArgs& args) {
  args.student.dtype == DType::kFloat64 ? run<double>(args) : run<float>(args);
}

}  // namespace cpu
}  // namespace sparse_ce
