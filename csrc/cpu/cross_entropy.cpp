#include "rows/row_loops.h"
#include "rows/row_passes.h"
#include "rows/strided_rows.h"

#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

template <typename scalar_t>
void run_forward(const ForwardArgs& args) {
  using acc_t = acc_type<scalar_t>;
  const Forward<scalar_t> forward(args);
  const int64_t spans = forward.spans();
  if (!split_rows(args.rows, spans)) {
    parallel_rows(args.rows, args.target.num_classes, [&](int64_t begin, int64_t end) {
      RowEntries<acc_t> entries;
      for (int64_t r = begin; r < end; ++r) forward.write(r, std::min(r + 1, end - 1), entries);
    });
    return;
  }
  std::vector<RowStats<acc_t>> partial(args.rows * spans);
  parallel_spans(args.rows, spans, [&](int64_t r, int64_t t) {
    if (!forward.ignored(r)) partial[r * spans + t] = forward.span(r, t, r);
  });
  RowEntries<acc_t> entries;
  for (int64_t r = 0; r < args.rows; ++r) {
    RowStats<acc_t> stats;
    for (int64_t t = 0; t < spans; ++t) stats.merge(partial[r * spans + t]);
    if (!forward.ignored(r)) forward.collect(r, entries);
    forward.sum(r, stats, entries);
  }
}

template <typename scalar_t>
void run_backward(const BackwardArgs& args) {
  const Backward<scalar_t> backward(args);
  const int64_t spans = backward.spans();
  if (!split_rows(args.rows, spans)) {
    parallel_rows(args.rows, args.vocab, [&](int64_t begin, int64_t end) {
      auto plan = backward.empty_plan();
      // Backward runs in reverse order, because the rows that forward read last may still be in a cache.
      for (int64_t r = end - 1; r >= begin; --r) backward.write(r, std::max(begin, r - 1), false, plan);
    });
    return;
  }
  std::vector<typename Backward<scalar_t>::RowPlan> plans(args.rows, backward.empty_plan());
  for (int64_t r = 0; r < args.rows; ++r) backward.make_plan(r, false, plans[r]);
  parallel_spans(args.rows, spans, [&](int64_t r, int64_t t) { backward.write_span(r, t, r, plans[r]); });
  for (int64_t r = 0; r < args.rows; ++r) backward.write_entries(r, plans[r]);
}

// Provides the memory for a row's exponentials between its loss and its gradient. It is the gradient itself, if its
// storage type is the arithmetic dtype and it is written through the caches.
template <typename scalar_t>
class Scratch {
  using acc_t = acc_type<scalar_t>;

 public:
  Scratch(const BackwardArgs& args, bool nontemporal)
      : args_(args), in_gradient_(std::is_same_v<scalar_t, acc_t> && !nontemporal) {}

  Exps<acc_t> row(int64_t r) {
    maxima_.resize(divide_up(args_.vocab, kExpTile));
    if (!in_gradient_) exps_.resize(args_.vocab + kSpare);
    if (args_.options.softcap != 0) slopes_.resize(args_.vocab);
    acc_t* exps = exps_.data();
    if constexpr (std::is_same_v<scalar_t, acc_t>) {
      if (in_gradient_) exps = args_.template gradient_row<scalar_t>(r);
    }
    return {exps, slopes_.empty() ? nullptr : slopes_.data(), maxima_.data()};
  }

 private:
  const BackwardArgs& args_;
  const bool in_gradient_;
  std::vector<acc_t> exps_, slopes_, maxima_;
};

// Computes the gradient of a row right after its loss, while the logits or their exponentials are in the L2 cache.
template <typename scalar_t>
void run_both(const ForwardArgs& forward_args, const BackwardArgs& backward_args) {
  const Forward<scalar_t> forward(forward_args);
  const Backward<scalar_t> backward(backward_args);
  if (split_rows(forward_args.rows, backward.spans())) {
    run_forward<scalar_t>(forward_args);
    run_backward<scalar_t>(backward_args);
    return;
  }
  parallel_rows(forward_args.rows, forward_args.vocab, [&](int64_t begin, int64_t end) {
    auto plan = backward.empty_plan();
    Scratch<scalar_t> scratch(backward_args, backward.stores_nontemporal());
    for (int64_t r = begin; r < end; ++r) {
      const int64_t after = std::min(r + 1, end - 1);
      if (forward.keeps(r)) {
        const auto stored = scratch.row(r);
        forward.write(r, after, plan.entries, stored);
        backward.write_stored(r, stored, plan);
      } else {
        forward.write(r, r, plan.entries);
        backward.write(r, after, true, plan);
      }
    }
  });
}

template <typename scalar_t>
void run_backward_values(const BackwardArgs& args) {
  const Backward<scalar_t> backward(args);
  parallel_rows(args.rows, args.target.entries / std::max<int64_t>(1, args.rows), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) backward.write_values(r);
  });
}

// Rows with fewer classes are faster if vectors span rows instead of classes.
constexpr int64_t kAcross = 25;

// Uses the loops for strided rows if rows are short: adjacent short rows have equal distances too.
template <typename args_t>
args_t short_across(args_t args) {
  const bool all_classes = args.first_class == 0 && args.vocab >= args.target.num_classes;
  if (args.strided.inner > 0 || args.rows == 0 || args.vocab >= kAcross || !all_classes) return args;
  args.strided = {args.rows, 0, 1, args.row_stride};
  if constexpr (std::is_same_v<args_t, BackwardArgs>) args.grad_strided = {args.rows, 0, 1, args.grad_row_stride};
  return args;
}

}  // namespace

void cross_entropy_forward(const ForwardArgs& original) {
  const ForwardArgs args = short_across(original);
  if (args.strided.inner > 0) return strided_forward(args);
  with_storage(args.dtype, [&](auto storage) { run_forward<decltype(storage)>(args); });
}

void cross_entropy_forward_with_gradient(const ForwardArgs& original_forward, const BackwardArgs& original_backward) {
  const ForwardArgs forward = short_across(original_forward);
  const BackwardArgs backward = short_across(original_backward);
  if (forward.strided.inner > 0) return strided_forward_with_gradient(forward, backward);
  with_storage(forward.dtype, [&](auto storage) { run_both<decltype(storage)>(forward, backward); });
}

void cross_entropy_backward(const BackwardArgs& original) {
  if (original.is_up_to_date()) return;
  const BackwardArgs args = short_across(original);
  if (args.strided.inner > 0) return strided_backward(args);
  with_storage(args.dtype, [&](auto storage) { run_backward<decltype(storage)>(args); });
}

void cross_entropy_backward_values(const BackwardArgs& args) {
  if (args.strided.inner > 0) return strided_backward_values(args);
  with_storage(args.dtype, [&](auto storage) { run_backward_values<decltype(storage)>(args); });
}

const char* instruction_set() {
  const InstructionSet set = instruction_set_in_use();
  return set == InstructionSet::kAvx512 ? "avx512" : set == InstructionSet::kAvx2 ? "avx2" : "default";
}

}  // namespace cpu
}  // namespace sparse_ce
