#include "../ops/sparse_softmax.h"
#include "../torch_calls.h"
#include "simd/tile.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

// With fewer elements than this, waking a thread does not pay off.
constexpr int64_t kGrain = 16384;

// Longer rows of single positions are packed, if necessary, and processed with vectors along the row.
constexpr int64_t kShort = 32;

// Longer rows of single positions are split into spans for the threads. Shorter rows hold the results of their spans on
// the stack.
constexpr int64_t kSpansOfOne = 4, kLongest = kSpansOfOne * kSpan;

// This many terms are summed in the arithmetic dtype before they are added to a float64 sum.
constexpr int64_t kTerms = 256;

// Accesses the elements of `lanes` adjacent positions of a row's entries. Vectors span the positions, one entry at a
// time.
template <int64_t lanes, typename scalar_t>
struct Lanes {
  using acc_t = acc_type<scalar_t>;
  const SparseSoftmaxArgs* args;  // null if the row is packed
  int64_t width, n;
  scalar_t* result;
  int64_t begin = 0, position = 0;

  SCE_HD int64_t at(int64_t i) const { return args ? args->at(begin + i) * width + position : i; }

  // Computes total[l], the sum of term(element, l) over the row's entries.
  template <typename term_t>
  SCE_HD void sum(double* total, const term_t& term) const {
    for (int64_t l = 0; l < lanes; ++l) total[l] = 0;
    for (int64_t first = 0; first < n; first += kTerms) {
      acc_t part[lanes] = {};
      for (int64_t i = first; i < n && i < first + kTerms; ++i) {
        const int64_t element = at(i);
        SCE_SIMD()
        for (int64_t l = 0; l < lanes; ++l) part[l] += term(element + l, l);
      }
      for (int64_t l = 0; l < lanes; ++l) total[l] += part[l];
    }
  }

  template <typename result_t>
  SCE_HD void write(const result_t& result_of) const {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t element = at(i);
      SCE_SIMD()
      for (int64_t l = 0; l < lanes; ++l) from_acc(result_of(element + l, l), result[element + l]);
    }
  }
};

struct WideSum {
  double sum = 0;
  void merge(const WideSum& other) { sum += other.sum; }
};

// Divides a packed row into spans for one thread or for all. They are merged in order, so the result is the same.
struct Spans {
  int64_t n;
  bool by_all;

  // Calls f(span, first entry, entries) for each span.
  template <typename function_t>
  void each(const function_t& f) const {
    if (n <= kSpan) return f(0, 0, n);  // most rows; for short ones the loop below costs as much as 64 entries
    const auto some = [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) f(t, t * kSpan, std::min(kSpan, n - t * kSpan));
    };
    by_all ? torch::stable::parallel_for(0, divide_up(n, kSpan), 1, some) : some(0, divide_up(n, kSpan));
  }

  template <typename part_t, typename function_t>
  part_t merged(const function_t& f) const {
    if (n <= kSpan) return f(0, n);
    part_t few[kSpansOfOne], whole;
    std::vector<part_t> many(n > kLongest ? divide_up(n, kSpan) : 0);
    part_t* const parts = many.empty() ? few : many.data();
    each([&](int64_t t, int64_t begin, int64_t m) { parts[t] = f(begin, m); });
    for (int64_t t = 0; t < divide_up(n, kSpan); ++t) whole.merge(parts[t]);
    return whole;
  }
};

// Processes a row, in forward and backward: some of its positions in place, or a long packed row of single positions.
template <typename scalar_t>
struct Forward {
  using acc_t = acc_type<scalar_t>;
  static constexpr int64_t kInputs = 1;
  const scalar_t* inputs[kInputs];
  bool log;

  explicit Forward(const SparseSoftmaxArgs& args) : inputs{static_cast<const scalar_t*>(args.values)}, log(args.log) {}

  // Calls f(std::bool_constant<log>{}).
  template <typename function_t>
  SCE_HD void with_log(const function_t& f) const {
    log ? f(std::true_type{}) : f(std::false_type{});
  }

