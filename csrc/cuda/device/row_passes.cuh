// row_passes.cuh - Processes a row, or a part of a row, in all kernels that read logits.
//
// Measured on an H100 with 8192 x 128256 bfloat16, relative to the throughput of a copy of the same bytes: 101 % in
// forward and 95 % in backward; with 64 entries per row 99 % and 91 %. Predicted: a gradient whose alignment differs
// from the logits by 8 bytes is as fast; by 4 bytes it takes 1.2-1.4 times as long, by 2 bytes 1.3-1.7 times, because
// sectors are written in that many parts.
#pragma once

#include "../../ops/cross_entropy.h"
#include "classes_of_row.cuh"
#include "online_stats.cuh"
#include "row_group.cuh"

#include <algorithm>

namespace sparse_ce {
namespace cuda {

// Packs in flight per thread: kUnroll if only exp is computed, otherwise kGeneralUnroll.
constexpr int kUnroll = 4, kGeneralUnroll = 2;

// Returns where part `split` of `splits` of the columns [0, columns) begins. Parts consist of whole packs.
__host__ __device__ inline int64_t split_begin(int64_t columns, int64_t splits, int64_t split) {
  const int64_t part = ((columns + splits - 1) / splits + 15) / 16 * 16;
  return split * part < columns ? split * part : columns;
}

// Maps an item to a part of a row, where rows have `splits` parts. Whole rows need no division: a 64-bit division takes
// a hundred instructions and registers that other code needs.
struct RowPart {
  int64_t row, split;
};
__device__ inline RowPart part_of(int64_t item, int64_t splits) {
  if (splits == 1) return {item, 0};
  return {item / splits, item % splits};
}

// Calls f(transform). The softcap is tested once rather than for each logit, so that the arithmetic of different logits
// can overlap.
template <typename acc_t, typename function_t>
__device__ __forceinline__ void by_softcap(LogitTransform<acc_t> transform, const function_t& f) {
  if (transform.softcap != acc_t(0)) return f(transform);
  transform.softcap = 0;  // a constant from here on
  f(transform);
}

// Calls f(transform, weighted), where `weighted` is true if classes have weights.
template <typename acc_t, typename function_t>
__device__ __forceinline__ void by_case(const LogitTransform<acc_t>& transform, bool weighted, const function_t& f) {
  by_softcap(transform, [&](const LogitTransform<acc_t>& of_logit) {
    if (weighted) return f(of_logit, std::true_type{});
    f(of_logit, std::false_type{});
  });
}

// Converts packs to numbers; missing ones are -inf.
template <typename scalar_t, typename acc_t, typename count_t>
__device__ __forceinline__ void to_logits(const Pack<scalar_t> (&packs)[count_t::value], count_t count,
                                          const LogitTransform<acc_t>& transform,
                                          acc_t (&z)[count_t::value * Pack<scalar_t>::kSize]) {
  constexpr int kSize = Pack<scalar_t>::kSize;
#pragma unroll
  for (int u = 0; u < count_t::value; ++u) {
    acc_t x[kSize];
    to_numbers(packs[u], x);
    to_bases(transform, x);
#pragma unroll
    for (int e = 0; e < kSize; ++e) z[u * kSize + e] = count.has(u) ? transform.factor() * x[e] : -acc_t(INFINITY);
  }
}

// Ignores logits.
struct NothingSeen {
  template <typename logits_t, typename count_t>
  __device__ void operator()(const logits_t&, count_t) const {}
};

// Returns the statistics of the columns [begin, end) of row r, for one thread of a group. If logits are not
// transformed, `seen(z, count)` is called with those of each step, of whose packs those in `count` exist.
template <int kWidth, typename scalar_t, typename seen_t = NothingSeen, typename acc_t = acc_type<scalar_t>>
__device__ RowStats<acc_t> scan_row(const ForwardArgs& args, int64_t r, int64_t begin, int64_t end,
                                    const seen_t& seen = {}) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const scalar_t* row = args.template row<scalar_t>(r);
  constexpr int64_t kStride = int64_t(kWidth) * kSize;
  const LogitTransform<acc_t> transform = args.template transform<acc_t>(r);
  OnlineStats<acc_t> stats;

