// dense_rows.h - Processes a row of a dense divergence in spans of columns: statistics of both models, sums over the
// classes, and the gradient.
#pragma once

#include "dense_classes.h"
#include "row_loops.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sparse_ce {
namespace cpu {

// Holds the exponentials of a row from its statistics on, relative to the largest one of each part. When slopes are
// kept, these take the place of the teacher's exponentials, and in a near row q takes the place of the student's.
template <typename acc_t>
struct KeptRow {
  struct OfModel {
    std::vector<acc_t> exps, maxima;

    void resize(int64_t columns) {
      exps.resize(static_cast<size_t>(columns));
      maxima.resize(static_cast<size_t>(divide_up(columns, kPart)));
    }
  };
  OfModel student, teacher;
  bool has_slopes = false;
};

// Holds sums over classes. Parts are summed in the arithmetic dtype.
struct SumsOfRow {
  double divergence[kMostDivergences] = {}, slope[kMostDivergences] = {}, above = 0;  // above is that of q - p

  void merge(const SumsOfRow& other) {
    above += other.above;
    for (int k = 0; k < kMostDivergences; ++k) divergence[k] += other.divergence[k], slope[k] += other.slope[k];
  }
};

template <typename acc_t>
struct StatsOfRow {
  RowStats<acc_t> student, teacher;
  void merge(const StatsOfRow& other) { student.merge(other.student), teacher.merge(other.teacher); }
};

template <typename acc_t>
class DenseRows {
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

  explicit DenseRows(const DenseDivergenceArgs& args)
      : args_(args), count_(divergence_count(args.kind)), spans_(std::max<int64_t>(1, divide_up(args.columns, kSpan))) {
  }

  int64_t spans() const { return spans_; }

  Row begin(int64_t r) const {
    const bool divergence = args_.has_divergence(r);
    return {r, divergence, divergence || args_.has_label(r)};
  }

  StatsOfRow<acc_t> stats(const Row& row, int64_t t, KeptRow<acc_t>* kept) const {
    const FlushSubnormals flush;
    StatsOfRow<acc_t> stats;
    const auto [begin, end] = classes_of(t, row.reads);
    for (int64_t column = begin; column < end; column += kPart) {
      const int64_t n = std::min(kPart, end - column);
      stats.student.merge(stats_of(args_.student, row.r, column, n, kept ? &kept->student : nullptr));
      if (row.divergence)
        stats.teacher.merge(stats_of(args_.teacher, row.r, column, n, kept ? &kept->teacher : nullptr));
    }
    return stats;
  }

