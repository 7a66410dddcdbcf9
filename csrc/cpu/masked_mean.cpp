#include "../masked_mean.h"
#include "tile.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kGrain = 16384;  // fewer elements than this are not worth waking a thread for
constexpr int64_t kRows = 64;      // rows whose sums are added in the arithmetic dtype before they go into float64
constexpr int64_t kFewItems = 32;  // with fewer of them rows are shared too. Results depend on it, not on the threads
constexpr int64_t kTogether = 4;  // rows that are added at a time: the sums are read and written a quarter as often

// Columns that are worked on side by side. The loops over them have a constant length: of a loop of any length g++ 12
// makes code that converts bytes six times slower (AVX-512).
constexpr int64_t kColumns = 64;

// Bytes from the columns that are added to those that are fetched: two streams, the input and the mask, are more than
// the processor fetches well by itself (8192 x 4096 float32, 2 threads of an EPYC, 2026-11: 4.3 ms instead of 5.4).
constexpr int64_t kAhead = 2048;

// What a row's columns have as weights: bytes, numbers or the same for all of them. `read` finds those of n columns
// from a place of the mask on, and says whether some may differ from 0. They may be converted, into `numbers` (kTile,).
template <typename acc_t>
struct Same {
  acc_t value;
  SCE_HD acc_t operator[](int64_t) const { return value; }
};
template <typename acc_t>
SCE_HD bool read(const MaskedMeanArgs& args, int64_t place, int64_t, acc_t*, Same<acc_t>& weights) {
  weights.value = load_number<acc_t>(args.mask, args.mask_dtype, place);
  return weights.value != acc_t(0);
}
template <typename acc_t>
SCE_HD bool read(const MaskedMeanArgs& args, int64_t place, int64_t, acc_t*, const uint8_t*& weights) {
  weights = static_cast<const uint8_t*>(args.mask) + place;
  return true;
}
template <typename acc_t>
SCE_HD bool read(const MaskedMeanArgs& args, int64_t place, int64_t n, acc_t* numbers, const acc_t*& weights) {
  const bool direct = args.mask_dtype == (sizeof(acc_t) == 8 ? DType::kFloat64 : DType::kFloat32);
  weights = direct ? static_cast<const acc_t*>(args.mask) + place : numbers;
  if (direct) return true;
  for (int64_t i = 0; i < n; ++i) numbers[i] = load_number<acc_t>(args.mask, args.mask_dtype, place + i);
  return true;
}

template <typename weights_t>
constexpr bool kDiffer = std::is_pointer_v<weights_t>;
template <typename weights_t>  // columns that are worked on at a time
constexpr int64_t kStep = kDiffer<weights_t> && !std::is_same_v<weights_t, const uint8_t*> ? kTile : kSpan;

template <typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void sum_lanes(const scalar_t* x, const weights_t w, int64_t begin, int64_t lanes, acc_t* __restrict__ sum,
                      acc_t* __restrict__ weight) {
  SCE_SIMD()
  for (int64_t i = 0; i < lanes; ++i) {
    const acc_t a = static_cast<acc_t>(w[begin + i]);
    sum[i] += MaskedSum<acc_t>::term(to_acc(x[begin + i]), a);
    weight[i] += a;
  }
}

template <typename scalar_t, typename weights_t, typename acc_t = acc_type<scalar_t>>
SCE_HD MaskedSum<acc_t> sum_columns(const scalar_t* x, const weights_t w, int64_t n) {
  acc_t sum[kColumns] = {}, weight[kColumns] = {};
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) {
    const char* ahead = reinterpret_cast<const char*>(x + i) + kAhead;
    for (int64_t line = 0; line < kColumns * int64_t(sizeof(scalar_t)); line += 64) __builtin_prefetch(ahead + line);
    sum_lanes(x, w, i, kColumns, sum, weight);
  }
  sum_lanes(x, w, i, n - i, sum, weight);
  for (int64_t half = kColumns / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half], weight[lane] += weight[lane + half];
  return {sum[0], weight[0]};
}

template <int64_t rows, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_lanes(const scalar_t* const* x, const weights_t* w, int64_t begin, int64_t lanes,
                      acc_t* __restrict__ sum, acc_t* __restrict__ weight) {
  SCE_SIMD()
  for (int64_t i = begin; i < begin + lanes; ++i) {
    acc_t added = 0, total = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const acc_t a = static_cast<acc_t>(w[r][i]);
      added += MaskedSum<acc_t>::term(to_acc(x[r][i]), a);
      total += a;
    }
    sum[i] += added;
    if (kDiffer<weights_t>) weight[i] += total;
  }
}

// Adds rows to sum (n,) and, of weights that differ along a row, to weight (n,).
template <int64_t rows, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_rows(const scalar_t* const* x, const weights_t* w, int64_t n, acc_t* sum, acc_t* weight) {
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) add_lanes<rows>(x, w, i, kColumns, sum, weight);
  add_lanes<rows>(x, w, i, n - i, sum, weight);
}

