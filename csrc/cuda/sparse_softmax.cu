// Assigns a row to a few lanes of a warp, to a warp, or to a block. If a row is longer than a span of entries, the
// blocks of its spans share it: a second kernel merges their statistics, in the order of the spans, and writes the
// result. Rows of a few lanes are read once. Others are read twice, the second time from a cache unless they are
// longer.
#include "device/online_stats.cuh"
#include "device/row_group.cuh"
#include "device/softmax_sums.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kUnroll = 2;  // packs in flight per thread and tensor
constexpr int kFewLanes = 8;  // for a row of kShortRow entries
constexpr int kOfLane = 8;  // entries per lane, in registers
constexpr int64_t kShortRow = kFewLanes * kOfLane;
constexpr int64_t kLongRow = 2048;  // entries; a block processes longer rows
constexpr int64_t kSpan = 32768;  // entries per block, for rows that blocks share
constexpr int64_t kMostSpans = 1024;
constexpr int64_t kMostBlocks = 1 << 20;

// Assigns rows to threads. The host computes it from the number of rows, because it does not know their lengths.
struct Plan {
  bool short_rows;  // true if most rows are short
  int64_t span, spans;  // 0 if no row can be longer than a span
};

Plan plan_of(const SparseSoftmaxArgs& args) {
  const int64_t span = std::max(kSpan, divide_up(args.entries, kMostSpans * 64) * 64);
  const bool long_rows = args.rows > 0 && args.entries > span;
  return {args.entries <= kShortRow * args.rows, span, long_rows ? divide_up(args.entries, span) : 0};
}

// Represents the entries [begin, end) of a row, at one position of each entry's width.
struct Row {
  int64_t begin = 0, end = 0, position = 0;

  __device__ int64_t length() const { return end - begin; }
};

__device__ Row row_of(const SparseSoftmaxArgs& args, int64_t item) {
  const int64_t r = item / args.width;
  return {args.row_begin(r), args.row_begin(r + 1), item % args.width};
}

// Returns the last row that begins at entry `at` or before. All threads of the block must call this function; each
// tests one row at a time.
__device__ int64_t row_at(const SparseSoftmaxArgs& args, int64_t at) {
  int64_t low = 0, count = args.rows;
  while (count > 1) {
    const int64_t step = divide_up(count, kThreads), mine = threadIdx.x * step;
    const int before = __syncthreads_count(mine > 0 && mine < count && args.row_begin(low + mine) <= at);
    low += before * step;
    count = step < count - before * step ? step : count - before * step;
  }
  return low;
}

// Calls packs(pointer offset, count) or single(pointer offset) for the elements of a row, as for_columns does. Only
// contiguous rows have packs.
template <int kWidth, typename scalar_t, typename packs_t, typename single_t>
__device__ __forceinline__ void for_entries(const SparseSoftmaxArgs& args, const Row& row, const scalar_t* aligned_like,
                                            bool by_packs, const packs_t& packs, const single_t& single) {
  by_packs = by_packs && !args.order && args.width == 1;
  for_columns<kWidth, kUnroll>(aligned_like, row.begin, row.end, by_packs, packs,
                               [&](int64_t i) { single(args.at(i) * args.width + row.position); });
}

// ------------------------------------------------------------------------------------------------ elements

// These define the inputs of each element, the sums over a row's elements, and the result for an element.
template <typename storage_t>
struct Forward {
  using scalar_t = storage_t;
  using acc_t = acc_type<scalar_t>;
  using Total = RowStats<acc_t>;
  using Result = SoftmaxRow<acc_t>;
  static constexpr int kInputs = 1;

  __device__ static acc_t nothing(int) { return -acc_t(INFINITY); }  // an input that adds nothing
  __device__ static const void* input(const SparseSoftmaxArgs& args, int) { return args.values; }
  __device__ static Result result(bool log, const Total& total) {
    return log ? Result::template of<true>(total) : Result::template of<false>(total);
  }
  __device__ static acc_t at(bool log, const Result& result, const acc_t (&x)[kInputs]) {
    return log ? result.template at<true>(x[0]) : result.template at<false>(x[0]);
  }

  template <int n>
  __device__ void add(const acc_t (&x)[kInputs][n]) {
    stats.push(x[0]);
  }
  __device__ Total total() const { return stats.finish(); }
  OnlineStats<acc_t> stats;
};

template <typename storage_t, template <typename> class sums_t>
struct Backward {
  using scalar_t = storage_t;
  using acc_t = acc_type<scalar_t>;
  using Total = sums_t<acc_t>;
  using Result = Total;
  static constexpr int kInputs = 2;

