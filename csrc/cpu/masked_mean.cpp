// Accumulates lines, which are the columns of a row. If the columns are kept, each one has its own sum. If they are
// reduced, they are distributed over kColumns sums, which are added at the end.
#include "../ops/masked_mean.h"
#include "rows/row_loops.h"
#include "simd/tile.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kRows = 64;  // rows that are summed in the arithmetic dtype before they are added to float64 sums
constexpr int64_t kFewItems = 32;  // with fewer items rows are split too; results depend on it, not on the threads
constexpr int64_t kTogether = 4;  // lines of kept columns that are added together, so that sums are loaded less often

// Columns are processed in groups of constant length. For loops of variable length, g++ 12 generates code that converts
// bytes six times slower (AVX-512).
constexpr int64_t kColumns = 64;

// Prefetch distance in bytes. The hardware prefetcher does not keep up with two streams, the input and the mask (8192 x
// 4096 float32, 2 threads of an EPYC, 2026-11: 4.3 ms instead of 5.4).
constexpr int64_t kAhead = 2048;

// Holds the weights of a row's columns: a pointer to bytes or numbers, or one weight for all columns.
template <typename acc_t>
struct Same {
  acc_t value;
  SCE_HD acc_t operator[](int64_t) const { return value; }
};

// Calls f(set, item, weights_at) for all items, compiled for the instruction set in use. weights_at maps places in the
// mask to weights. f is marked SCE_INLINE.
template <typename acc_t, typename function_t>
void for_items(const MaskedMeanArgs& args, const MaskedMeanPlan& plan, const function_t& f) {
  parallel_rows(plan.items, plan.height * plan.width, [&](int64_t begin, int64_t end) {
    with_instruction_set([&](auto set) SCE_INLINE {
      const auto run = [&](const auto& weights_at) SCE_INLINE {
        for (int64_t i = begin; i < end; ++i) f(set, plan.item(args, i), weights_at);
      };
      const bool differ = args.columns.stride.mask != 0;
      if (differ && args.mask_dtype == DType::kUInt8)
        return run([&](int64_t i) SCE_INLINE { return static_cast<const uint8_t*>(args.mask) + i; });
      if (differ) return run([&](int64_t i) SCE_INLINE { return static_cast<const acc_t*>(args.mask) + i; });
      run([&](int64_t i) SCE_INLINE { return Same<acc_t>{load_number<acc_t>(args.mask, args.mask_dtype, i)}; });
    });
  });
}

// Calls f(begin, lanes) for n columns in groups of kColumns; the last group may be smaller.
template <typename function_t>
SCE_HD void for_columns(int64_t n, const function_t& f) {
  int64_t i = 0;
  for (; i + kColumns <= n; i += kColumns) f(i, kColumns);
  f(i, n - i);
}

// Adds lines of n columns to sum and weight, which are (n,), or (kColumns,) if the columns are reduced.
template <InstructionSet set, bool kept, int64_t lines, typename scalar_t, typename weights_t, typename acc_t>
SCE_HD void add_lines(const scalar_t* const* x, const weights_t* w, int64_t n, acc_t* sum, acc_t* weight) {
  const auto add = [=](int64_t begin, int64_t lanes) SCE_INLINE {
    const char* ahead = reinterpret_cast<const char*>(x[0] + begin) + kAhead;
    for (int64_t at = 0; lines == 1 && at < lanes * int64_t(sizeof(scalar_t)); at += 64) __builtin_prefetch(ahead + at);
    acc_t* const __restrict__ sums = sum + (kept ? begin : 0);
    acc_t* const __restrict__ weights = weight + (kept ? begin : 0);
    SCE_SIMD()
    for (int64_t i = 0; i < lanes; ++i) {
      acc_t added = 0, total = 0;
      for (int64_t r = 0; r < lines; ++r) {
        const acc_t a = static_cast<acc_t>(w[r][begin + i]);
        added += MaskedSum<acc_t>::term(to_acc(x[r][begin + i]), a);
        total += a;
      }
      sums[i] += added;
      if (std::is_pointer_v<weights_t>) weights[i] += total;
    }
  };
  Outlined<set>::call([&]() SCE_INLINE { for_columns(n, add); });
}