  void write(const Row& row, const StatsOfRow<acc_t>& stats) const {
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
  bool again(Row& row, const SumsOfRow& sums) const {
    if (!row.divergence || args_.step == DenseStep::kSums) return false;
    acc_t divergence[kMostDivergences];
    for (int k = 0; k < kMostDivergences; ++k) divergence[k] = static_cast<acc_t>(sums.divergence[k]);
    return row.relation.again(args_.kind, args_.beta, divergence, static_cast<acc_t>(sums.above));
  }
  // Relates a long row whose first classes have so small a share of a divergence that it is likely to be near. If it is
  // not, its sums are right, too.
  void guess(Row& row, KeptRow<acc_t>* kept) const {
    if (!row.divergence || args_.classes < 8 * kPart || args_.step == DenseStep::kSums) return;
    SumsOfRow total;
    part(row, 0, kPart, kept, {true, false, false}, total);
    for (double& sum : total.divergence) sum *= double(args_.classes) / double(kPart);
    again(row, total);
  }
  // Returns true if the terms of some classes show that the row is not near.
  bool is_far(const Row& row, KeptRow<acc_t>* kept) const {
    SumsOfRow total;
    for (int64_t column = 0; column < args_.classes; column += kPart) {
      part(row, column, std::min(kPart, args_.classes - column), kept, {true, false, false}, total);
      acc_t divergence[kMostDivergences];
      for (int k = 0; k < kMostDivergences; ++k) divergence[k] = static_cast<acc_t>(total.divergence[k]);
      if (is_clearly_far(args_.kind, args_.beta, divergence)) return true;
    }
    return false;
  }

  // Writes log_ratio, D, C and the sum of q - p.
  void write(const Row& row, const SumsOfRow& sums) const {
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
  SumsOfRow span(const Row& row, int64_t t, KeptRow<acc_t>* kept, Pass pass) const {
    const FlushSubnormals flush(!row.relation.near());  // the divergence of a near row may be as small
    SumsOfRow total;
    const auto [begin, end] = classes_of(t, pass.sums ? row.reads : row.writes);
    for (int64_t column = begin; column < end; column += kPart)
      part(row, column, std::min(kPart, end - column), kept, pass, total);
    if (pass.gradient) clear(row.r, t, end);
    return total;
  }
  // Writes the gradient of a span from what was kept.
  void write_kept(const Row& row, int64_t t, const KeptRow<acc_t>& kept) const {
    const FlushSubnormals flush(!row.relation.near());
    const auto [begin, end] = classes_of(t, row.writes);
    for (int64_t column = begin; column < end; column += kPart)
      write_part(row, column, std::min(kPart, end - column),
                 row.relation.near() ? Probabilities<acc_t>{kept.student.exps.data() + column, 1}
                                     : kept_of(row.relation.student, kept.student, column),
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
                           typename KeptRow<acc_t>::OfModel* kept) const {
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
  static Probabilities<acc_t> kept_of(const DenseLse<acc_t>& lse, const typename KeptRow<acc_t>::OfModel& kept,
                                      int64_t column) {
    return {kept.exps.data() + column, per_exp(lse, kept.maxima[static_cast<size_t>(column / kPart)])};
  }
  // Returns the same from the logits.
  static Probabilities<acc_t> raised(const DenseLse<acc_t>& lse, const acc_t* z, int64_t n, acc_t* buffer) {
    const FlushSubnormals flush;
    return {buffer, per_exp(lse, Classes<acc_t>::raise(z, n, buffer).max)};
  }

  void part(const Row& row, int64_t column, int64_t n, KeptRow<acc_t>* kept, Pass pass, SumsOfRow& total) const {
    Classes<acc_t> classes;
    const DenseLse<acc_t>&student = row.relation.student, &teacher = row.relation.teacher;
    acc_t* const slope = pass.keeps ? kept->teacher.exps.data() + column : classes.slope;
    acc_t* const near_q = pass.keeps ? kept->student.exps.data() + column : classes.q;
    const acc_t* z = transformed(args_.student, row.r, column, n, classes.of_student);
    Probabilities<acc_t> q{near_q, 1};
    if (!row.relation.near()) q = kept ? kept_of(student, kept->student, column) : raised(student, z, n, classes.q);
    if (row.divergence) {
      const acc_t* y = transformed(args_.teacher, row.r, column, n, classes.of_teacher);
      with_divergence(args_.kind, [&](auto of) {
        constexpr Divergence kind = of.value;
        const bool has_exps = kept && !kept->has_slopes;
        const auto p = has_exps ? kept_of(teacher, kept->teacher, column) : raised(teacher, y, n, classes.p);
        add(row.relation.near() ? near_sums<kind>(row, z, y, p, n, near_q, slope, classes)
                                : sums<kind>(row, z, y, q, p, n, slope),
            pass, total);
      });
    } else {
      std::fill(slope, slope + n, acc_t(0));
    }
    if (pass.gradient) write_part(row, column, n, q, slope);
  }

  template <Divergence kind>
  typename Classes<acc_t>::Sums near_sums(const Row& row, const acc_t* z, const acc_t* y, const Probabilities<acc_t>& p,
                                          int64_t n, acc_t* q, acc_t* slope, Classes<acc_t>& classes) const {
    const acc_t log_ratio = row.relation.log_ratio;
    return classes.relate(z, y, row.relation, n, q)
               ? classes.template compare_near<kind, true>(args_.beta, log_ratio, p, row.by, n, q, slope)
               : classes.template compare_near<kind, false>(args_.beta, log_ratio, p, row.by, n, q, slope);
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

  void add(typename Classes<acc_t>::Sums of_part, Pass pass, SumsOfRow& total) const {
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

}  // namespace cpu
}  // namespace sparse_ce
