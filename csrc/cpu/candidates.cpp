// Computes the logits of a linear head at a few ids per row. Most time is spent on the rows of the weight: each is read
// once, from random positions in memory, and is prefetched while the previous rows are processed.
#include "../ops/candidates.h"
#include "../torch_calls.h"
#include "instruction_set.h"

#include <algorithm>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

// With fewer products than this, waking a thread does not pay off.
constexpr int64_t kGrain = 16384;

// This many rows of the weight are processed together, so that each element of the input is loaded once for all.
constexpr int64_t kTogether = 4;

template <typename weight_t>
using Together = const weight_t* [kTogether];

// Computes dots[k] = <x, rows[k]> and prefetches rows of the same length at `next`. The lane of an element does not
// depend on n.
template <int64_t n, typename acc_t, typename weight_t>
SCE_HD void dot_rows(const acc_t* x, const Together<weight_t>& rows, const Together<weight_t>& next, int64_t width,
                     acc_t* dots) {
  acc_t lanes[n][kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    for (int64_t k = 0; k < n; ++k) {
      __builtin_prefetch(next[k] + c);
      SCE_SIMD()
      for (int64_t l = 0; l < kLanes; ++l) lanes[k][l] += x[c + l] * to_acc(rows[k][c + l]);
    }
  }
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t l = 0; l < width - c; ++l) lanes[k][l] += x[c + l] * to_acc(rows[k][c + l]);
    dots[k] = sum_of_lanes(lanes[k]);
  }
}

// Computes total += sum_k d[k] rows[k].
template <int64_t n, typename acc_t, typename weight_t>
SCE_HD void add_rows(const acc_t* d, const Together<weight_t>& rows, const Together<weight_t>& next, int64_t width,
                     acc_t* __restrict total) {
  const auto add = [&](int64_t i) SCE_INLINE {
    acc_t sum = total[i];
    for (int64_t k = 0; k < n; ++k) sum += d[k] * to_acc(rows[k][i]);
    total[i] = sum;
  };
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    for (int64_t k = 0; k < n; ++k) __builtin_prefetch(next[k] + c);
    SCE_SIMD()
    for (int64_t l = 0; l < kLanes; ++l) add(c + l);
  }
  for (; c < width; ++c) add(c);
}

// Holds the entries of a row that have a class.
struct RowEntries {
  std::vector<int64_t> entries, columns;

  size_t size() const { return entries.size(); }
  void clear() { entries.clear(), columns.clear(); }
  void push(int64_t i, int64_t column) { entries.push_back(i), columns.push_back(column); }
};

// Calls f(rows, next, k, Count) for the entries [k, k + Count) of a row, with pointers to their weights and to those of
// the entries that follow.
template <typename weight_t, typename args_t, typename function_t>
SCE_HD void for_each_few(const args_t& args, const RowEntries& now, const RowEntries& after, const function_t& f) {
  const size_t size = now.size();
  const auto weight_of = [&](size_t k) SCE_INLINE {  // beyond the end of both, any valid row
    const int64_t column = k < size                  ? now.columns[k]
                           : k < size + after.size() ? after.columns[k - size]
                                                     : now.columns[size - 1];
    return args.template weight_row<weight_t>(column);
  };
  size_t k = 0;
  const auto few = [&](auto count) SCE_INLINE {
    constexpr int64_t n = decltype(count)::value;
    Together<weight_t> rows, next;
    for (size_t j = 0; j < n; ++j) rows[j] = weight_of(k + j), next[j] = weight_of(k + n + j);
    f(rows, next, k, count);
    k += n;
  };
  while (k + kTogether <= size) few(std::integral_constant<int64_t, kTogether>{});
  while (k < size) few(std::integral_constant<int64_t, 1>{});
}

// Distributes whole rows over threads. `collect(r, entries)` finds the entries of a row. `work(r, entries, after,
// buffer)` gets them, the entries of the next row, and memory for a row of the input.
template <typename acc_t, typename collect_t, typename work_t>
void for_rows(const CandidateArgs& args, const collect_t& collect, const work_t& work) {
  const int64_t rows = args.target.rows, per_row = args.width * args.target.entries / std::max<int64_t>(1, rows);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, per_row));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    RowEntries now, after;
    std::vector<acc_t> buffer(static_cast<size_t>(args.width));
    collect(begin, after);
    for (int64_t r = begin; r < end; ++r) {
      std::swap(now, after);
      after.clear();
      if (r + 1 < end) collect(r + 1, after);
      work(r, now, after, buffer.data());
    }
  });
}

// Returns the row of the input in the arithmetic dtype, in place or in `buffer`.
template <typename input_t, typename acc_t>
SCE_HD const acc_t* converted(const input_t* row, int64_t width, acc_t* buffer) {
  if constexpr (std::is_same_v<input_t, acc_t>) return row;
  SCE_SIMD()
  for (int64_t c = 0; c < width; ++c) buffer[c] = to_acc(row[c]);
  return buffer;
}

