// select_kernels.cuh - Defines the kernels of select and their launches, which a source per storage type instantiates.
// Forward reads each logit once; backward reads it once and writes its gradient once. Rows are assigned to threads as
// for the loss. If the classes of a row's entries are excluded from a sum, they are marked in shared memory, one window
// of columns at a time.
#pragma once

#include "../storage_launchers.h"
#include "select_gradient.cuh"
#include "select_scan.cuh"

namespace sparse_ce {
namespace cuda {

// ------------------------------------------------------------------------------------------------ forward

// Writes the outputs of an ignored row; a shard's logits of its entries are 0 already. All threads of the group must
// call this function.
template <int kWidth, typename acc_t>
__device__ void finish_ignored(const SelectArgs& args, int64_t r, const Scanned<acc_t>& scanned, EntryRange range) {
  using Group = RowGroup<kWidth>;
  if (Group::rank() == 0) args.write_row(r, true, false, scanned, TargetStats<acc_t>{});
  if (!args.outputs.log_probs || args.statistics) return;
  auto* log_probs = static_cast<acc_t*>(args.log_probs);
  for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) log_probs[i] = acc_t(0);
}

// Adds the entries to a row's statistics and writes its outputs. All threads of the group must call this function;
// `scanned` is valid on lane 0.
template <int kWidth, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ void finish_selected(const SelectArgs& args, int64_t r, bool ignored, const Scanned<acc_t>& scanned,
                                uint32_t* slots) {
  using Group = RowGroup<kWidth>;
  const scalar_t* row = args.template row<scalar_t>(r);
  const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
  const EntryRange range = args.target.row(r);
  if (ignored) return finish_ignored<kWidth>(args, r, scanned, range);

  const bool inside = args.needs_tail();
  const EntryRange excluded = inside ? range : EntryRange{0, 0, true};
  const ClassesOfRow<kWidth, true, false, acc_t> classes(args.target, excluded, args.first_class, args.classes_end(),
                                                         slots);
  bool valid = range.valid;
  OnlineSelect<acc_t> chosen;
  for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
    const auto entry = args.target.template chosen<acc_t>(i);
    valid = valid && !(entry.column < 0 && entry.value != entry.value);
    if (!inside || !args.holds(entry.column) || !classes.first(i, entry.column)) continue;
    const acc_t z[] = {transform(to_acc(row[entry.column]))};
    const bool before = z[0] == chosen.max && entry.column < chosen.argmax;
    if (z[0] > chosen.highest() || before) chosen.argmax = entry.column;
    chosen.push_spread(z);
  }
  valid = Group::all(valid);
  SelectStats<acc_t> stats = Group::reduce(chosen.finish());
  const RowStats<acc_t> in_set = stats.row;
  if (args.needs_smoothing()) stats = SelectStats<acc_t>();  // `scanned` has all classes then
  stats.merge(scanned.all);
  const RowStats<acc_t> of_row = Group::broadcast(stats.row);

  TargetSums<LongSum<acc_t>> sums;
  for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
    const auto entry = args.target.template chosen<acc_t>(i);
    if (args.outputs.loss && args.holds(entry.column))
      sums.add(args.target.share(entry), of_row.max, [&] { return transform(to_acc(row[entry.column])); });
    if (args.outputs.log_probs) args.write_entry(i, !valid, row, transform, of_row);
  }
  const TargetStats<acc_t> in_loss = Group::reduce(sums.template stats<acc_t>());
  if (Group::rank() == 0) args.write_row(r, false, !valid, Scanned<acc_t>{stats, scanned.tail, in_set}, in_loss);
}

// One group processes a row, or a part of a row. For parts, partial (rows, splits) receives the statistics.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(3))
    select_kernel(SelectArgs args, int64_t splits, Scanned<acc_type<scalar_t>>* partial, uint32_t* slots) {
  using Group = RowGroup<kWidth>;
  for (int64_t item = Group::number(); item < args.rows * splits; item += Group::count()) {
    const bool ignored = args.target.ignored(part_of(item, splits).row);
    Scanned<acc_type<scalar_t>> scanned;
    if (!ignored) scanned = scan<kWidth, scalar_t>(args, [&] { return columns_of(args, item, splits); });
    if (splits == 1)
      finish_selected<kWidth, scalar_t>(args, item, ignored, scanned, slots);
    else if (Group::rank() == 0)
      partial[item] = scanned;
  }
}

