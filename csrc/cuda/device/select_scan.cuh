// select_scan.cuh - Computes the statistics of select for a part of a row.
#pragma once

#include "../../ops/select.h"
#include "entry_bitmap.cuh"
#include "row_passes.cuh"

namespace sparse_ce {
namespace cuda {

// Represents the columns [begin, end) of a row. They are computed again for each scan, which has no registers for them.
struct ColumnsOfRow {
  int64_t row, begin, end;
};
__device__ inline ColumnsOfRow columns_of(const CrossEntropyArgs& args, int64_t item, int64_t splits) {
  const int64_t first = args.first_class, columns = args.classes();
  if (splits == 1) return {item, first, first + columns};
  const auto [r, split] = part_of(item, splits);
  return {r, first + split_begin(columns, splits, split), first + split_begin(columns, splits, split + 1)};
}

// Adds the logits of one thread to the statistics that the outputs request. With `outside`, marked columns, which have
// entries, are left out of all sums but `total`.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
struct SelectScan {
  __device__ SelectScan(const SelectArgs& args, int64_t r, bool outside)
      : row(args.template row<scalar_t>(r)), transform(args.template transform<acc_t>(r)),
        class_weight(static_cast<const acc_t*>(args.target.weight)), outside(outside),
        smooth(args.needs_smoothing() && !outside), spread(args.needs_spread()), total(args.outputs.mean_logit),
        argmax(args.outputs.argmax), ranked(args.template ranked_if_requested<acc_t>(r, row)), rank(ranked.compares()) {
    stats.above = ranked.none_above();
  }

  // Adds the pack of the columns from c on, of which bit i of `marked` marks column c + i.
  __device__ __forceinline__ void add_pack(const Pack<scalar_t>& pack, int64_t c, unsigned marked) {
    const Pack<scalar_t> packs[] = {pack};
    acc_t z[Pack<scalar_t>::kSize];
    if (rank) {
      to_numbers(pack, z);
      add_above(z);
    }
    by_softcap(transform, [&](const auto& of_logit) { to_logits(packs, Count<1>{}, of_logit, z); });
    add(z, c, marked);
  }
  __device__ __forceinline__ void add_column(int64_t c, unsigned marked) {
    acc_t z[] = {to_acc(row[c])};
    if (rank) add_above(z);
    z[0] = transform(z[0]);
    add(z, c, marked);
  }

  const scalar_t* row;
  OnlineSelect<acc_t> stats;

 private:
  template <int n>
  __device__ __forceinline__ void add_above(const acc_t (&x)[n]) {
    for (int i = 0; i < n; ++i) stats.above += ranked.is_above(x[i]);
  }

  template <int n>
  __device__ __forceinline__ void add(acc_t (&z)[n], int64_t c, unsigned marked) {
    if (total)
      for (int i = 0; i < n; ++i) stats.total += z[i];
    if (outside)
      for (int i = 0; i < n; ++i) z[i] = marked >> i & 1u ? -acc_t(INFINITY) : z[i];
    if (argmax) find_highest(z, c);
    if (spread)
      stats.push_spread(z);
    else
      stats.push(z);
    if (smooth) stats.push_weighted(z, class_weight ? class_weight + c : nullptr, n);
  }

  template <int n>
  __device__ __forceinline__ void find_highest(const acc_t (&z)[n], int64_t c) {
    acc_t highest = stats.highest();
    for (int i = 0; i < n; ++i) {
      if (z[i] > highest) stats.argmax = c + i;
      highest = larger(z[i], highest);
    }
  }

  LogitTransform<acc_t> transform;
  const acc_t* class_weight;
  bool outside, smooth, spread, total, argmax;
  Ranked<acc_t> ranked;
  bool rank;
};

// Scans a part of a row with one thread of a group. `outside` excludes the entries' classes.
template <int kWidth, typename scalar_t, typename part_t, typename acc_t = acc_type<scalar_t>>
__device__ SelectStats<acc_t> scan_select(const SelectArgs& args, const part_t& part, bool outside) {
  const auto [r, begin, end] = part();
  const auto range = [&] { return args.target.row(part().row); };
  SelectScan<scalar_t> scan(args, r, outside);
  const auto add_window = [&](int64_t from, int64_t to, const auto& marked) {
    const auto add_packs = [&](int64_t c, auto count) {
      constexpr int n = decltype(count)::value, kStride = kWidth * Pack<scalar_t>::kSize;
      Pack<scalar_t> packs[n];
      load_packs<kStride>(scan.row + c, count, packs);
#pragma unroll
      for (int u = 0; u < n; ++u) {
        if (!count.has(u)) break;
        scan.add_pack(packs[u], c + u * kStride, marked(c + u * kStride));
      }
    };
    const auto add_column = [&](int64_t c) { scan.add_column(c, marked(c)); };
    for_columns<kWidth, kGeneralUnroll>(scan.row, from, to, true, add_packs, add_column);
  };
  for_windows<kWidth, acc_t>(outside, args.target, range, begin, end, -1, add_window);
  return scan.stats.finish();
}

// Reduces a group's scan of the columns part() to lane 0. If S is excluded, `total` in `all` covers only the classes
// outside S.
template <int kWidth, typename scalar_t, typename part_t, typename acc_t = acc_type<scalar_t>>
__device__ Scanned<acc_t> scan(const SelectArgs& args, const part_t& part) {
  using Group = RowGroup<kWidth>;
  Scanned<acc_t> out;
  if (args.plain()) {
    const auto [r, begin, end] = part();
    const Ranked<acc_t> ranked = args.ranked_if_requested<acc_t>(r, args.template row<scalar_t>(r));
    const bool compares = ranked.compares();
    SelectStats<acc_t> stats;
    stats.above = ranked.none_above();
    stats.row = scan_row<kWidth, scalar_t>(args, r, begin, end, [&](const auto& x, auto count) {
      constexpr int kSize = sizeof(x) / sizeof(acc_t) / decltype(count)::value;
      if (!compares) return;
#pragma unroll
      for (int u = 0; u < decltype(count)::value; ++u) {
        if (!count.has(u)) break;
#pragma unroll
        for (int e = 0; e < kSize; ++e) stats.above += Ranked<acc_t>::is_above(x[u * kSize + e], ranked.logit, false);
      }
    });
    out.all = Group::reduce(stats);
    return out;
  }
  SCE_SHARED(acc_t, tails, [Group::kPerBlock][2]);  // of lane 0, which has no registers for them during the next scan
  acc_t(&tail)[2] = tails[threadIdx.x / kWidth];
  bool outside = args.needs_tail();
#pragma unroll 1
  while (true) {
    out.all = Group::reduce(scan_select<kWidth, scalar_t>(args, part, outside));
    if (!outside) break;
    if (Group::rank() == 0) tail[0] = out.all.row.max, tail[1] = out.all.row.rest;
    if (!args.needs_smoothing()) break;
    outside = false;  // smoothing is relative to the maximum of all classes
  }
  if (args.needs_tail() && Group::rank() == 0) out.tail.max = tail[0], out.tail.rest = tail[1];
  return out;
}

}  // namespace cuda
}  // namespace sparse_ce
