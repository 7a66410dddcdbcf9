// Sums are made of lines: columns of a row, side by side. Where the columns are kept each has a sum of its own; where
// they are reduced they go round kColumns sums, which are added up in the end.
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
constexpr int64_t kLines = 64;     // lines whose sums are added in the arithmetic dtype before they go into float64
constexpr int64_t kFewItems = 32;  // with fewer of them rows are shared too. Results depend on it, not on the threads
constexpr int64_t kTogether = 4;  // lines of kept columns that are added at a time: sums are read less often

// Columns that are worked on side by side. The loops over them have a constant length: of a loop of any length g++ 12
// makes code that converts bytes six times slower (AVX-512).
constexpr int64_t kColumns = 64;

// Bytes from the columns that are added to those that are fetched: two streams, the input and the mask, are more than
// the processor fetches well by itself (8192 x 4096 float32, 2 threads of an EPYC, 2026-11: 4.3 ms instead of 5.4).
constexpr int64_t kAhead = 2048;

// What a line's columns have as weights: bytes, numbers or the same for all of them.
template <typename acc_t>
struct Same {
  acc_t value;
  SCE_HD acc_t operator[](int64_t) const { return value; }
};
template <typename weights_t>
constexpr bool kDiffer = std::is_pointer_v<weights_t>;

template <typename weights_t>
SCE_HD weights_t weights_at(const MaskedMeanArgs& args, int64_t place) {
  if constexpr (kDiffer<weights_t>)
    return static_cast<weights_t>(args.mask) + place;
  else
    return {load_number<decltype(weights_t::value)>(args.mask, args.mask_dtype, place)};
}

// f(weights), of the type that the columns have, for the instruction set in use. f is marked SCE_INLINE.
template <typename acc_t, typename function_t>
void with_weights(const MaskedMeanArgs& args, const function_t& f) {
  with_instruction_set([&](auto) SCE_INLINE {
    if (args.columns.stride.mask == 0) return f(Same<acc_t>{});
    if (args.mask_dtype == DType::kUInt8) return f(static_cast<const uint8_t*>(nullptr));
    f(static_cast<const acc_t*>(nullptr));
  });
}

template <int64_t lines, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_lanes(const scalar_t* const* x, const weights_t* w, int64_t begin, int64_t lanes,
                      acc_t* __restrict__ sum, acc_t* __restrict__ weight) {
  SCE_SIMD()
  for (int64_t i = 0; i < lanes; ++i) {
    acc_t added = 0, total = 0;
    for (int64_t r = 0; r < lines; ++r) {
      const acc_t a = static_cast<acc_t>(w[r][begin + i]);
      added += MaskedSum<acc_t>::term(to_acc(x[r][begin + i]), a);
      total += a;
    }
    sum[i] += added;
    if (kDiffer<weights_t>) weight[i] += total;
  }
}

// Adds lines of n columns to sum and weight: (n,), or (kColumns,) where the columns are reduced.
template <int64_t lines, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_lines(const scalar_t* const* x, const weights_t* w, int64_t n, bool kept, acc_t* sum, acc_t* weight) {
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) {
    const char* ahead = reinterpret_cast<const char*>(x[0] + i) + kAhead;
    for (int64_t at = 0; lines == 1 && at < kColumns * int64_t(sizeof(scalar_t)); at += 64)
      __builtin_prefetch(ahead + at);
    add_lanes<lines>(x, w, i, kColumns, sum + (kept ? i : 0), weight + (kept ? i : 0));
  }
  add_lanes<lines>(x, w, i, n - i, sum + (kept ? i : 0), weight + (kept ? i : 0));
}

// An item is a share of the lines behind one output, or behind those of a line where the columns are kept.
struct Plan {
  int64_t width;  // columns of a line; the last of a row may be shorter
  int64_t per_row;  // lines behind an output
  int64_t blocks;  // lines of outputs
  int64_t lines, per_part, parts, items;

