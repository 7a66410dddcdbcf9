#include "../masked_mean.h"
#include "weighted_loops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kGrain = 16384;  // fewer elements than this are not worth waking a thread for
constexpr int64_t kRows = 64;      // rows whose sums are added in the arithmetic dtype before they go into float64
constexpr int64_t kFewItems = 32;  // with fewer of them rows are shared too. Results depend on it, not on the threads

template <typename scalar_t, InstructionSet set>
struct Instance;

#define SCE_INSTANCE(SET, TARGET)                                                                                  \
  template <typename scalar_t>                                                                                     \
  struct Instance<scalar_t, InstructionSet::SET> {                                                                 \
    using acc_t = acc_type<scalar_t>;                                                                              \
    template <typename weights_t>                                                                                  \
    TARGET static MaskedSum<acc_t> sum(const scalar_t* x, weights_t w, int64_t n) {                                \
      return sum_body(x, w, n);                                                                                    \
    }                                                                                                              \
    template <typename weights_t>                                                                                  \
    TARGET static void add(const scalar_t* const* x, const weights_t* w, int64_t rows, int64_t n, acc_t* sum,      \
                           acc_t* weight) {                                                                        \
      add_body(x, w, rows, n, sum, weight);                                                                        \
    }                                                                                                              \
    template <typename weights_t>                                                                                  \
    TARGET static void gradient(const acc_t* share, weights_t w, int64_t n, scalar_t* gradient) {                  \
      gradient_body<acc_t>(share, w, n, gradient);                                                                 \
    }                                                                                                              \
    template <typename weights_t>                                                                                  \
    TARGET static void gradient_of_one_share(acc_t share, weights_t w, int64_t n, scalar_t* gradient) {            \
      gradient_body<acc_t>(Same<acc_t>{share}, w, n, gradient);                                                    \
    }                                                                                                              \
    template <typename weights_t>                                                                                  \
    static constexpr WeightedLoops<scalar_t, weights_t> loops{sum<weights_t>, add<weights_t>, gradient<weights_t>, \
                                                              gradient_of_one_share<weights_t>};                   \
    static constexpr MaskKernels<scalar_t> kernels{loops<const uint8_t*>, loops<const acc_t*>, loops<Same<acc_t>>}; \
  };

SCE_FOR_INSTRUCTION_SETS(SCE_INSTANCE)

// Reads columns of the input and of the mask, whatever their strides and the mask's dtype.
template <typename scalar_t>
class Columns {
 public:
  using acc_t = acc_type<scalar_t>;
  explicit Columns(const MaskedMeanArgs& args) : args_(args) {}

  bool same_weight() const { return args_.column.mask == 0; }
  acc_t weight(int64_t mask) const { return load_number<acc_t>(args_.mask, args_.mask_dtype, mask); }

  // Calls f(weights, begin, n) for columns [0, n) from a place of the mask on: with bytes or one number as they are,
  // else tile by tile with numbers.
  template <typename function_t>
  void with_weights(int64_t mask, int64_t n, const function_t& f) {
    if (same_weight()) return f(Same<acc_t>{weight(mask)}, int64_t(0), n);
    if (args_.mask_dtype == DType::kUInt8 && args_.column.mask == 1)
      return f(static_cast<const uint8_t*>(args_.mask) + mask, int64_t(0), n);
    for (int64_t begin = 0; begin < n; begin += kTile) {
      const int64_t m = std::min(kTile, n - begin);
      for (int64_t i = 0; i < m; ++i) weights_[i] = weight(mask + (begin + i) * args_.column.mask);
      f(static_cast<const acc_t*>(weights_), begin, m);
    }
  }

  // Calls f(x, begin, n) in the same way; a tile is gathered where the columns do not lie side by side.
  template <typename function_t>
  void with_input(int64_t input, int64_t n, const function_t& f) {
    const scalar_t* x = static_cast<const scalar_t*>(args_.input) + input;
    if (args_.column.input == 1) return f(x, int64_t(0), n);
    for (int64_t begin = 0; begin < n; begin += kTile) {
      const int64_t m = std::min(kTile, n - begin);
      for (int64_t i = 0; i < m; ++i) gathered_[i] = x[(begin + i) * args_.column.input];
      f(static_cast<const scalar_t*>(gathered_), begin, m);
    }
  }