  if (transform.identity() && args.options.label_smoothing == 0) {
    for_columns<kWidth, kUnroll>(
        row, begin, end, true,
        [&](int64_t c, auto count) {
          constexpr int n = decltype(count)::value, logits = n * kSize;
          Pack<scalar_t> packs[n];
          load_packs<kStride>(row + c, count, packs);
          acc_t z[logits];
          to_logits(packs, count, LogitTransform<acc_t>(LossOptions{}), z);
          seen(z, count);
          stats.push(z);
        },
        [&](int64_t c) {
          const acc_t z[] = {to_acc(row[c])};
          seen(z, Count<1>{});
          stats.push(z);
        });
    return stats.finish();
  }

  const bool smooth = args.options.label_smoothing != 0;
  const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
  for_columns<kWidth, kGeneralUnroll>(
      row, begin, end, true,
      [&](int64_t c, auto count) {
        constexpr int n = decltype(count)::value, logits = n * kSize;
        Pack<scalar_t> packs[n];
        load_packs<kStride>(row + c, count, packs);
        acc_t z[logits];
        by_softcap(transform, [&](const auto& of_logit) { to_logits(packs, count, of_logit, z); });
        stats.push(z);
        if (!smooth) return;
#pragma unroll
        for (int u = 0; u < n; ++u) {
          if (!count.has(u)) break;
          if (weight) {
            acc_t o[kSize];
            load_weights(weight + c + u * kStride, o);
            stats.push_weighted(z + u * kSize, o, kSize);
          } else {
            stats.push_weighted(z + u * kSize, nullptr, kSize);
          }
        }
      },
      [&](int64_t c) {
        const acc_t z[] = {transform(to_acc(row[c]))};
        stats.push(z);
        if (smooth) stats.push_weighted(z, weight ? weight + c : nullptr, 1);
      });
  return stats.finish();
}

// Adds the entries to a row's statistics and writes its loss. All threads of the group must call this function; `stats`
// is valid on lane 0.
template <int kWidth, typename row_t, typename acc_t>
__device__ void finish_row(const ForwardArgs& args, int64_t r, bool ignored, const row_t& row,
                           const LogitTransform<acc_t>& transform, const RowStats<acc_t>& stats) {
  using Group = RowGroup<kWidth>;
  TargetSums<LongSum<acc_t>> sums;  // a row may have a hundred thousand entries
  if (!ignored) {
    const EntryRange range = args.target.row(r);
    if (!range.valid) sums.mass.sum = Limits<acc_t>::kNaN;
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const auto entry = args.target.template entry<acc_t>(i);
      sums.add(args.target.share(entry), stats.max,
               [&] { return entry.column < 0 ? stats.max : transform(to_acc(row[entry.column])); });
    }
  }
  const TargetStats<acc_t> target = Group::reduce(sums.template stats<acc_t>());
  if (Group::rank() == 0) args.write(r, ignored, stats, target);
}

// Holds the gradient at an entry. It is computed before the dense pass, which may overwrite the logits, and written
// after it. It is rounded to storage once, so p - 1 with p close to 1 keeps its digits in 16 bits. column is -1 if
// there is nothing to write.
template <typename acc_t>
struct EntryGradient {
  int64_t column;
  acc_t value;
};