  __device__ static const void* input(const SparseSoftmaxArgs& args, int k) { return k == 0 ? args.grad : args.output; }
  __device__ static acc_t nothing(int k) { return k == 0 ? acc_t(0) : Total::kNothing; }
  __device__ static Result result(bool, const Total& total) { return total; }
  __device__ static acc_t at(bool, const Result& result, const acc_t (&x)[kInputs]) { return result.at(x[0], x[1]); }

  template <int n>
  __device__ void add(const acc_t (&x)[kInputs][n]) {
    sums.add(x[0], x[1]);
  }
  __device__ Total total() const { return sums; }
  Total sums;
};
template <typename storage_t>
using LogBackward = Backward<storage_t, LogSoftmaxSums>;
template <typename storage_t>
using SoftmaxBackward = Backward<storage_t, SoftmaxSums>;

// Holds the tensors of an op_t, Forward or Backward.
template <typename op_t>
struct Elements {
  using scalar_t = typename op_t::scalar_t;
  using acc_t = acc_type<scalar_t>;
  static constexpr int kInputs = op_t::kInputs, kSize = Pack<scalar_t>::kSize;

  const scalar_t* in[kInputs];
  scalar_t* out;
  bool log;

  __device__ explicit Elements(const SparseSoftmaxArgs& args)
      : out(static_cast<scalar_t*>(args.result)), log(args.log) {
    for (int k = 0; k < kInputs; ++k) in[k] = static_cast<const scalar_t*>(op_t::input(args, k));
  }
  // Returns true if the packs of all inputs are aligned like those of the first.
  __device__ bool equally_aligned_inputs() const { return equally_aligned(in[0], in[kInputs - 1]); }

  // Loads the packs of each input that are in `count`, from `first` on, kStride elements apart. Issues all loads before
  // it uses a result.
  template <int64_t kStride, typename count_t>
  __device__ __forceinline__ void load(int64_t first, count_t count,
                                       acc_t (&x)[kInputs][count_t::value * kSize]) const {
    Pack<scalar_t> packs[kInputs][count_t::value];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) load_packs<kStride>(in[k] + first, count, packs[k]);
#pragma unroll
    for (int k = 0; k < kInputs; ++k)
#pragma unroll
      for (int u = 0; u < count_t::value; ++u) {
        acc_t of_pack[kSize];
        to_numbers(packs[k][u], of_pack);
#pragma unroll
        for (int e = 0; e < kSize; ++e) x[k][u * kSize + e] = count.has(u) ? of_pack[e] : op_t::nothing(k);
      }
  }
  // Adds element e of x.
  template <int n>
  __device__ __forceinline__ void load_one(int64_t at, acc_t (&x)[kInputs][n], int e) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) x[k][e] = to_acc(in[k][at]);
  }
  // Computes the result for element e.
  template <int n>
  __device__ __forceinline__ acc_t make(const typename op_t::Result& result, const acc_t (&x)[kInputs][n],
                                        int e) const {
    acc_t of_one[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) of_one[k] = x[k][e];
    return op_t::at(log, result, of_one);
  }
};

// ------------------------------------------------------------------------------------------------ rows

// Sums the elements of a row over all threads of the group. The result is valid on lane 0.
template <typename op_t, int kWidth>
__device__ __forceinline__ typename op_t::Total total_of(const SparseSoftmaxArgs& args, const Row& row) {
  using acc_t = typename op_t::acc_t;
  const Elements<op_t> elements(args);
  constexpr int kInputs = op_t::kInputs, kSize = Elements<op_t>::kSize;
  op_t mine;
  for_entries<kWidth>(
      args, row, elements.in[0], elements.equally_aligned_inputs(),
      [&](int64_t i, auto count) {
        constexpr int n = decltype(count)::value, logits = n * kSize;
        acc_t x[kInputs][logits];
        elements.template load<kWidth * kSize>(i, count, x);
        mine.add(x);
      },
      [&](int64_t i) {
        acc_t x[kInputs][1];
        elements.load_one(i, x, 0);
        mine.add(x);
      });
  return RowGroup<kWidth>::reduce(mine.total());
}