template <typename acc_t, typename share_t, typename weights_t, typename scalar_t>
SCE_HD void write_lanes(const share_t share, const weights_t w, int64_t begin, int64_t lanes,
                        scalar_t* __restrict__ gradient) {
  SCE_SIMD()
  for (int64_t i = begin; i < begin + lanes; ++i)
    from_acc(MaskedSum<acc_t>::term(share[i], static_cast<acc_t>(w[i])), gradient[i]);
}

template <typename acc_t, typename share_t, typename weights_t, typename scalar_t>
SCE_HD void write_columns(const share_t share, const weights_t w, int64_t n, scalar_t* gradient) {
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) write_lanes<acc_t>(share, w, i, kColumns, gradient);
  write_lanes<acc_t>(share, w, i, n - i, gradient);
}

// An item is a share of the elements behind one output, or behind up to kTile outputs side by side where the columns
// are kept. Units are what it counts: spans of columns, or rows.
struct Plan {
  int64_t spans, blocks, units, units_per_part, parts, items, item_elements;

  explicit Plan(const MaskedMeanArgs& args) {
    spans = args.columns_kept ? 1 : (args.columns + kSpan - 1) / kSpan;
    blocks = args.columns_kept ? (args.columns + kTile - 1) / kTile : 1;
    units = args.rows.count * spans;
    const int64_t size = std::min(args.columns, args.columns_kept ? kTile : kSpan), groups = args.outer.count * blocks;
    units_per_part = std::max<int64_t>(1, kSpan / size);
    if (args.columns_kept) {
      const int64_t wanted = (kFewItems + groups - 1) / groups;
      units_per_part = std::max(units_per_part, (units + wanted - 1) / wanted);
    }
    parts = (units + units_per_part - 1) / units_per_part;
    items = groups * parts;
    item_elements = units_per_part * size;
  }
};

// Adds the units [begin, end) from a place on to total (1,).
template <typename scalar_t, typename weights_t>
SCE_HD void sum_along(const MaskedMeanArgs& args, const Plan& plan, const Place& from, int64_t begin, int64_t end,
                      MaskedSum<double>* total) {
  acc_type<scalar_t> numbers[kTile];
  weights_t w;
  for (int64_t unit = begin; unit < end; ++unit) {
    const Place row = args.rows.at(unit / plan.spans).moved(from, 1);
    const int64_t first = unit % plan.spans * kSpan, last = std::min(first + kSpan, args.columns);
    for (int64_t c = first; c < last; c += kStep<weights_t>) {
      const int64_t n = std::min(kStep<weights_t>, last - c);
      if (read(args, row.mask + c * args.column.mask, n, numbers, w))
        total->merge(sum_columns(static_cast<const scalar_t*>(args.input) + row.input + c, w, n));
    }
  }
}

// Adds the rows [begin, end) of n <= kTile columns from a place on to total (n,).
template <typename scalar_t, typename weights_t>
SCE_HD void sum_across(const MaskedMeanArgs& args, const Place& from, int64_t n, int64_t begin, int64_t end,
                       MaskedSum<double>* total) {
  using acc_t = acc_type<scalar_t>;
  acc_t sum[kTile], weight[kTile], numbers[kTogether][kTile];
  const scalar_t* x[kTogether];
  weights_t w[kTogether];
  for (int64_t first = begin; first < end; first += kRows) {
    std::fill_n(sum, n, acc_t(0));
    std::fill_n(weight, n, acc_t(0));
    acc_t same = 0;
    int64_t rows = 0;
    for (int64_t r = first; r < std::min(first + kRows, end); ++r) {
      const Place place = args.rows.at(r).moved(from, 1);
      if (!read(args, place.mask, n, numbers[rows], w[rows])) continue;
      if constexpr (!kDiffer<weights_t>) same += w[rows].value;
      x[rows++] = static_cast<const scalar_t*>(args.input) + place.input;
      if (rows < kTogether) continue;
      add_rows<kTogether>(x, w, n, sum, weight);
      rows = 0;
    }
    for (int64_t r = 0; r < rows; ++r) add_rows<1>(x + r, w + r, n, sum, weight);
    for (int64_t i = 0; i < n; ++i) total[i].merge(MaskedSum<acc_t>{sum[i], weight[i] + same});
  }
}

// Adds an item to total (its outputs,).
template <typename scalar_t, typename weights_t>
SCE_HD void sum_item(const MaskedMeanArgs& args, const Plan& plan, int64_t item, MaskedSum<double>* total) {
  const int64_t group = item / plan.parts, begin = item % plan.parts * plan.units_per_part;
  const int64_t end = std::min(begin + plan.units_per_part, plan.units), first = group % plan.blocks * kTile;
  const Place from = args.outer.at(group / plan.blocks).moved(args.column, first);
  if (args.columns_kept)
    sum_across<scalar_t, weights_t>(args, from, std::min(kTile, args.columns - first), begin, end, total);
  else
    sum_along<scalar_t, weights_t>(args, plan, from, begin, end, total);
}

