#include "../sparse_softmax.h"
#include "tile.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

// Fewer elements than this are not worth waking a thread for.
constexpr int64_t kGrain = 16384;

template <bool log, typename scalar_t, typename acc_t>
SCE_HD void normalize_body(const scalar_t* values, int64_t n, const SoftmaxRow<acc_t> row, scalar_t* result) {
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) from_acc(row.template at<log>(to_acc(values[i])), result[i]);
}

template <bool log, typename scalar_t>
SCE_HD void gradient_body(const scalar_t* grad, const scalar_t* output, int64_t n, scalar_t* result) {
  using acc_t = acc_type<scalar_t>;
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kTile)
    sum += sum_in_lanes<acc_t>(begin, begin + kTile < n ? begin + kTile : n, [&](int64_t i) {
      return SoftmaxGradient<acc_t>::template term<log>(to_acc(grad[i]), to_acc(output[i]));
    });
  const SoftmaxGradient<acc_t> row{static_cast<acc_t>(sum)};
  SCE_SIMD()
  for (int64_t i = 0; i < n; ++i) from_acc(row.template at<log>(to_acc(grad[i]), to_acc(output[i])), result[i]);
}

template <typename scalar_t>
void forward_row(const scalar_t* values, int64_t n, bool log, scalar_t* result) {
  using acc_t = acc_type<scalar_t>;
  const LogitTransform<acc_t> identity{LossOptions{}};
  RowStats<acc_t> stats;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t m = std::min(kSpan, n - begin);
    stats.merge(Tile<scalar_t>::stats(values + begin, m, identity, false, nullptr, values + begin));
  }
  const SoftmaxRow<acc_t> row(stats);
  with_instruction_set([&](auto) SCE_INLINE {
    log ? normalize_body<true>(values, n, row, result) : normalize_body<false>(values, n, row, result);
  });
}

// Calls f(inputs..., n, result) for each row, all of them pointers to n elements. Rows that are scattered, by an order
// or by the width of each entry, are gathered first. A thread takes the rows that begin in its share of the entries.
template <typename scalar_t, typename function_t, typename... inputs_t>
void for_rows(const SparseSoftmaxArgs& args, const function_t& f, const inputs_t*... inputs) {
  scalar_t* result = static_cast<scalar_t*>(args.result);
  const auto first_row = [&](int64_t entry) {  // that begins at the entry or later
    int64_t low = 0, high = args.rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      args.row_begin(middle) < entry ? low = middle + 1 : high = middle;
    }
    return low;
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / args.width);
  torch::stable::parallel_for(0, args.entries, grain, [&](int64_t first, int64_t last) {
    std::vector<scalar_t> buffer;
    for (int64_t r = first_row(first), end = first_row(last); r < end; ++r) {
      const int64_t begin = args.row_begin(r), n = args.row_begin(r + 1) - begin;
      if (!args.order && args.width == 1) {
        f((inputs + begin)..., n, result + begin);
        continue;
      }
      buffer.resize(static_cast<size_t>(n) * (1 + sizeof...(inputs)));
      for (int64_t d = 0; d < args.width; ++d) {
        scalar_t* free = buffer.data();
        const auto gather = [&](const scalar_t* from) {
          scalar_t* to = free;
          for (int64_t i = 0; i < n; ++i) to[i] = from[args.at(begin + i) * args.width + d];
          free += n;
          return static_cast<const scalar_t*>(to);
        };
        const std::array<const scalar_t*, sizeof...(inputs)> rows{gather(inputs)...};
        std::apply([&](auto... row) { f(row..., n, free); }, rows);
        for (int64_t i = 0; i < n; ++i) result[args.at(begin + i) * args.width + d] = free[i];
      }
    }
  });
}

}  // namespace

void sparse_softmax(const SparseSoftmaxArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    for_rows<scalar_t>(
        args, [&](const scalar_t* values, int64_t n, scalar_t* result) { forward_row(values, n, args.log, result); },
        static_cast<const scalar_t*>(args.values));
  });
}

void sparse_softmax_backward(const SparseSoftmaxArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    for_rows<scalar_t>(
        args,
        [&](const scalar_t* grad, const scalar_t* output, int64_t n, scalar_t* result) {
          with_instruction_set([&](auto) SCE_INLINE {
            args.log ? gradient_body<true>(grad, output, n, result) : gradient_body<false>(grad, output, n, result);
          });
        },
        static_cast<const scalar_t*>(args.grad), static_cast<const scalar_t*>(args.output));
  });
}

}  // namespace cpu
}  // namespace sparse_ce