  explicit Plan(const MaskedMeanArgs& args) {
    const bool kept = args.columns_kept();
    width = std::min(args.columns.size, kept ? kTile : kSpan);
    const int64_t count = divide_up(args.columns.size, width);
    per_row = kept ? 1 : count;
    blocks = kept ? count : 1;
    lines = args.rows.size * per_row;
    const int64_t groups = args.outer.size * blocks, wanted = divide_up(kFewItems, groups);
    per_part = std::max(kSpan / width, kept ? divide_up(lines, wanted) : 1);
    parts = divide_up(lines, per_part);
    items = groups * parts;
  }
  // Outputs of an item.
  int64_t outputs(const MaskedMeanArgs& args) const { return args.columns_kept() ? width : 1; }
};

// Adds an item to total (its outputs,).
template <typename scalar_t, typename weights_t>
SCE_HD void sum_item(const MaskedMeanArgs& args, const Plan& plan, int64_t item, MaskedSum<double>* total) {
  using acc_t = acc_type<scalar_t>;
  acc_t sum[kTile], weight[kTile], same;
  const scalar_t* x[kTogether];
  weights_t w[kTogether];
  const bool kept = args.columns_kept();
  const int64_t group = item / plan.parts, end = std::min((item % plan.parts + 1) * plan.per_part, plan.lines);
  int64_t line = item % plan.parts * plan.per_part, row = line / plan.per_row;
  const Place from = Place{}.moved(args.outer.stride, group / plan.blocks);
  // Where a row has several lines, an item has one of them alone.
  const int64_t column = (group % plan.blocks + line % plan.per_row) * plan.width;
  const int64_t n = std::min(plan.width, args.columns.size - column), sums = kept ? n : std::min(n, kColumns);
  while (line < end) {
    std::fill_n(sum, sums, acc_t(0));
    std::fill_n(weight, sums, acc_t(0));
    int64_t waiting = 0;
    same = 0;
    for (const int64_t last = std::min(line + (kept ? kLines : plan.per_part), end); line < last; ++line, ++row) {
      const Place place = from.moved(args.rows.stride, row).moved(args.columns.stride, column);
      w[waiting] = weights_at<weights_t>(args, place.mask);
      if constexpr (!kDiffer<weights_t>) {
        if (w[waiting].value == 0) continue;  // it is not read
        same += w[waiting].value * static_cast<acc_t>(kept ? 1 : n);
      }
      x[waiting++] = static_cast<const scalar_t*>(args.input) + place.input;
      if (kept && waiting < kTogether) continue;
      if (kept)
        add_lines<kTogether>(x, w, n, kept, sum, weight);
      else
        add_lines<1>(x, w, n, kept, sum, weight);
      waiting = 0;
    }
    for (int64_t k = 0; k < waiting; ++k) add_lines<1>(x + k, w + k, n, kept, sum, weight);
    if (kept) {
      for (int64_t i = 0; i < n; ++i) total[i].merge(MaskedSum<acc_t>{sum[i], weight[i] + same});
      continue;
    }
    for (int64_t half, lanes = sums; lanes > 1; lanes = half) {
      half = (lanes + 1) / 2;
      for (int64_t i = half; i < lanes; ++i) sum[i - half] += sum[i], weight[i - half] += weight[i];
    }
    total->merge(MaskedSum<acc_t>{*sum, *weight + same});
  }
}

