// Computes a divergence of a student from a teacher, and its gradient. A thread processes all spans of a row in turn,
// while the row is in its cache.
#include "rows/dense_rows.h"

namespace sparse_ce {
namespace cpu {
namespace {

// Processes a row. merged(total, f) calls f(span) for all spans of the row and merges the results in order. `kept` is
// memory for a row, or null if the statistics are known.
template <typename acc_t, typename merged_t>
void run_row(const DenseDivergenceArgs& args, const DenseRows<acc_t>& rows, int64_t r, KeptRow<acc_t>* kept,
             const merged_t& merged) {
  auto row = rows.begin(r);
  if (args.writes_stats())
    rows.write(row, merged(StatsOfRow<acc_t>{}, [&](int64_t t) { return rows.stats(row, t, kept); }));
  if (args.step == DenseStep::kStatistics) return;
  rows.read_stats(row);
  if (args.writes_sums()) rows.write_label_loss(row);
  const bool both = args.step == DenseStep::kWithGradient;
  if (both) rows.read_coefficients(row);  // those of q follow from the sums unless these are known
  if (args.writes_sums()) rows.guess(row, kept);
  bool one_pass = both && args.knows_slopes() && row.writes && !row.relation.near() &&
                  (!args.overwrites() || rows.is_far(row, kept));
  bool keeps = both && row.writes && !one_pass;
  if (kept) kept->has_slopes = false;
  if (args.writes_sums()) {
    SumsOfRow sums;
    do {
      if (row.relation.near()) {
        one_pass = false;
        keeps = both && row.writes && row.relation.corrected;  // the gradient needs the final log_ratio
      }
      sums = merged(SumsOfRow{}, [&](int64_t t) { return rows.span(row, t, kept, {true, keeps, one_pass}); });
      if (keeps) kept->has_slopes = true;
    } while (rows.again(row, sums));
    rows.write(row, sums);
  }
  if (one_pass || !args.writes_gradient()) return;
  rows.read_coefficients(row);
  merged(SumsOfRow{}, [&](int64_t t) {
    if (!keeps) return rows.span(row, t, kept, {false, false, true});
    rows.write_kept(row, t, *kept);
    return SumsOfRow{};
  });
}

template <typename acc_t>
void run(const DenseDivergenceArgs& args) {
  const DenseRows<acc_t> rows(args);
  const int64_t spans = rows.spans();
  const bool keeps = args.writes_stats() && args.writes_sums();
  const auto memory = [&](KeptRow<acc_t>& kept) {
    if (keeps) kept.student.resize(args.classes), kept.teacher.resize(args.classes);
    return keeps ? &kept : nullptr;
  };
  if (split_rows(args.rows, spans)) {
    KeptRow<acc_t> kept;
    KeptRow<acc_t>* const of_row = memory(kept);
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
    KeptRow<acc_t> kept;
    KeptRow<acc_t>* const of_row = memory(kept);
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
