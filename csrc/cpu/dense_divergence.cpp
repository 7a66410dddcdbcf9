// Processes each row in spans of columns: statistics of both rows, sums over their classes, and the gradient. A thread
// processes all spans of a row in turn, while the row is in its cache. Within a span, each loop over a part of the
// columns is compiled once, not once for each divergence and dtype.
#include "../ops/dense_divergence.h"
#include "rows/row_loops.h"
#include "simd/tile.h"

#include <algorithm>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kPart = 512;  // columns that are processed at a time, in arrays that fit into the L1 cache

// Reads up to kPart logits from `column` on.
template <typename acc_t>
void load(const DenseLogits& x, int64_t r, int64_t column, int64_t n, acc_t* to) {
  with_storage(x.dtype, [&](auto storage) {
    const auto* from = static_cast<const decltype(storage)*>(x.data) + r * x.row_stride + column * x.column_stride;
    if (x.column_stride == 1) {
      with_instruction_set([&](auto) SCE_INLINE {
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<acc_t>(to_acc(from[i]));
      });
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<acc_t>(to_acc(from[i * x.column_stride]));
    }
  });
}

// Turns up to kPart logits into log-probabilities.
template <typename acc_t>
void to_log_probs(const acc_t* x, int64_t n, const LogitTransform<acc_t>& transform, const DenseLse<acc_t>& lse,
                  acc_t* log_probs) {
  with_instruction_set([&](auto) SCE_INLINE {
    if (transform.softcap == acc_t(0)) {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) log_probs[i] = lse.log_prob(transform.scale * x[i]);
    } else {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i)
        log_probs[i] = lse.log_prob(transform.softcap * tanh_of(transform.scale_per_cap * x[i]));
    }
  });
}

// Stores up to kPart numbers.
template <typename acc_t>
void store(const acc_t* x, int64_t n, DType dtype, void* to) {
  with_storage(dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    if constexpr (std::is_same_v<acc_type<scalar_t>, acc_t>) {
      with_instruction_set([&](auto) SCE_INLINE {
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) from_acc(x[i], static_cast<scalar_t*>(to)[i]);
      });
    }
  });
}

// Multiplies dl/dz by dz/dx.
template <typename acc_t>
void chain(const acc_t* x, int64_t n, const LogitTransform<acc_t>& transform, acc_t* gradient) {
  if (transform.identity()) return;
  with_instruction_set([&](auto) SCE_INLINE {
    if (transform.softcap == acc_t(0)) {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) gradient[i] *= transform.scale;
    } else {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i)
        gradient[i] *= transform.scale * tanh_with_slope(transform.scale_per_cap * x[i]).slope;
    }
  });
}

template <typename acc_t>
double sum(const acc_t* x, int64_t n) {
  return with_instruction_set(
      [&](auto) SCE_INLINE { return double(sum_in_lanes<acc_t, kWideLanes>(0, n, [&](int64_t i) { return x[i]; })); });
}

// Holds what a part of a row's classes contributes.
template <typename acc_t>
struct Classes {
  alignas(64) acc_t log_p[kPart], log_q[kPart], q[kPart];
  acc_t term[kMostDivergences][kPart], slope[kMostDivergences][kPart];

  template <Divergence kind>
  void compare(double beta, int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      const DivergenceOf<kind, acc_t> of(beta);
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) {
        const auto at = of.at(log_p[i], log_q[i]);
        q[i] = at.q;
        for (int k = 0; k < of.kCount; ++k) term[k][i] = at.term[k], slope[k][i] = at.slope[k];
      }
    });
  }

  // Computes q, and terms and slopes of the divergences, from the log-probabilities.
  void compare(Divergence kind, double beta, int64_t n) {
    switch (kind) {
      case Divergence::kForwardKl:
        return compare<Divergence::kForwardKl>(beta, n);
      case Divergence::kReverseKl:
        return compare<Divergence::kReverseKl>(beta, n);
      case Divergence::kJsd:
        return compare<Divergence::kJsd>(beta, n);
      case Divergence::kSkewForward:
        return compare<Divergence::kSkewForward>(beta, n);
      case Divergence::kSkewReverse:
        return compare<Divergence::kSkewReverse>(beta, n);
      case Divergence::kAlpha:
        return compare<Divergence::kAlpha>(beta, n);
      case Divergence::kTv:
        return compare<Divergence::kTv>(beta, n);
      case Divergence::kHellinger:
        return compare<Divergence::kHellinger>(beta, n);
      case Divergence::kSeveral:
        return compare<Divergence::kSeveral>(beta, n);
    }
  }
  // Computes only q.
  void exponentiate(int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) q[i] = exponential(log_q[i]);
    });
  }

  // Computes dl/dz in the place of q.
  void to_gradient(const DenseCoefficients<acc_t>& by, int64_t n) {
    with_instruction_set([&](auto) SCE_INLINE {
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) q[i] *= by.of_q;
      for (int k = 0; k < kMostDivergences; ++k) {
        const acc_t factor = by.of_slope[k];
        if (factor == acc_t(0)) continue;  // its slopes may be infinite
        SCE_SIMD()
        for (int64_t i = 0; i < n; ++i) q[i] += factor * slope[k][i];
      }
    });
  }
};

// Sums over classes. Parts are summed in the arithmetic dtype.
struct Sums {
  double divergence[kMostDivergences] = {}, slope[kMostDivergences] = {};