  template <int64_t lanes>
  SCE_HD void operator()(const Lanes<lanes, scalar_t>& row, const scalar_t* const* in) const {
    const scalar_t* values = in[0];
    acc_t max[lanes];
    for (int64_t l = 0; l < lanes; ++l) max[l] = RowStats<acc_t>().max;
    for (int64_t i = 0; i < row.n; ++i) {
      const scalar_t* z = values + row.at(i);
      SCE_SIMD()
      for (int64_t l = 0; l < lanes; ++l) max[l] = to_acc(z[l]) > max[l] ? to_acc(z[l]) : max[l];
    }
    double rest[lanes];
    acc_t ties[lanes] = {};
    row.sum(rest, [&](int64_t element, int64_t l) {
      const acc_t below = to_acc(values[element]) - max[l], is_max = static_cast<acc_t>(below == acc_t(0));
      ties[l] += is_max;
      return exponential(below) - is_max;  // not a selection, which would be a mispredicted branch
    });
    with_log([&](auto of_log) SCE_INLINE {
      using Row = SoftmaxRow<acc_t>;
      acc_t of_sum[lanes];
      for (int64_t l = 0; l < lanes; ++l) {
        const RowStats<acc_t> stats{max[l], static_cast<acc_t>(rest[l] + (ties[l] - acc_t(1)))};
        of_sum[l] = Row::template of<decltype(of_log)::value>(stats).of_sum;
      }
      row.write([&](int64_t element, int64_t l) SCE_INLINE {
        return Row{max[l], of_sum[l]}.template at<decltype(of_log)::value>(to_acc(values[element]));
      });
    });
  }

  template <typename spans_t>
  void packed(const scalar_t* const* in, scalar_t* result, const spans_t& spans) const {
    const LogitTransform<acc_t> identity{LossOptions{}};
    const scalar_t* values = in[0];
    const RowStats<acc_t> stats = spans.template merged<RowStats<acc_t>>([&](int64_t begin, int64_t m) {
      return Tile<scalar_t>::stats(values + begin, m, identity, false, nullptr, values + begin);
    });
    spans.each([&](int64_t, int64_t begin, int64_t m) {
      with_instruction_set([&](auto) SCE_INLINE {
        with_log([&](auto of_log) SCE_INLINE {
          const auto row = SoftmaxRow<acc_t>::template of<decltype(of_log)::value>(stats);
          SCE_SIMD()
          for (int64_t i = begin; i < begin + m; ++i)
            from_acc(row.template at<decltype(of_log)::value>(to_acc(values[i])), result[i]);
        });
      });
    });
  }
};

template <bool log, typename scalar_t>
struct Backward {
  using acc_t = acc_type<scalar_t>;
  using Gradient = SoftmaxGradient<acc_t>;
  static constexpr int64_t kInputs = 2;
  const scalar_t* inputs[kInputs];

  explicit Backward(const SparseSoftmaxArgs& args)
      : inputs{static_cast<const scalar_t*>(args.grad), static_cast<const scalar_t*>(args.output)} {}

  template <int64_t lanes>
  SCE_HD void operator()(const Lanes<lanes, scalar_t>& row, const scalar_t* const* in) const {
    const scalar_t *grad = in[0], *output = in[1];
    acc_t own[lanes] = {};
    int32_t found[lanes] = {};
    run(row, grad, output, own, found);
    bool again = false;
    for (int64_t l = 0; l < lanes; ++l) {
      if (!found[l]) continue;
      int64_t i = 0;
      while (!Gradient::template has_most<log>(to_acc(output[row.at(i) + l]))) ++i;
      const int64_t most = row.at(i) + l;
      own[l] = to_acc(grad[most]), again = true;
      if (!log) continue;
      double others = 0;
      for (int64_t j = 0; j < row.n; ++j) others += j == i ? 0 : static_cast<double>(to_acc(grad[row.at(j) + l]));
      from_acc(Gradient::at_most(own[l], to_acc(output[most]), static_cast<acc_t>(others)), row.result[most]);
    }
    if (!log && again) run(row, grad, output, own, found);
  }