 private:
  const MaskedMeanArgs& args_;
  acc_t weights_[kTile];
  scalar_t gathered_[kTile];
};

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

template <typename scalar_t>
class Forward {
 public:
  using acc_t = acc_type<scalar_t>;
  Forward(const MaskedMeanArgs& args, const Plan& plan)
      : args_(args), plan_(plan), loops_(kernels_in_use<Instance, scalar_t>()), columns_(args) {}

  // Adds the units [begin, end) from a place on to total (1,).
  void sum_along(const Place& from, int64_t begin, int64_t end, MaskedSum<double>* total) {
    for (int64_t unit = begin; unit < end; ++unit) {
      Place place = args_.rows.at(unit / plan_.spans);
      const int64_t first = unit % plan_.spans * kSpan, n = std::min(kSpan, args_.columns - first);
      place.move(args_.column, first);
      place.move(from, 1);
      if (columns_.same_weight() && columns_.weight(place.mask) == acc_t(0)) continue;
      columns_.with_weights(place.mask, n, [&](auto w, int64_t at, int64_t m) {
        columns_.with_input(place.input + at * args_.column.input, m, [&](const scalar_t* x, int64_t i, int64_t count) {
          total->merge(loops_.of(w).sum(x, shifted(w, i), count));
        });
      });
    }
  }

  // Adds the rows [begin, end) of n <= kTile columns from a place on to total (n,).
  void sum_across(const Place& from, int64_t n, int64_t begin, int64_t end, MaskedSum<double>* total) {
    for (int64_t r = begin; r < end; r += kRows) {
      const int64_t last = std::min(r + kRows, end);
      std::fill_n(sum_, n, acc_t(0));
      std::fill_n(weight_, n, acc_t(0));
      acc_t same = 0;
      if (columns_.same_weight())
        same = add_weighted_rows(from, n, r, last);
      else if (args_.mask_dtype == DType::kUInt8 && args_.column.mask == 1 && args_.column.input == 1)
        add_byte_rows(from, n, r, last);
      else
        add_any_rows(from, n, r, last);
      for (int64_t i = 0; i < n; ++i) total[i].merge(MaskedSum<acc_t>{sum_[i], weight_[i] + same});
    }
  }

 private:
  template <typename weights_t>
  static weights_t shifted(weights_t w, int64_t i) {
    if constexpr (kDiffer<weights_t>) return w + i;
    return w;
  }

  const scalar_t* input(const Place& place) const { return static_cast<const scalar_t*>(args_.input) + place.input; }

  // Rows without a weight are not read. Returns the sum of the weights.
  acc_t add_weighted_rows(const Place& from, int64_t n, int64_t begin, int64_t end) {
    const scalar_t* x[kRows];
    Same<acc_t> w[kRows];
    acc_t total = 0;
    int64_t rows = 0;
    for (int64_t r = begin; r < end; ++r) {
      const Place place = args_.rows.at(r).moved(from, 1);
      w[rows].value = columns_.weight(place.mask);
      if (w[rows].value == acc_t(0)) continue;
      total += w[rows].value;
      x[rows++] = input(place);
      if (args_.column.input != 1) {
        columns_.with_input(place.input, n, [&](const scalar_t* row, int64_t i, int64_t m) {
          loops_.same.add(&row, w + rows - 1, 1, m, sum_ + i, weight_);
        });
        rows = 0;
      }
    }
    loops_.same.add(x, w, rows, n, sum_, weight_);
    return total;
  }

  void add_byte_rows(const Place& from, int64_t n, int64_t begin, int64_t end) {
    const scalar_t* x[kRows];
    const uint8_t* w[kRows];
    for (int64_t r = begin; r < end; ++r) {
      const Place place = args_.rows.at(r).moved(from, 1);
      x[r - begin] = input(place);
      w[r - begin] = static_cast<const uint8_t*>(args_.mask) + place.mask;
    }
    loops_.bytes.add(x, w, end - begin, n, sum_, weight_);
  }