// Writes the elements of a row, or of a part of it, given the row's total.
template <typename op_t, int kWidth>
__device__ __forceinline__ void write(const SparseSoftmaxArgs& args, const Row& row,
                                      const typename op_t::Total& total) {
  using acc_t = typename op_t::acc_t;
  using scalar_t = typename op_t::scalar_t;
  const Elements<op_t> elements(args);
  constexpr int kInputs = op_t::kInputs, kSize = Elements<op_t>::kSize;
  constexpr int64_t kStride = int64_t(kWidth) * kSize;
  const auto result = op_t::result(args.log, total);
  for_entries<kWidth>(
      args, row, elements.in[0], elements.equally_aligned_inputs() && equally_aligned(elements.in[0], elements.out),
      [&](int64_t i, auto count) {
        constexpr int n = decltype(count)::value, logits = n * kSize;
        acc_t x[kInputs][logits];
        elements.template load<kStride>(i, count, x);
#pragma unroll
        for (int u = 0; u < n; ++u) {
          if (!count.has(u)) break;
          acc_t results[kSize];
#pragma unroll
          for (int e = 0; e < kSize; ++e) results[e] = elements.make(result, x, u * kSize + e);
          Pack<scalar_t> pack;
          from_numbers(results, pack);
          pack.store(elements.out + i + u * kStride);
        }
      },
      [&](int64_t i) {
        acc_t x[kInputs][1];
        elements.load_one(i, x, 0);
        from_acc(elements.make(result, x, 0), elements.out[i]);
      });
}

template <typename op_t, int kWidth>
__device__ void run(const SparseSoftmaxArgs& args, const Row& row) {
  write<op_t, kWidth>(args, row, RowGroup<kWidth>::broadcast(total_of<op_t, kWidth>(args, row)));
}

// Processes a row of at most kShortRow entries with kFewLanes lanes, which read it once and completely.
template <typename op_t>
__device__ void run_short(const SparseSoftmaxArgs& args, const Row& row) {
  using Group = RowGroup<kFewLanes>;
  const Elements<op_t> elements(args);
  const int64_t first = row.begin + Group::rank();
  const int left = static_cast<int>(row.end - first);
  const auto place = [&](int u) { return args.at(first + u * kFewLanes) * args.width + row.position; };
  typename op_t::acc_t x[op_t::kInputs][kOfLane];
#pragma unroll
  for (int u = 0; u < kOfLane; ++u) {
    if (u * kFewLanes < left)
      elements.load_one(place(u), x, u);
    else
      for (int k = 0; k < op_t::kInputs; ++k) x[k][u] = op_t::nothing(k);
  }
  op_t mine;
  mine.add(x);
  const auto result = op_t::result(args.log, Group::broadcast(Group::reduce(mine.total())));
#pragma unroll
  for (int u = 0; u < kOfLane; ++u)
    if (u * kFewLanes < left) from_acc(elements.make(result, x, u), elements.out[place(u)]);
}

// Returns the place for a span's part of a row's total. A span may contain the end of one long row and the start of
// another.
__device__ int64_t place_of(const SparseSoftmaxArgs& args, const Plan& plan, const Row& row, int64_t span) {
  return (span * args.width + row.position) * 2 + (row.begin > span * plan.span);
}

// Calls f(row, part) for rows longer than a span and their parts in the span of `item`, at one position of the width.
// All threads of the block must call this function.
template <typename function_t>
__device__ void for_shared_rows(const SparseSoftmaxArgs& args, const Plan& plan, int64_t item, const function_t& f) {
  const int64_t begin = item / args.width * plan.span;
  const int64_t end = begin + plan.span < args.entries ? begin + plan.span : args.entries;
  const int64_t last = row_at(args, end - 1);
  for (int64_t r = row_at(args, begin);; r = last) {
    const Row row = row_of(args, r * args.width + item % args.width);
    if (row.length() > plan.span)
      f(row, Row{row.begin > begin ? row.begin : begin, row.end < end ? row.end : end, row.position});
    if (r == last) return;
  }
}

// Sets elements that belong to no row to NaN, because their memory is uninitialized. They exist if offsets do not begin
// at 0 or do not end at the number of entries.
template <typename scalar_t>
__device__ void fill_outside(const SparseSoftmaxArgs& args) {
  scalar_t* result = static_cast<scalar_t*>(args.result);
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * args.width + threadIdx.x; i < end * args.width; i += kThreads)
      from_acc(Limits<acc_type<scalar_t>>::kNaN, result[args.at(i / args.width) * args.width + i % args.width]);
  };
  fill(0, args.row_begin(0));
  fill(args.row_begin(args.rows), args.entries);
}