// One warp per row merges the parts of select_kernel.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, min_blocks<scalar_t>(3))
    select_merge_kernel(SelectArgs args, int64_t splits, const Scanned<acc_type<scalar_t>>* partial, uint32_t* slots) {
  using Group = RowGroup<kWarp>;
  for (int64_t r = Group::number(); r < args.rows; r += Group::count()) {
    Scanned<acc_type<scalar_t>> mine;
    for (int64_t split = Group::rank(); split < splits; split += kWarp) {
      mine.all.merge(partial[r * splits + split].all);
      mine.tail.merge(partial[r * splits + split].tail);
    }
    mine.all = Group::reduce(mine.all);
    mine.tail = Group::reduce(mine.tail);
    finish_selected<kWarp, scalar_t>(args, r, args.target.ignored(r), mine, slots);
  }
}

// ------------------------------------------------------------------------------------------------ backward

// Does what the loss's backward_kernel does. `kScales` adds the gradient of the scale, which needs whole rows of all
// classes, and so many registers that a multiprocessor holds only two blocks.
template <typename scalar_t, int kWidth, bool kScales>
__global__ void __launch_bounds__(kThreads, kScales ? 2 : min_blocks<scalar_t>(3))
    select_backward_kernel(SelectBackwardArgs args, int64_t splits,
                           EntryGradient<acc_type<scalar_t>>* entry_gradients) {
  using Group = RowGroup<kWidth>;
  using acc_t = acc_type<scalar_t>;
  for (int64_t item = Group::number(); item < args.rows * splits; item += Group::count()) {
    const ColumnsOfRow part = columns_of(args, item, splits);
    const int64_t r = part.row, begin = part.begin, end = part.end;
    const scalar_t* row = args.template row<scalar_t>(r);
    scalar_t* gradient = args.template gradient_row<scalar_t>(r);
    if (part_of(item, splits).split == splits - 1) write_zeros<kWidth>(gradient, args.classes_end(), args.vocab);

    const bool ignored = args.target.ignored(r);
    const EntryRange range = args.target.row(r);
    LongSum<acc_t> mass, grad_sum;
    bool without = ignored || (range.valid && args.template without_row_gradient<acc_t>(r));
    if (!ignored) {
      if (!range.valid) grad_sum.sum = Limits<acc_t>::kNaN;
      for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
        const auto entry = args.target.template chosen<acc_t>(i);
        if (entry.column < 0) {
          if (entry.value != entry.value && !without) grad_sum.add(entry.value);  // an index out of range
          continue;
        }
        const acc_t g = args.template grad_output_of_entry<acc_t>(i);
        without = without && g == acc_t(0);
        grad_sum.add(g);
        if (args.grad_loss) mass.add(args.target.share(entry));
      }
    }
    if (Group::all(without)) {
      write_zeros<kWidth>(gradient, begin, end);
      if (kScales && Group::rank() == 0) static_cast<acc_t*>(args.grad_scale)[r] = acc_t(0);
      continue;
    }
    const auto sums = Group::broadcast(Group::reduce(TargetStats<acc_t>{grad_sum.sum, mass.sum}));
    const SelectCoefficients<acc_t> c = args.select_coefficients(r, sums.mass, sums.dot);
    const SelectCoefficients<acc_t> inside = c.of_classes(/*inside=*/true);

    const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
    const auto weight = [&](int64_t i, const Entry<acc_t>& entry) {
      return (args.grad_loss ? c.d * args.target.share(entry) : acc_t(0)) -
             args.template grad_output_of_entry<acc_t>(i);
    };
    const ClassesOfRow<kWidth, true, true, acc_t> classes(args.target, range, begin, end,
                                                          class_slots(args.target, entry_gradients));
    LongSum<acc_t> of_scale;
    const acc_t common = kScales ? args.template common_logit<acc_t>(r) : acc_t(0);
    SCE_SHARED(EntryGradient<acc_t>, hidden, [Group::kPerBlock]);  // of a class that holds most without an entry
    EntryGradient<acc_t>& of_hidden = hidden[threadIdx.x / kWidth];
    if (Group::rank() == 0) of_hidden.column = -1;
    const auto holds_most = [&](int64_t column) {
      return begin <= column && column < end && c.holds_most(transform(to_acc(row[column])));
    };
    int64_t most = -1;  // the entry of this thread whose class holds most
    const auto derive = [&](EntryGradient<acc_t>& to, int64_t column, const auto& derivative_at) {
      const acc_t x = to_acc(row[column]);
      const auto [z, of_cap] = transform.with_slope(x);
      const acc_t derivative = derivative_at(z, args.target.template class_weight<acc_t>(column));
      if (kScales) of_scale.add(args.scale_term(derivative * of_cap, x, common));
      to = {column, derivative * (transform.scale * of_cap)};
    };
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int64_t column = args.target.template chosen<acc_t>(i).column;
      if (column < begin || column >= end) continue;  // padding, or an entry of another group
      acc_t sum;
      entry_gradients[i].column = -1;
      if (!classes.sum(i, column, weight, sum)) continue;
      if (holds_most(column))
        most = i;
      else
        derive(entry_gradients[i], column, [&](acc_t z, acc_t o) { return inside.at(z, o) - sum; });
    }
    if (!Group::all(most < 0)) {
      const acc_t others = sum_of_entries<kWidth, acc_t>(range, [&](int64_t i) {
        const auto entry = args.target.template chosen<acc_t>(i);
        return entry.column < 0 || holds_most(entry.column) ? acc_t(0) : weight(i, entry);
      });
      if (most >= 0)
        derive(entry_gradients[most], args.target.index(most),
               [&](acc_t z, acc_t o) { return inside.at_most(z, o, others); });
    } else if (c.of_squares != acc_t(0) && c.collision > acc_t(-0.5)) {  // the dense pass would lose its digits
      Group::sync();  // of_hidden is -1
      const int64_t column = column_of_most<kWidth>(c, transform, row, begin, end);
      if (column >= 0) derive(of_hidden, column, [&](acc_t z, acc_t o) { return c.at_most(z, o, c.a - c.other); });
    }
    Group::sync();  // all logits at the entries have been read
    if (kScales || c.more())
      of_scale.add(write_select<kWidth, kScales>(args, c, transform, r, row, gradient, begin, end, common,
                                                 kScales ? of_hidden.column : -1));
    else
      write_dense<kWidth>(args, c, transform, row, gradient, begin, end);
    Group::sync();  // the dense gradient has been written
    if (Group::rank() == 0 && of_hidden.column >= 0) from_acc(of_hidden.value, gradient[of_hidden.column]);
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int64_t column = args.target.template chosen<acc_t>(i).column;
      if (column < begin || column >= end) continue;
      const EntryGradient<acc_t> entry = entry_gradients[i];
      if (entry.column >= 0) from_acc(entry.value, gradient[entry.column]);
    }
    if (!kScales) continue;
    const acc_t total = Group::reduce(Sum<acc_t>{of_scale.sum}).sum;
    if (Group::rank() == 0)
      static_cast<acc_t*>(args.grad_scale)[r] = (total + args.scale_of_all(common, c, c.d * sums.mass - sums.dot)) *
                                                static_cast<acc_t>(args.options.logit_scale);
  }
}