// Adds the sums of at most kRows rows, or of a whole item if the columns are reduced, to float64 sums.
template <InstructionSet set, typename scalar_t, typename weights_at_t>
SCE_HD void sum_item(const MaskedMeanArgs& args, const MaskedMeanPlan& plan, const MaskedMeanPlan::Item& item,
                     const weights_at_t& weights_at, MaskedSum<double>* partial) {
  using acc_t = acc_type<scalar_t>;
  using weights_t = decltype(weights_at(0));
  acc_t sum[kTile], weight[kTile];
  double sums[kTile], weights[kTile];
  const scalar_t* x[kTogether];
  weights_t w[kTogether];
  const bool kept = args.columns_kept();
  const int64_t n = item.columns, lanes = kept ? n : std::min(n, kColumns), outputs = kept ? n : 1;
  for (double* all : {sums, weights}) std::fill_n(all, outputs, 0.0);
  for (int64_t row = 0; row < item.rows;) {
    for (acc_t* all : {sum, weight}) std::fill_n(all, lanes, acc_t(0));
    acc_t same = 0;
    int64_t waiting = 0;
    for (const int64_t last = kept ? std::min(row + kRows, item.rows) : item.rows; row < last; ++row) {
      const Place at = item.place.moved(args.rows.stride, row);
      w[waiting] = weights_at(at.mask);
      if constexpr (!std::is_pointer_v<weights_t>) {
        if (w[waiting].value == 0) continue;  // masked rows are not read
        same += w[waiting].value * static_cast<acc_t>(kept ? 1 : n);
      }
      x[waiting++] = static_cast<const scalar_t*>(args.input) + at.input;
      if (!kept) add_lines<set, false, 1>(x, w, n, sum, weight), waiting = 0;
      if (waiting == kTogether) add_lines<set, true, kTogether>(x, w, n, sum, weight), waiting = 0;
    }
    for (int64_t k = 0; k < waiting; ++k) add_lines<set, true, 1>(x + k, w + k, n, sum, weight);
    for (int64_t half, left = kept ? 1 : lanes; left > 1; left = half) {
      half = (left + 1) / 2;
      for (int64_t k = half; k < left; ++k) sum[k - half] += sum[k], weight[k - half] += weight[k];
    }
    for (int64_t c = 0; c < outputs; ++c) sums[c] += sum[c], weights[c] += weight[c] + same;
  }
  for (int64_t c = 0; c < outputs; ++c) plan.put<scalar_t>(args, item, c, {sums[c], weights[c]}, partial);
}

}  // namespace

void masked_mean(const MaskedMeanArgs& args) {
  const bool kept = args.columns_kept();
  const int64_t rows = args.rows.size, columns = args.columns.size, width = std::min(columns, kept ? kTile : kSpan);
  const int64_t parts = kept ? divide_up(kFewItems, args.outer.size * divide_up(columns, width)) : rows;
  const MaskedMeanPlan plan(args, std::max(kSpan / width, divide_up(rows, parts)), width);
  const int64_t outputs = plan.parts > 1 ? args.outputs() : 0;  // partial results are merged
  std::vector<MaskedSum<double>> partial(static_cast<size_t>(plan.parts * outputs));
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    for_items<acc_type<scalar_t>>(args, plan, [&](auto set, const auto& item, const auto& weights_at) SCE_INLINE {
      sum_item<decltype(set)::value, scalar_t>(args, plan, item, weights_at, partial.data());
    });
    MaskedSum<double>* total = partial.data();
    for (int64_t p = 1; p < plan.parts; ++p)
      for (int64_t out = 0; out < outputs; ++out) total[out].merge(total[p * outputs + out]);
    for (int64_t out = 0; out < outputs; ++out) args.finish<scalar_t>(out, total[out]);
  });
}

void masked_mean_backward(const MaskedMeanArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    using acc_t = acc_type<scalar_t>;
    for_items<acc_t>(args, MaskedMeanPlan(args, 1, kSpan),
                     [&](auto, const auto& item, const auto& weights_at) SCE_INLINE {
                       const auto w = weights_at(item.place.mask);
                       scalar_t* gradient = static_cast<scalar_t*>(args.grad_input) + item.place.input;
                       const auto write = [&](auto share) SCE_INLINE {
                         for_columns(item.columns, [=](int64_t begin, int64_t lanes) SCE_INLINE {
                           SCE_SIMD()
                           for (int64_t i = begin; i < begin + lanes; ++i)
                             from_acc(MaskedSum<acc_t>::term(share[i], static_cast<acc_t>(w[i])), gradient[i]);
                         });
                       };
                       const acc_t* share = static_cast<const acc_t*>(args.share) + item.place.out;
                       if (args.columns_kept()) return write(share);
                       write(Same<acc_t>{*share});
                     });
  });
}

}  // namespace cpu
}  // namespace sparse_ce