// Writes a span of a row of the gradient.
template <typename scalar_t, typename weights_t>
SCE_HD void write_span(const MaskedMeanArgs& args, int64_t row, int64_t first) {
  using acc_t = acc_type<scalar_t>;
  acc_t numbers[kTile];
  weights_t w;
  const Place place = args.outer.at(row / args.rows.count).moved(args.rows.at(row % args.rows.count), 1);
  const acc_t* share = static_cast<const acc_t*>(args.share) + place.out;
  scalar_t* gradient = static_cast<scalar_t*>(args.grad_input) + place.input;
  const int64_t last = std::min(first + kSpan, args.columns);
  for (int64_t c = first; c < last; c += kStep<weights_t>) {
    const int64_t n = std::min(kStep<weights_t>, last - c);
    read(args, place.mask + c * args.column.mask, n, numbers, w);
    if (args.columns_kept)
      write_columns<acc_t>(share + c, w, n, gradient + c);
    else
      write_columns<acc_t>(Same<acc_t>{*share}, w, n, gradient + c);
  }
}

// f(weights), of the type that the columns have.
template <typename acc_t, typename function_t>
SCE_HD void with_weights(const MaskedMeanArgs& args, const function_t& f) {
  if (args.column.mask == 0) return f(Same<acc_t>{});
  if (args.mask_dtype == DType::kUInt8) return f(static_cast<const uint8_t*>(nullptr));
  f(static_cast<const acc_t*>(nullptr));
}

template <typename scalar_t>
void add_item(const MaskedMeanArgs& args, const Plan& plan, int64_t item, MaskedSum<double>* total) {
  with_instruction_set([&](auto) SCE_INLINE {
    with_weights<acc_type<scalar_t>>(
        args, [&](auto weights) SCE_INLINE { sum_item<scalar_t, decltype(weights)>(args, plan, item, total); });
  });
}

template <typename scalar_t>
void write_unit(const MaskedMeanArgs& args, int64_t row, int64_t first) {
  with_instruction_set([&](auto) SCE_INLINE {
    with_weights<acc_type<scalar_t>>(
        args, [&](auto weights) SCE_INLINE { write_span<scalar_t, decltype(weights)>(args, row, first); });
  });
}

template <typename scalar_t>
void forward(const MaskedMeanArgs& args) {
  const Plan plan(args);
  const int64_t width = std::min(args.width(), kTile), grain = std::max<int64_t>(1, kGrain / plan.item_elements);
  std::vector<MaskedSum<double>> partial(static_cast<size_t>(plan.parts > 1 ? plan.items * width : 0));
  const auto finish = [&](int64_t group, const MaskedSum<double>* total) {
    const int64_t first = group % plan.blocks * kTile, n = std::min(width, args.width() - first);
    const Place place = args.outer.at(group / plan.blocks).moved(args.column, first);
    for (int64_t i = 0; i < n; ++i) args.finish<scalar_t>(place.out + i, total[i]);
  };
  torch::stable::parallel_for(0, plan.items, grain, [&](int64_t begin, int64_t end) {
    std::vector<MaskedSum<double>> own(static_cast<size_t>(width));
    for (int64_t item = begin; item < end; ++item) {
      if (plan.parts > 1) {
        add_item<scalar_t>(args, plan, item, partial.data() + item * width);
        continue;
      }
      std::fill_n(own.data(), width, MaskedSum<double>{});
      add_item<scalar_t>(args, plan, item, own.data());
      finish(item, own.data());
    }
  });
  for (int64_t group = 0; plan.parts > 1 && group < plan.items / plan.parts; ++group) {
    MaskedSum<double>* total = partial.data() + group * plan.parts * width;
    for (int64_t p = 1; p < plan.parts; ++p)
      for (int64_t i = 0; i < width; ++i) total[i].merge(total[p * width + i]);
    finish(group, total);
  }
}

}  // namespace

void masked_mean(const MaskedMeanArgs& args) {
  with_storage(args.dtype, [&](auto storage) { forward<decltype(storage)>(args); });
}

void masked_mean_backward(const MaskedMeanArgs& args) {
  const int64_t spans = (args.columns + kSpan - 1) / kSpan, units = args.outer.count * args.rows.count * spans;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(args.columns, kSpan));
  with_storage(args.dtype, [&](auto storage) {
    torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit)
        write_unit<decltype(storage)>(args, unit / spans, unit % spans * kSpan);
    });
  });
}

}  // namespace cpu
}  // namespace sparse_ce