// ------------------------------------------------------------------------------------------------ launchers

template <typename scalar_t>
cudaError_t SelectLauncher<scalar_t>::forward(const SelectArgs& args, const Plan& plan, void* parts, uint32_t* slots,
                                              cudaStream_t stream) {
  auto* partial = static_cast<Scanned<acc_type<scalar_t>>*>(parts);
  auto kernel = plan.width == kWarp ? select_kernel<scalar_t, kWarp> : select_kernel<scalar_t, kThreads>;
  const cudaError_t error = launch(stream, plan.blocks, kThreads, kernel, args, plan.splits, partial, slots);
  if (error != cudaSuccess || plan.splits == 1) return error;
  return launch(stream, blocks_of(args, args.rows, kThreads / kWarp), kThreads, select_merge_kernel<scalar_t>, args,
                plan.splits, partial, slots);
}

template <typename scalar_t>
cudaError_t SelectLauncher<scalar_t>::backward(const SelectBackwardArgs& args, const Plan& plan, void* workspace,
                                               cudaStream_t stream) {
  auto* entries = static_cast<EntryGradient<acc_type<scalar_t>>*>(workspace);
  const auto run = [&](auto scales) {
    auto kernel = plan.width == kWarp ? select_backward_kernel<scalar_t, kWarp, decltype(scales)::value>
                                      : select_backward_kernel<scalar_t, kThreads, decltype(scales)::value>;
    return launch(stream, plan.blocks, kThreads, kernel, args, plan.splits, entries);
  };
  return args.grad_scale ? run(std::true_type()) : run(std::false_type());
}

}  // namespace cuda
}  // namespace sparse_ce