template <typename scalar_t>
void forward(const MaskedMeanArgs& args) {
  const Plan plan(args);
  const int64_t outputs = plan.outputs(args), most = std::min(plan.per_part, plan.lines) * plan.width;
  const auto add = [&](int64_t item, MaskedSum<double>* total) {
    with_weights<acc_type<scalar_t>>(
        args, [&](auto w) SCE_INLINE { sum_item<scalar_t, decltype(w)>(args, plan, item, total); });
  };
  const auto finish = [&](int64_t group, const MaskedSum<double>* total) {
    const int64_t first = group % plan.blocks * plan.width, n = std::min(outputs, args.width() - first);
    const int64_t out = group / plan.blocks * args.outer.stride.out + first;
    for (int64_t i = 0; i < n; ++i) args.finish<scalar_t>(out + i, total[i]);
  };
  std::vector<MaskedSum<double>> partial(static_cast<size_t>(plan.parts > 1 ? plan.items * outputs : 0));
  torch::stable::parallel_for(0, plan.items, std::max<int64_t>(1, kGrain / most), [&](int64_t begin, int64_t end) {
    std::vector<MaskedSum<double>> own(static_cast<size_t>(outputs));
    for (int64_t item = begin; item < end; ++item) {
      std::fill(own.begin(), own.end(), MaskedSum<double>{});
      add(item, plan.parts > 1 ? partial.data() + item * outputs : own.data());
      if (plan.parts == 1) finish(item, own.data());
    }
  });
  for (int64_t group = 0; plan.parts > 1 && group < plan.items / plan.parts; ++group) {
    MaskedSum<double>* total = partial.data() + group * plan.parts * outputs;
    for (int64_t p = 1; p < plan.parts; ++p)
      for (int64_t i = 0; i < outputs; ++i) total[i].merge(total[p * outputs + i]);
    finish(group, total);
  }
}

template <typename acc_t, typename share_t, typename weights_t, typename scalar_t>
SCE_HD void write_lanes(const share_t share, const weights_t w, int64_t begin, int64_t lanes,
                        scalar_t* __restrict__ gradient) {
  SCE_SIMD()
  for (int64_t i = begin; i < begin + lanes; ++i)
    from_acc(MaskedSum<acc_t>::term(share[i], static_cast<acc_t>(w[i])), gradient[i]);
}

// Writes n columns of a row of the gradient.
template <typename scalar_t, typename weights_t>
SCE_HD void write_line(const MaskedMeanArgs& args, const Place& place, int64_t n) {
  using acc_t = acc_type<scalar_t>;
  const weights_t w = weights_at<weights_t>(args, place.mask);
  const auto write = [&](auto share) SCE_INLINE {
    scalar_t* gradient = static_cast<scalar_t*>(args.grad_input) + place.input;
    int64_t i = 0;
    for (; i + kColumns <= n; i += kColumns) write_lanes<acc_t>(share, w, i, kColumns, gradient);
    write_lanes<acc_t>(share, w, i, n - i, gradient);
  };
  const acc_t* share = static_cast<const acc_t*>(args.share) + place.out;
  if (args.columns_kept()) return write(share);
  write(Same<acc_t>{*share});
}

template <typename scalar_t>
void backward(const MaskedMeanArgs& args) {
  const int64_t width = std::min(args.columns.size, kTile), per_row = divide_up(args.columns.size, width);
  const int64_t per_outer = args.rows.size * per_row, grain = kGrain / width;
  torch::stable::parallel_for(0, args.outer.size * per_outer, grain, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const int64_t row = line % per_outer / per_row, column = line % per_row * width;
      const Place place = Place{}.moved(args.outer.stride, line / per_outer).moved(args.rows.stride, row);
      with_weights<acc_type<scalar_t>>(args, [&](auto w) SCE_INLINE {
        write_line<scalar_t, decltype(w)>(args, place.moved(args.columns.stride, column),
                                          std::min(width, args.columns.size - column));
      });
    }
  });
}

}  // namespace

void masked_mean(const MaskedMeanArgs& args) {
  with_storage(args.dtype, [&](auto storage) { forward<decltype(storage)>(args); });
}

void masked_mean_backward(const MaskedMeanArgs& args) {
  with_storage(args.dtype, [&](auto storage) { backward<decltype(storage)>(args); });
}

}  // namespace cpu
}  // namespace sparse_ce