  template <int64_t lanes>
  SCE_HD static void run(const Lanes<lanes, scalar_t>& row, const scalar_t* grad, const scalar_t* output,
                         const acc_t* own, int32_t* found) {
    double sum[lanes];
    row.sum(sum, [&](int64_t element, int64_t l) {
      return Gradient::template term<log>(to_acc(grad[element]), to_acc(output[element]), own[l]);
    });
    acc_t total[lanes];
    for (int64_t l = 0; l < lanes; ++l) total[l] = static_cast<acc_t>(sum[l]);
    row.write([&](int64_t element, int64_t l) {
      const acc_t y = to_acc(output[element]);
      found[l] |= Gradient::template has_most<log>(y);
      return Gradient{total[l], own[l]}.template at<log>(to_acc(grad[element]), y);
    });
  }

  template <typename spans_t>
  static void packed(const scalar_t* const* in, scalar_t* result, const spans_t& spans) {
    const scalar_t *grad = in[0], *output = in[1];
    int64_t most = run(grad, output, result, spans, 0);
    if (most < 0) return;
    while (!Gradient::template has_most<log>(to_acc(output[most]))) ++most;
    const acc_t own = to_acc(grad[most]);
    if (!log) {
      run(grad, output, result, spans, own);
      return;
    }
    const acc_t others = sum_of(spans, [&](int64_t i) SCE_INLINE { return i == most ? acc_t(0) : to_acc(grad[i]); });
    from_acc(Gradient::at_most(own, to_acc(output[most]), others), result[most]);
  }

  // Holds the begin of the tile in which an element has most of the row, or -1.
  struct Most {
    int64_t tile = -1;
    void merge(const Most& other) { tile = std::max(tile, other.tile); }
  };

  template <typename spans_t>
  static int64_t run(const scalar_t* grad, const scalar_t* output, scalar_t* result, const spans_t& spans, acc_t own) {
    const acc_t sum = sum_of(spans, [&](int64_t i) SCE_INLINE {
      return Gradient::template term<log>(to_acc(grad[i]), to_acc(output[i]), own);
    });
    const Gradient row{sum, own};
    const auto write = [&](int64_t begin, int64_t m) {
      return with_instruction_set([&](auto) SCE_INLINE {
        Most most;
        for (int64_t tile = begin; tile < begin + m; tile += kTile) {
          const int64_t end = std::min(tile + kTile, begin + m);
          if (any_has_most(output + tile, end - tile)) most.tile = tile;
          SCE_SIMD()
          for (int64_t i = tile; i < end; ++i)
            from_acc(row.template at<log>(to_acc(grad[i]), to_acc(output[i])), result[i]);
        }
        return most;
      });
    };
    return spans.template merged<Most>(write).tile;
  }

  SCE_HD static bool any_has_most(const scalar_t* y, int64_t n) {
    int32_t found = 0;
    SCE_SIMD(reduction(+ : found))
    for (int64_t i = 0; i < n; ++i) found += Gradient::template has_most<log>(to_acc(y[i]));
    return found != 0;
  }

  // Sums term(i) over the elements of a row.
  template <typename spans_t, typename term_t>
  static acc_t sum_of(const spans_t& spans, const term_t& term) {
    const WideSum sum = spans.template merged<WideSum>([&](int64_t begin, int64_t m) {
      return with_instruction_set([&](auto) SCE_INLINE {
        WideSum sum;
        for (int64_t tile = begin; tile < begin + m; tile += kTile)
          sum.sum += sum_in_lanes<acc_t>(tile, std::min(tile + kTile, begin + m), term);
        return sum;
      });
    });
    return static_cast<acc_t>(sum.sum);
  }
};

template <int64_t lanes, typename scalar_t, typename function_t>
SCE_HD void by_lanes(const SparseSoftmaxArgs& args, int64_t begin, int64_t n, int64_t& position, const function_t& f) {
  scalar_t* result = static_cast<scalar_t*>(args.result);
  for (; position + lanes <= args.width; position += lanes)
    f(Lanes<lanes, scalar_t>{&args, args.width, n, result, begin, position}, f.inputs);
}