// Returns the sum of weight(i) over the entries of a row to all threads of the group, all of which must call this
// function. In a larger block the same number of threads shares the entries, so that the sum has the same bits.
template <int kWidth, typename acc_t, typename weight_t>
__device__ acc_t sum_of_entries(EntryRange range, const weight_t& weight) {
  using Group = RowGroup<kWidth>;
  LongSum<acc_t> sum;
  constexpr int kSharers = kWidth < kThreads ? kWidth : kThreads;
#pragma unroll 1
  for (int64_t i = range.begin + Group::rank(); Group::rank() < kSharers && i < range.end; i += kSharers)
    sum.add(weight(i));
  return Group::broadcast(Group::reduce(Sum<acc_t>{sum.sum})).sum;
}
// Returns the sum of the weights of the loss's entries.
template <int kWidth, typename acc_t>
__device__ acc_t mass_of_row(const TargetView& target, EntryRange range) {
  if (!range.valid) return Limits<acc_t>::kNaN;
  return sum_of_entries<kWidth, acc_t>(range, [&](int64_t i) { return target.share(target.template entry<acc_t>(i)); });
}
// Returns the same without the class that holds most: as a difference, the sum would have few digits.
template <int kWidth, typename acc_t, typename holds_t>
__device__ acc_t mass_of_others(const TargetView& target, EntryRange range, const holds_t& holds_most) {
  return sum_of_entries<kWidth, acc_t>(range, [&](int64_t i) {
    const auto entry = target.template entry<acc_t>(i);
    return holds_most(entry.column) ? acc_t(0) : target.share(entry);
  });
}

// Returns the memory of ClassesOfRow, which follows the gradients of the target's entries.
template <typename acc_t>
__device__ uint32_t* class_slots(const TargetView& target, EntryGradient<acc_t>* entry_gradients) {
  return reinterpret_cast<uint32_t*>(entry_gradients + target.entries);
}

// Finds the entries in the columns [begin, end) that have the same class. All threads of the group must call this
// function.
template <int kWidth, typename acc_t>
using ClassesOfLoss = ClassesOfRow<kWidth, false, true, acc_t>;
template <int kWidth, typename acc_t>
__device__ ClassesOfLoss<kWidth, acc_t> classes_of_row(const TargetView& target, EntryRange range, int64_t begin,
                                                       int64_t end, EntryGradient<acc_t>* entry_gradients) {
  return {target, range, begin, end, class_slots(target, entry_gradients)};
}

// Computes the gradients at the entries in the columns [begin, end). `entry_gradients` has one element per entry of the
// target, which belongs to the group of its row and column. All threads of the group must call this function.
template <int kWidth, typename row_t, typename acc_t>
__device__ void make_entry_gradients(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                                     const LogitTransform<acc_t>& transform,
                                     const ClassesOfLoss<kWidth, acc_t>& classes, EntryRange range, const row_t& row,
                                     int64_t begin, int64_t end, EntryGradient<acc_t>* entry_gradients) {
  using Group = RowGroup<kWidth>;
  const TargetView& target = args.target;
  int64_t most = -1;  // the entry of this thread whose class holds most
  for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
    const int64_t column = target.template entry<acc_t>(i).column;
    if (column < begin || column >= end) continue;  // padding, or an entry of another group
    acc_t sum;
    entry_gradients[i].column = -1;
    if (!classes.sum(i, column, [](int64_t, const Entry<acc_t>& entry) { return entry.value; }, sum)) continue;
    const acc_t o = target.template class_weight<acc_t>(column);
    const auto [z, of_cap] = transform.with_slope(to_acc(row[column]));
    if (c.holds_most(z)) most = i;
    entry_gradients[i] = {column, (c.at(z, o) - c.d * (sum * o)) * (transform.scale * of_cap)};
  }
  if (Group::all(most < 0)) return;
  const auto holds_most = [&](int64_t column) {
    return begin <= column && column < end && c.holds_most(transform(to_acc(row[column])));
  };
  const acc_t others = mass_of_others<kWidth, acc_t>(target, range, holds_most);
  if (most < 0) return;
  const int64_t column = target.index(most);
  const auto [z, of_cap] = transform.with_slope(to_acc(row[column]));
  const acc_t of_z = c.at_most(z, target.template class_weight<acc_t>(column), others);
  entry_gradients[most].value = of_z * (transform.scale * of_cap);
}