  void merge(const Sums& other) {
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
    DenseLse<acc_t> student{0, 1}, teacher{0, 1};
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
    acc_t* of_row = static_cast<acc_t*>(args_.stats) + 4 * row.r;
    of_row[0] = row.reads ? stats.student.max : acc_t(0);
    of_row[1] = row.reads ? stats.student.sum : acc_t(0);
    of_row[2] = row.divergence ? stats.teacher.max : acc_t(0);
    of_row[3] = row.divergence ? stats.teacher.sum : acc_t(0);
  }
  void read_stats(Row& row) const {
    const acc_t* of_row = static_cast<const acc_t*>(args_.stats) + 4 * row.r;
    row.student = {of_row[0], of_row[1]};
    row.teacher = {of_row[2], of_row[3]};
  }

  // Writes D and C.
  void write(const Row& row, const Sums& sums) const {
    for (int k = 0; k < count_; ++k) {
      args_.sum<acc_t>(k, row.r) = static_cast<acc_t>(sums.divergence[k]);
      args_.sum<acc_t>(count_ + 1 + k, row.r) = static_cast<acc_t>(sums.slope[k]);
    }
  }
  // Writes the loss of the label. Its logit is read before the gradient overwrites it.
  void write_label_loss(const Row& row) const {
    const int64_t label = args_.label(row.r);
    acc_t z = 0;
    if (label >= 0) load(args_.student, row.r, label, 1, &z);
    const acc_t loss = -row.student.log_prob(args_.student.template transform<acc_t>(row.r)(z));
    args_.sum<acc_t>(count_, row.r) = label >= 0 ? loss : acc_t(0);
  }

  void read_coefficients(Row& row) const {
    row.by = args_.coefficients<acc_t>(row.r);
    row.writes = row.reads && !row.by.zero();
  }

  // Processes a span: returns its sums, and writes its gradient.
  Sums span(const Row& row, int64_t t, bool sums, bool gradient) const {
    const int64_t begin = t * kSpan, end = std::min(begin + kSpan, args_.columns);
    const bool reads = sums ? row.reads : row.writes;
    const int64_t classes_end = reads ? std::max(begin, std::min(end, args_.classes)) : begin;
    Sums total;
    for (int64_t column = begin; column < classes_end; column += kPart)
      part(row, column, std::min(kPart, classes_end - column), sums, gradient, total);
    if (gradient) {
      char* gradients = gradient_row(row.r);
      std::fill(gradients + classes_end * size(), gradients + end * size(), 0);
    }
    return total;
  }

 private:
  int64_t size() const { return size_of(args_.student.dtype); }
  char* gradient_row(int64_t r) const { return static_cast<char*>(args_.grad) + r * args_.grad_row_stride * size(); }

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
        load(x, r, begin + i, m, z);
        stats.merge(Tile<acc_t>::stats(z, m, transform, false, nullptr, z));
      }
    });
    return stats;
  }

  void part(const Row& row, int64_t column, int64_t n, bool sums, bool gradient, Sums& total) const {
    Classes<acc_t> classes;
    acc_t x[kPart];
    const auto transform = args_.student.template transform<acc_t>(row.r);
    load(args_.student, row.r, column, n, x);
    to_log_probs(x, n, transform, row.student, classes.log_q);
    if (row.divergence) {
      load(args_.teacher, row.r, column, n, classes.log_p);
      to_log_probs(classes.log_p, n, args_.teacher.template transform<acc_t>(row.r), row.teacher, classes.log_p);
      classes.compare(args_.kind, args_.beta, n);
      for (int k = 0; sums && k < count_; ++k)
        total.divergence[k] += sum(classes.term[k], n), total.slope[k] += sum(classes.slope[k], n);
    } else {
      classes.exponentiate(n);
    }
    if (!gradient) return;
    classes.to_gradient(row.by, n);
    const int64_t label = args_.label(row.r) - column;
    if (label >= 0 && label < n) classes.q[label] -= row.by.of_label;
    chain(x, n, transform, classes.q);
    store(classes.q, n, args_.student.dtype, gradient_row(row.r) + column * size());
  }

  const DenseDivergenceArgs& args_;
  const int count_;
  const int64_t spans_;
};

// Processes a row. merged(total, f) calls f(span) for all spans of the row and merges the results in order.
template <typename acc_t, typename merged_t>
void run_row(const DenseDivergenceArgs& args, const Rows<acc_t>& rows, int64_t r, const merged_t& merged) {
  auto row = rows.begin(r);
  if (args.writes_stats()) rows.write(row, merged(Stats<acc_t>{}, [&](int64_t t) { return rows.stats(row, t); }));
  if (args.step == DenseStep::kStatistics) return;
  rows.read_stats(row);
  if (args.writes_sums()) rows.write_label_loss(row);
  if (args.step == DenseStep::kWithGradient && args.knows_slopes()) rows.read_coefficients(row);
  const bool one_pass = row.writes;
  if (args.writes_sums()) rows.write(row, merged(Sums{}, [&](int64_t t) { return rows.span(row, t, true, one_pass); }));
  if (one_pass || !args.writes_gradient()) return;
  rows.read_coefficients(row);
  merged(Sums{}, [&](int64_t t) { return rows.span(row, t, false, true); });
}

template <typename acc_t>
void run(const DenseDivergenceArgs& args) {
  const Rows<acc_t> rows(args);
  const int64_t spans = rows.spans();
  if (split_rows(args.rows, spans)) {
    for (int64_t r = 0; r < args.rows; ++r)
      run_row(args, rows, r, [&](auto total, const auto& f) {
        std::vector<decltype(total)> parts(static_cast<size_t>(spans));
        parallel_spans(1, spans, [&](int64_t, int64_t t) { parts[static_cast<size_t>(t)] = f(t); });
        for (const auto& part : parts) total.merge(part);
        return total;
      });
    return;
  }
  parallel_rows(args.rows, args.columns, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      run_row(args, rows, r, [&](auto total, const auto& f) {
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
