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

// Holds the exponentials of a row from its statistics on, relative to the largest one of each part. Weighed slopes take
// the place of the teacher's once these are no longer needed.
template <typename acc_t>
struct Kept {
  struct OfModel {
    std::vector<acc_t> exps, maxima;

    void resize(int64_t columns) {
      exps.resize(static_cast<size_t>(columns));
      maxima.resize(static_cast<size_t>(divide_up(columns, kPart)));
    }
  };
  OfModel student, teacher;
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
    LogRatio<acc_t> log_ratio{relation};
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

  Stats<acc_t> stats(const Row& row, int64_t t, Kept<acc_t>* kept) const {
    const FlushSubnormals flush;
    Stats<acc_t> stats;
    const auto [begin, end] = classes_of(t, row.reads);
    for (int64_t column = begin; column < end; column += kPart) {
      const int64_t n = std::min(kPart, end - column);
      stats.student.merge(stats_of(args_.student, row.r, column, n, kept ? &kept->student : nullptr));
      if (row.divergence)
        stats.teacher.merge(stats_of(args_.teacher, row.r, column, n, kept ? &kept->teacher : nullptr));
    }
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
    row.log_ratio = LogRatio<acc_t>(row.relation);
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
  void guess(Row& row, Kept<acc_t>* kept) const {
    if (!row.divergence || args_.classes < 8 * kPart || args_.step == DenseStep::kSums) return;
    Sums total;
    part(row, 0, kPart, kept, {true, false, false}, total);
    for (double& sum : total.divergence) sum *= double(args_.classes) / double(kPart);
    again(row, total);
  }
  // Returns true if the terms of some classes show that the row is not near.
  bool is_far(const Row& row, Kept<acc_t>* kept) const {
    Sums total;
    for (int64_t column = 0; column < args_.classes; column += kPart) {
      part(row, column, std::min(kPart, args_.classes - column), kept, {true, false, false}, total);
      acc_t divergence[kMostDivergences];
      for (int k = 0; k < kMostDivergences; ++k) divergence[k] = static_cast<acc_t>(total.divergence[k]);
      if (is_clearly_far(args_.kind, args_.beta, divergence)) return true;
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
      args_.sum<acc_t>(count_ + 1 + k, row.r) = static_cast<acc_t>(sums.slope[k]);
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

  // Selects what a pass over the classes computes: their sums, the slopes to be kept, or the gradient.
  struct Pass {
    bool sums, keeps, gradient;
  };
  // Processes a span of a row that is read. Returns its sums.
  Sums span(const Row& row, int64_t t, Kept<acc_t>* kept, Pass pass) const {
    const FlushSubnormals flush(!row.relation.near());  // the divergence of a near row may be as small
    Sums total;
    const auto [begin, end] = classes_of(t, pass.sums ? row.reads : row.writes);
    for (int64_t column = begin; column < end; column += kPart)
      part(row, column, std::min(kPart, end - column), kept, pass, total);
    if (pass.gradient) clear(row.r, t, end);
    return total;
  }
  // Writes the gradient of a span from what was kept.
  void write_kept(const Row& row, int64_t t, const Kept<acc_t>& kept) const {
    const FlushSubnormals flush;
    const auto [begin, end] = classes_of(t, row.writes);
    for (int64_t column = begin; column < end; column += kPart)
      write_part(row, column, std::min(kPart, end - column), kept_of(row.relation.student, kept.student, column),
                 kept.teacher.exps.data() + column);
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

  RowStats<acc_t> stats_of(const DenseLogits& x, int64_t r, int64_t column, int64_t n,
                           typename Kept<acc_t>::OfModel* kept) const {
    alignas(64) acc_t buffer[kPart], exps[kPart];
    const acc_t* z = transformed(x, r, column, n, buffer);
    const int64_t size = x.column_stride == 1 ? size_of(x.dtype) : 0;
    const char* next = static_cast<const char*>(x.data) + (r * x.row_stride + column + kPart) * size;
    const RowStats<acc_t> stats = Classes<acc_t>::raise(z, n, kept ? kept->exps.data() + column : exps, next, size);
    if (kept) kept->maxima[static_cast<size_t>(column / kPart)] = stats.max;
    return stats;
  }

  // Returns the factor of exponentials relative to `max`. It is not finite if all logits are -inf.
  static acc_t per_exp(const DenseLse<acc_t>& lse, acc_t max) {
    return static_cast<acc_t>(std::exp(double(max) - double(lse.max)) / double(lse.sum));
  }
  static Probabilities<acc_t> kept_of(const DenseLse<acc_t>& lse, const typename Kept<acc_t>::OfModel& kept,
                                      int64_t column) {
    return {kept.exps.data() + column, per_exp(lse, kept.maxima[static_cast<size_t>(column / kPart)])};
  }
  static Probabilities<acc_t> raised(const DenseLse<acc_t>& lse, const acc_t* z, int64_t n, acc_t* buffer) {
    return {buffer, per_exp(lse, Classes<acc_t>::raise(z, n, buffer).max)};
  }

  void part(const Row& row, int64_t column, int64_t n, Kept<acc_t>* kept, Pass pass, Sums& total) const {
    Classes<acc_t> classes;
    const DenseLse<acc_t>&student = row.relation.student, &teacher = row.relation.teacher;
    Probabilities<acc_t> q{classes.q, 1};
    acc_t* const slope = pass.keeps ? kept->teacher.exps.data() + column : classes.slope;
    const acc_t* z = transformed(args_.student, row.r, column, n, classes.of_student);
    if (!row.relation.near()) q = kept ? kept_of(student, kept->student, column) : raised(student, z, n, classes.q);
    if (row.divergence) {
      const acc_t* y = transformed(args_.teacher, row.r, column, n, classes.of_teacher);
      with_divergence(args_.kind, [&](auto of) {
        constexpr Divergence kind = of.value;
        if (row.relation.near()) return add(near_sums<kind>(row, z, y, n, classes), pass, total);
        const auto p = kept ? kept_of(teacher, kept->teacher, column) : raised(teacher, y, n, classes.p);
        add(sums<kind>(row, z, y, q, p, n, slope), pass, total);
      });
    } else {
      std::fill(slope, slope + n, acc_t(0));
    }
    if (pass.gradient) write_part(row, column, n, q, slope);
  }

  template <Divergence kind>
  typename Classes<acc_t>::Sums near_sums(const Row& row, const acc_t* z, const acc_t* y, int64_t n,
                                          Classes<acc_t>& classes) const {
    const acc_t log_ratio = row.relation.log_ratio;
    return classes.relate(z, y, row.relation, n)
               ? classes.template compare_near<kind, true>(args_.beta, log_ratio, row.by, n)
               : classes.template compare_near<kind, false>(args_.beta, log_ratio, row.by, n);
  }
  template <Divergence kind>
  typename Classes<acc_t>::Sums sums(const Row& row, const acc_t* z, const acc_t* y, const Probabilities<acc_t>& q,
                                     const Probabilities<acc_t>& p, int64_t n, acc_t* slope) const {
    const auto compare = [&](auto balanced) {
      return Classes<acc_t>::template compare<kind, balanced.value>(args_.beta, z, y, q, p, row.relation, row.log_ratio,
                                                                    row.by, n, slope);
    };
    if constexpr (kind == Divergence::kJsd || kind == Divergence::kSeveral) {
      if (Mixture<acc_t>(args_.beta).balanced()) return compare(std::true_type{});
    }
    return compare(std::false_type{});
  }

  void add(typename Classes<acc_t>::Sums of_part, Pass pass, Sums& total) const {
    if (!pass.sums) return;
    total.above += double(sum_of_lanes(of_part.above));
    for (int k = 0; k < count_; ++k) {
      total.divergence[k] += double(sum_of_lanes(of_part.term[k]));
      total.slope[k] += args_.knows_slopes() ? 0 : double(sum_of_lanes(of_part.slope[k]));
    }
  }

  void write_part(const Row& row, int64_t column, int64_t n, const Probabilities<acc_t>& q, const acc_t* slope) const {
    const int64_t label = args_.label(row.r), in_part = label - column;
    const bool has_label = in_part >= 0 && in_part < n && row.by.of_label != acc_t(0);
    const DenseLogits& x = args_.student;
    // The gradient may overwrite the logit.
    const acc_t logit = has_label ? load<acc_t>(x, row.r, label) : acc_t(0);
    write_gradient(args_, row.r, column, n, row.by.of_q, q, slope, nontemporal_);
    if (!has_label) return;
    // q - 1 is rounded to storage once.
    const acc_t dz = q.exps[in_part] * q.per_exp * row.by.of_q + slope[in_part] - row.by.of_label;
    const auto transform = x.template transform<acc_t>(row.r);
    const acc_t at_label = dz * (transform.scale * transform.with_slope(logit).of_cap);
    store_float(at_label, args_.grad, x.dtype, row.r * args_.grad_row_stride + label);
  }

  const DenseDivergenceArgs& args_;
  const int count_;
  const int64_t spans_;
  const bool nontemporal_ =
      !args_.overwrites() && use_nontemporal(args_.student.data, args_.grad, args_.rows* args_.columns, size());
};

// Processes a row. merged(total, f) calls f(span) for all spans of the row and merges the results in order. `kept` is
// memory for a row, or null if the statistics are known.
template <typename acc_t, typename merged_t>
void run_row(const DenseDivergenceArgs& args, const Rows<acc_t>& rows, int64_t r, Kept<acc_t>* kept,
             const merged_t& merged) {
  auto row = rows.begin(r);
  if (args.writes_stats()) rows.write(row, merged(Stats<acc_t>{}, [&](int64_t t) { return rows.stats(row, t, kept); }));
  if (args.step == DenseStep::kStatistics) return;
  rows.read_stats(row);
  if (args.writes_sums()) rows.write_label_loss(row);
  const bool both = args.step == DenseStep::kWithGradient;
  if (both) rows.read_coefficients(row);  // those of q follow from the sums unless these are known
  if (args.writes_sums()) rows.guess(row, kept);
  bool one_pass = both && args.knows_slopes() && row.writes && !row.relation.near() &&
                  (!args.overwrites() || rows.is_far(row, kept));
  bool keeps = both && row.writes && !one_pass;
  if (args.writes_sums()) {
    Sums sums;
    do {
      if (row.relation.near()) keeps = one_pass = false;  // the gradient needs the corrected log_ratio
      sums = merged(Sums{}, [&](int64_t t) { return rows.span(row, t, kept, {true, keeps, one_pass}); });
    } while (rows.again(row, sums));
    rows.write(row, sums);
  }
  if (one_pass || !args.writes_gradient()) return;
  rows.read_coefficients(row);
  merged(Sums{}, [&](int64_t t) {
    if (!keeps) return rows.span(row, t, kept, {false, false, true});
    rows.write_kept(row, t, *kept);
    return Sums{};
  });
}

template <typename acc_t>
void run(const DenseDivergenceArgs& args) {
  const Rows<acc_t> rows(args);
  const int64_t spans = rows.spans();
  const bool keeps = args.writes_stats() && args.writes_sums();
  const auto memory = [&](Kept<acc_t>& kept) {
    if (keeps) kept.student.resize(args.classes), kept.teacher.resize(args.classes);
    return keeps ? &kept : nullptr;
  };
  if (split_rows(args.rows, spans)) {
    Kept<acc_t> kept;
    Kept<acc_t>* const of_row = memory(kept);
    for (int64_t r = 0; r < args.rows; ++r)
      run_row(args, rows, r, of_row, [&](auto total, const auto& f) {
        std::vector<decltype(total)> parts(static_cast<size_t>(spans));
        parallel_spans(1, spans, [&](int64_t, int64_t t) { parts[static_cast<size_t>(t)] = f(t); });
        for (const auto& part : parts) total.merge(part);
        return total;
      });
    return;
  }
  parallel_rows(args.rows, args.columns, [&](int64_t begin, int64_t end) {
    Kept<acc_t> kept;
    Kept<acc_t>* const of_row = memory(kept);
    for (int64_t r = begin; r < end; ++r)
      run_row(args, rows, r, of_row, [&](auto total, const auto& f) {
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