// Writes these gradients, after the dense gradient.
template <int kWidth, typename row_t, typename acc_t>
__device__ void write_entry_gradients(const TargetView& target, EntryRange range, int64_t begin, int64_t end,
                                      const EntryGradient<acc_t>* entry_gradients, const row_t& gradient) {
  for (int64_t i = range.begin + RowGroup<kWidth>::rank(); i < range.end; i += kWidth) {
    const int64_t column = target.template entry<acc_t>(i).column;
    if (column < begin || column >= end) continue;
    const EntryGradient<acc_t> entry = entry_gradients[i];
    if (entry.column >= 0) from_acc(entry.value, gradient[entry.column]);
  }
}

// Fills the gradient of the columns [begin, end) with 0.
template <int kWidth, typename scalar_t>
__device__ void write_zeros(scalar_t* gradient, int64_t begin, int64_t end) {
  Pack<scalar_t> zeros;
  std::memset(&zeros, 0, sizeof(zeros));
  for_columns<kWidth, 1>(
      gradient, begin, end, true, [&](int64_t c, auto) { zeros.store(gradient + c); },
      [&](int64_t c) { gradient[c] = zeros.at[0]; });
}

// Writes the gradient of the columns [begin, end) as if no column had an entry; `gradient` may be `row`.
template <int kWidth, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ void write_dense(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                            const LogitTransform<acc_t>& transform, const scalar_t* row, scalar_t* gradient,
                            int64_t begin, int64_t end) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  constexpr int64_t kStride = int64_t(kWidth) * kSize;
  const int width = common_width(row, gradient);

  if (args.plain()) {
    const FoldedGradient<acc_t> plain(c);
    for_columns<kWidth, kUnroll>(
        row, begin, end, true,
        [&](int64_t column, auto count) {
          constexpr int n = decltype(count)::value;
          Pack<scalar_t> packs[n];
          load_packs<kStride>(row + column, count, packs);
#pragma unroll
          for (int u = 0; u < n; ++u) {
            if (!count.has(u)) break;
            acc_t x[kSize];
            to_numbers(packs[u], x);
#pragma unroll
            for (acc_t& of_one : x) of_one = plain.at(of_one);
            from_numbers(x, packs[u]);
            packs[u].store(gradient + column + u * kStride, width);
          }
        },
        [&](int64_t column) { from_acc(plain.at(to_acc(row[column])), gradient[column]); });
    return;
  }

  // Weights are used only with label smoothing; otherwise an infinite weight would be multiplied by 0.
  const acc_t* weight = args.options.label_smoothing == 0 ? nullptr : static_cast<const acc_t*>(args.target.weight);
  by_softcap(transform, [&](const LogitTransform<acc_t>& of_logit) {
    const DenseGradient<acc_t> dense(c, of_logit);
    for_columns<kWidth, kGeneralUnroll>(
        row, begin, end, true,
        [&](int64_t column, auto count) {
          constexpr int n = decltype(count)::value;
          Pack<scalar_t> packs[n];
          load_packs<kStride>(row + column, count, packs);
#pragma unroll
          for (int u = 0; u < n; ++u) {
            if (!count.has(u)) break;
            acc_t x[kSize], o[kSize];
            to_numbers(packs[u], x);
            load_weights(weight ? weight + column + u * kStride : nullptr, o);
            to_bases(of_logit, x);
#pragma unroll
            for (int i = 0; i < kSize; ++i) x[i] = dense.at(x[i], o[i]);
            from_numbers(x, packs[u]);
            packs[u].store(gradient + column + u * kStride, width);
          }
        },
        [&](int64_t column) {
          const acc_t v = of_logit.base(to_acc(row[column]));
          from_acc(dense.at(v, weight ? weight[column] : acc_t(1)), gradient[column]);
        });
  });
}

inline int64_t blocks_of(const CrossEntropyArgs& args, int64_t groups, int per_block) {
  return blocks_for(groups, per_block, args.max_blocks, (int64_t(1) << 31) - 1);
}

}  // namespace cuda
}  // namespace sparse_ce