// Calls run(inputs, result) for a row of single positions, which is packed into `buffer` if necessary.
template <typename function_t, typename scalar_t, typename run_t>
SCE_HD void packed(const SparseSoftmaxArgs& args, int64_t begin, const Spans& spans, const function_t& f,
                   std::vector<scalar_t>& buffer, const run_t& run) {
  const int64_t n = spans.n;
  const scalar_t* rows[function_t::kInputs];
  scalar_t* const result = static_cast<scalar_t*>(args.result);
  if (!args.order) {
    for (int64_t k = 0; k < f.kInputs; ++k) rows[k] = f.inputs[k] + begin;
    return run(rows, result + begin);
  }
  buffer.resize(std::max(buffer.size(), static_cast<size_t>(n * (f.kInputs + 1))));
  for (int64_t k = 0; k < f.kInputs; ++k) rows[k] = buffer.data() + k * n;
  scalar_t* const results = buffer.data() + f.kInputs * n;
  spans.each([&](int64_t, int64_t first, int64_t m) {
    for (int64_t k = 0; k < f.kInputs; ++k)
      for (int64_t i = first; i < first + m; ++i) buffer[k * n + i] = f.inputs[k][args.at(begin + i)];
  });
  run(rows, results);
  spans.each([&](int64_t, int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) result[args.at(begin + i)] = results[i];
  });
}

// A thread processes the rows that begin in its share of the entries.
template <typename scalar_t, typename function_t>
void for_rows(const SparseSoftmaxArgs& args, const function_t& f) {
  const auto first_row = [&](int64_t entry) {  // the first row that begins at or after the entry
    int64_t low = 0, high = args.rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      args.row_begin(middle) < entry ? low = middle + 1 : high = middle;
    }
    return low;
  };
  const auto entries_of = [&](int64_t r) { return args.row_begin(r + 1) - args.row_begin(r); };
  const int64_t grain = std::max<int64_t>(1, kGrain / args.width);
  torch::stable::parallel_for(0, args.entries, grain, [&](int64_t first, int64_t last) {
    std::vector<scalar_t> buffer;
    const int64_t first_of_these = first_row(first), end = first_row(last);
    with_instruction_set([&](auto) SCE_INLINE {
      for (int64_t r = first_of_these; r < end; ++r) {
        const int64_t begin = args.row_begin(r), n = entries_of(r);
        if (args.width == 1) {
          const Spans spans{n, false};
          if (n <= kLongest)
            packed(args, begin, spans, f, buffer, [&](const scalar_t* const* rows, scalar_t* result) SCE_INLINE {
              n > kShort ? f.packed(rows, result, spans) : f(Lanes<1, scalar_t>{nullptr, 1, n, result}, rows);
            });
          continue;
        }
        int64_t position = 0;
        by_lanes<16, scalar_t>(args, begin, n, position, f);
        by_lanes<4, scalar_t>(args, begin, n, position, f);
        by_lanes<1, scalar_t>(args, begin, n, position, f);
      }
    });
  });
  if (args.width != 1 || args.entries <= kLongest) return;
  std::vector<scalar_t> buffer;
  for (int64_t r = 0; r < args.rows; ++r) {
    const Spans spans{entries_of(r), true};
    if (spans.n > kLongest)
      packed(args, args.row_begin(r), spans, f, buffer,
             [&](const scalar_t* const* rows, scalar_t* result) { f.packed(rows, result, spans); });
  }
}

}  // namespace

void sparse_softmax(const SparseSoftmaxArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    for_rows<scalar_t>(args, Forward<scalar_t>(args));
  });
}

void sparse_softmax_backward(const SparseSoftmaxArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    args.log ? for_rows<scalar_t>(args, Backward<true, scalar_t>(args))
             : for_rows<scalar_t>(args, Backward<false, scalar_t>(args));
  });
}

}  // namespace cpu
}  // namespace sparse_ce