// Processes spans first, because they take longest; partial is (spans, width, 2). Then processes rows, as many at a
// time as the block has groups of kLanes.
template <typename op_t, int kLanes>
__global__ void __launch_bounds__(kThreads, min_blocks<typename op_t::scalar_t>(4))
    rows_kernel(SparseSoftmaxArgs args, Plan plan, typename op_t::Total* partial) {
  constexpr int kRows = kThreads / kLanes;
  if (blockIdx.x == 0) fill_outside<typename op_t::scalar_t>(args);
  const int64_t spans = plan.spans * args.width, rows = args.rows * args.width;
  for (int64_t item = blockIdx.x; item < spans + divide_up(rows, kRows); item += gridDim.x) {
    if (item < spans) {
      for_shared_rows(args, plan, item, [&](const Row& row, const Row& part) {
        const auto total = total_of<op_t, kThreads>(args, part);
        if (threadIdx.x == 0) partial[place_of(args, plan, row, item / args.width)] = total;
      });
      continue;
    }
    const int64_t first = (item - spans) * kRows, mine = first + threadIdx.x / kLanes;
    const Row row = mine < rows ? row_of(args, mine) : Row{};
    constexpr int64_t kShort = kLanes < kWarp ? kShortRow : 0;
    if (kLanes < kWarp && row.length() <= kShort) run_short<op_t>(args, row);
    if (__any_sync(0xffffffffu, row.length() > kShort)) {
      const int64_t of_warp = first + threadIdx.x / kWarp * (kWarp / kLanes);
      for (int64_t r = of_warp; r < of_warp + kWarp / kLanes && r < rows; ++r) {
        const Row one = row_of(args, r);
        if (kShort < one.length() && one.length() <= kLongRow) run<op_t, kWarp>(args, one);
      }
    }
    if (__syncthreads_or(row.length() > kLongRow)) {
      for (int64_t r = first; r < first + kRows && r < rows; ++r) {
        const Row one = row_of(args, r);
        if (kLongRow < one.length() && one.length() <= plan.span) run<op_t, kThreads>(args, one);
      }
    }
  }
}

// Writes the rows that several spans share.
template <typename op_t>
__global__ void __launch_bounds__(kThreads, min_blocks<typename op_t::scalar_t>(4))
    spans_kernel(SparseSoftmaxArgs args, Plan plan, const typename op_t::Total* partial) {
  for (int64_t item = blockIdx.x; item < plan.spans * args.width; item += gridDim.x)
    for_shared_rows(args, plan, item, [&](const Row& row, const Row& part) {
      typename op_t::Total mine;
      for (int64_t s = row.begin / plan.span + threadIdx.x; s * plan.span < row.end; s += kThreads)
        mine.merge(partial[place_of(args, plan, row, s)]);
      write<op_t, kThreads>(args, part, RowGroup<kThreads>::reduce(mine));
    });
}

template <template <typename> class op_t>
cudaError_t launch_rows(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream) {
  const int64_t rows = args.rows * args.width;
  if (args.width == 0 || args.entries == 0) return cudaSuccess;
  const Plan plan = plan_of(args);
  const int64_t spans = plan.spans * args.width, per_block = kThreads / (plan.short_rows ? kFewLanes : kWarp);
  return with_storage(args.dtype, [&](auto storage) {
    using Op = op_t<decltype(storage)>;
    auto* partial = static_cast<typename Op::Total*>(workspace);
    const auto kernel = plan.short_rows ? rows_kernel<Op, kFewLanes> : rows_kernel<Op, kWarp>;
    const int64_t items = std::max<int64_t>(1, spans + divide_up(rows, per_block));  // at least for elements of no row
    const int64_t blocks = blocks_for(items, 1, args.max_blocks, kMostBlocks);
    const cudaError_t error = launch(stream, blocks, kThreads, kernel, args, plan, partial);
    if (error != cudaSuccess || spans == 0) return error;
    return launch(stream, blocks_for(spans, 1, args.max_blocks, kMostBlocks), kThreads, spans_kernel<Op>, args, plan,
                  partial);
  });
}

}  // namespace

// Returns room for the parts of rows, of which SoftmaxSums are the largest.
size_t workspace_of(const SparseSoftmaxArgs& args) {
  const size_t each = args.dtype == DType::kFloat64 ? sizeof(SoftmaxSums<double>) : sizeof(SoftmaxSums<float>);
  return static_cast<size_t>(plan_of(args).spans * args.width) * 2 * each;
}

cudaError_t sparse_softmax(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream) {
  return launch_rows<Forward>(args, workspace, stream);
}

cudaError_t sparse_softmax_backward(const SparseSoftmaxArgs& args, void* workspace, cudaStream_t stream) {
  return args.log ? launch_rows<LogBackward>(args, workspace, stream)
                  : launch_rows<SoftmaxBackward>(args, workspace, stream);
}

}  // namespace cuda
}  // namespace sparse_ce