  void add_any_rows(const Place& from, int64_t n, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Place place = args_.rows.at(r).moved(from, 1);
      columns_.with_weights(place.mask, n, [&](auto w, int64_t, int64_t m) {
        columns_.with_input(place.input, m, [&](const scalar_t* x, int64_t, int64_t count) {
          loops_.of(w).add(&x, &w, 1, count, sum_, weight_);
        });
      });
    }
  }

  const MaskedMeanArgs& args_;
  const Plan& plan_;
  const MaskKernels<scalar_t>& loops_;
  Columns<scalar_t> columns_;
  acc_t sum_[kTile], weight_[kTile];
};

template <typename scalar_t>
void forward(const MaskedMeanArgs& args) {
  const Plan plan(args);
  const int64_t width = std::min(args.width(), kTile), grain = std::max<int64_t>(1, kGrain / plan.item_elements);
  std::vector<MaskedSum<double>> partial(static_cast<size_t>(plan.parts > 1 ? plan.items * width : 0));
  const auto first_column = [&](int64_t group) { return group % plan.blocks * kTile; };
  const auto outputs = [&](int64_t group) { return std::min(width, args.width() - first_column(group)); };
  const auto finish = [&](int64_t group, const MaskedSum<double>* total) {
    const Place place = args.outer.at(group / plan.blocks).moved(args.column, first_column(group));
    for (int64_t i = 0; i < outputs(group); ++i) args.finish<scalar_t>(place.out + i * args.column.out, total[i]);
  };
  torch::stable::parallel_for(0, plan.items, grain, [&](int64_t begin, int64_t end) {
    Forward<scalar_t> sums(args, plan);
    std::vector<MaskedSum<double>> own(static_cast<size_t>(width));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / plan.parts, first = item % plan.parts * plan.units_per_part;
      const int64_t last = std::min(first + plan.units_per_part, plan.units);
      const Place from = args.outer.at(group / plan.blocks).moved(args.column, first_column(group));
      MaskedSum<double>* total = plan.parts > 1 ? partial.data() + item * width : own.data();
      std::fill_n(total, width, MaskedSum<double>{});
      if (args.columns_kept)
        sums.sum_across(from, outputs(group), first, last, total);
      else
        sums.sum_along(from, first, last, total);
      if (plan.parts == 1) finish(group, total);
    }
  });
  for (int64_t group = 0; plan.parts > 1 && group < plan.items / plan.parts; ++group) {
    MaskedSum<double>* total = partial.data() + group * plan.parts * width;
    for (int64_t p = 1; p < plan.parts; ++p)
      for (int64_t i = 0; i < width; ++i) total[i].merge(total[p * width + i]);
    finish(group, total);
  }
}

template <typename scalar_t>
void backward(const MaskedMeanArgs& args) {
  using acc_t = acc_type<scalar_t>;
  const int64_t spans = (args.columns + kSpan - 1) / kSpan, rows = args.rows.count * spans;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(args.columns, kSpan));
  const auto& loops = kernels_in_use<Instance, scalar_t>();
  torch::stable::parallel_for(0, args.outer.count * rows, grain, [&](int64_t begin, int64_t end) {
    Columns<scalar_t> columns(args);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % spans * kSpan, n = std::min(kSpan, args.columns - first);
      Place place = args.outer.at(unit / rows).moved(args.column, first);
      place.move(args.rows.at(unit % rows / spans), 1);
      const acc_t* share = static_cast<const acc_t*>(args.share) + place.out;
      scalar_t* gradient = static_cast<scalar_t*>(args.grad_input) + place.input;
      columns.with_weights(place.mask, n, [&](auto w, int64_t i, int64_t m) {
        if (args.columns_kept)
          loops.of(w).gradient(share + i, w, m, gradient + i);
        else
          loops.of(w).gradient_of_one_share(*share, w, m, gradient + i);
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