template <typename input_t, typename weight_t>
void forward(const CandidateForwardArgs& args) {
  using acc_t = acc_type<input_t>;
  const LogitTransform<acc_t> transform(args.options);
  const auto collect = [&](int64_t r, RowEntries& entries) {
    const EntryRange range = args.target.row(r);
    const bool ignored = args.target.ignored(r);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t column = ignored ? TargetView::kPadding : args.target.template column<acc_t>(i);
      column < 0 ? args.template write_none<acc_t>(i, column) : entries.push(i, column);
    }
  };
  for_rows<acc_t>(args, collect, [&](int64_t r, const RowEntries& now, const RowEntries& after, acc_t* buffer) {
    if (now.size() == 0) return;
    with_instruction_set([&](auto) SCE_INLINE {
      const acc_t* x = converted(args.template input_row<input_t>(r), args.width, buffer);
      for_each_few<weight_t>(args, now, after,
                             [&](const auto& rows, const auto& next, size_t k, auto count) SCE_INLINE {
                               constexpr int64_t n = decltype(count)::value;
                               acc_t dots[n];
                               dot_rows<n>(x, rows, next, args.width, dots);
                               for (size_t j = 0; j < n; ++j)
                                 args.write(now.entries[k + j], now.columns[k + j], dots[j], transform);
                             });
    });
  });
}

template <typename input_t, typename weight_t>
void backward(const CandidateBackwardArgs& args) {
  using acc_t = acc_type<input_t>;
  const LogitTransform<acc_t> transform(args.options);
  const auto collect = [&](int64_t r, RowEntries& entries) {
    if (args.target.ignored(r)) return;
    const EntryRange range = args.target.row(r);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const CandidateGradient<acc_t> gradient = args.gradient(i, transform);
      if (gradient.column < 0) continue;
      if (args.ids) args.keep(i, r, gradient);
      entries.push(i, gradient.column);
    }
  };
  for_rows<acc_t>(args, collect, [&](int64_t r, const RowEntries& now, const RowEntries& after, acc_t* total) {
    if (!args.grad_input) return;
    std::fill(total, total + args.width, acc_t(0));
    with_instruction_set([&](auto) SCE_INLINE {
      for_each_few<weight_t>(args, now, after,
                             [&](const auto& rows, const auto& next, size_t k, auto count) SCE_INLINE {
                               constexpr int64_t n = decltype(count)::value;
                               acc_t d[n];
                               for (size_t j = 0; j < n; ++j) d[j] = args.gradient(now.entries[k + j], transform).d;
                               add_rows<n>(d, rows, next, args.width, total);
                             });
      input_t* out = static_cast<input_t*>(args.grad_input) + r * args.width;
      SCE_SIMD()
      for (int64_t c = 0; c < args.width; ++c) from_acc(total[c], out[c]);
    });
  });
}

// A thread processes the ids that begin in its share of the entries.
template <typename input_t, typename weight_t>
void weight_gradient(const CandidateWeightArgs& args) {
  using acc_t = acc_type<input_t>;
  const int64_t width = args.grad_weight ? args.width : 0;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
  torch::stable::parallel_for(0, args.entries, grain, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> buffer(static_cast<size_t>(width));
    acc_t* __restrict total = buffer.data();
    with_instruction_set([&](auto) SCE_INLINE {
      for (int64_t p = begin; p < end; ++p) {
        if (!args.begins(p)) continue;
        acc_t of_bias = 0;
        for (int64_t c = 0; c < width; ++c) total[c] = 0;
        for (int64_t q = p; args.ids[q] == args.ids[p]; ++q) {
          const int64_t i = args.order[q];
          const acc_t d = static_cast<const acc_t*>(args.grad_logits)[i];
          const input_t* x = static_cast<const input_t*>(args.input) + args.rows[i] * args.input_stride;
          of_bias += d;
          SCE_SIMD()
          for (int64_t c = 0; c < width; ++c) total[c] += d * to_acc(x[c]);
        }
        if (args.grad_bias) args.write_bias(p, of_bias);
        if (width == 0) continue;
        weight_t* out = static_cast<weight_t*>(args.grad_weight) + args.gradient_row(p) * width;
        SCE_SIMD()
        for (int64_t c = 0; c < width; ++c) from_acc(total[c], out[c]);
      }
    });
  });
}

}  // namespace

void candidate_logits(const CandidateForwardArgs& args) {
  with_head(args.input_dtype, args.weight_dtype, [&](auto x, auto w) { forward<decltype(x), decltype(w)>(args); });
}

void candidate_logits_backward(const CandidateBackwardArgs& args) {
  with_head(args.input_dtype, args.weight_dtype, [&](auto x, auto w) { backward<decltype(x), decltype(w)>(args); });
}

void candidate_weight_gradient(const CandidateWeightArgs& args) {
  with_head(args.input_dtype, args.weight_dtype,
            [&](auto x, auto w) { weight_gradient<decltype(x), decltype(w)>(args); });
}

}  // namespace cpu
}  // namespace sparse_ce
