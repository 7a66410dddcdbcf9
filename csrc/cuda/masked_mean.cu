// `lanes` threads stand side by side on the columns of a row, on a pack each, and as many on every other row. Where the
// columns are reduced, a warp or a block goes along rows; where they are kept, each thread goes down its columns. With
// few outputs their elements are shared among blocks, whose sums a second kernel merges, in a fixed order.
#include "row_group.cuh"

#include "masked_mean.h"

#include <algorithm>

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kMostLanes = 32;  // on columns that are kept
constexpr int64_t kLong = 2048;  // elements behind an output that a warp takes alone, however few outputs there are
constexpr int64_t kManyRows = 4096;  // outputs that give every warp of a device its own
constexpr int64_t kSpan = 16384;  // elements that are worth a block; columns of a row that it takes at a time
constexpr int64_t kWantedBlocks = 1024;  // of a device that is busy
constexpr int64_t kMostBlocks = 1 << 20;

// Packs of n in flight for each thread: as many as leave room for two blocks on a multiprocessor, of singles for three.
template <typename scalar_t, int n>
constexpr int kRun = n == 1 || sizeof(scalar_t) == 4 ? 4 : 2;

// How the elements are shared: an item is a part of what lies behind one output, or behind `lanes` packs of them.
struct Plan {
  int64_t pack;  // columns that a thread takes at once
  int64_t spans;  // of a row that is reduced
  int64_t blocks;  // of columns that are kept
  int64_t units, units_per_part, parts, items;  // units: spans of rows
  int lanes;  // a power of two
  bool warps;  // a warp is enough for an item
};

// The columns that can be read, and written, at once: then every row begins where a pack may.
inline int64_t pack_of(const MaskedMeanArgs& args, const void* tensor) {
  const int64_t pack = 16 / size_of(args.dtype), weight = size_of(args.mask_dtype);
  const bool differ = args.columns.stride.mask != 0;
  const auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); };
  bool fit = address(tensor) % 16 == 0 && (!differ || address(args.mask) % std::min<int64_t>(pack * weight, 16) == 0);
  for (const Axis& axis : {args.outer, args.rows})
    fit = fit && axis.stride.input % pack == 0 && (!differ || axis.stride.mask % pack == 0);
  return fit && (!args.columns_kept() || args.columns.size % pack == 0) ? pack : 1;
}

inline Plan plan_of(const MaskedMeanArgs& args) {
  const bool kept = args.columns_kept();
  const int64_t columns = args.columns.size, behind = args.rows.size * (kept ? 1 : columns);
  Plan plan{};
  plan.pack = pack_of(args, args.input);
  plan.warps = !kept && behind <= (args.outer.size >= kManyRows ? kSpan : kLong);
  const int most = kept ? kMostLanes : plan.warps ? kWarp : kThreads;
  for (plan.lanes = 1; plan.lanes < most && plan.lanes * plan.pack < columns;) plan.lanes *= 2;
  const int64_t width = plan.lanes * plan.pack;
  plan.spans = kept ? 1 : divide_up(columns, kSpan);
  plan.blocks = kept ? divide_up(columns, width) : 1;
  plan.units = args.rows.size * plan.spans;
  const int64_t groups = args.outer.size * plan.blocks, elements = behind * (kept ? std::min(width, columns) : 1);
  plan.units_per_part = divide_up(plan.units, std::min(divide_up(kWantedBlocks, groups), divide_up(elements, kSpan)));
  plan.parts = divide_up(plan.units, plan.units_per_part);
  plan.items = groups * plan.parts;
  return plan;
}

// The weights of n columns side by side, as they were read: what converts them waits for them.
template <typename acc_t, int n>
struct Weights {
  Pack<acc_t, n> numbers;
  Pack<uint8_t, n> bytes;

  __device__ __forceinline__ void load(const MaskedMeanArgs& args, int64_t at) {
    const bool small = args.mask_dtype == DType::kUInt8, differ = n > 1 && args.columns.stride.mask != 0;
    const acc_t* number = static_cast<const acc_t*>(args.mask) + at;
    const uint8_t* byte = static_cast<const uint8_t*>(args.mask) + at;
    if (small && differ) bytes = Pack<uint8_t, n>::load(byte);
    if (small && !differ) bytes.at[0] = *byte;
    if (!small && differ) numbers = Pack<acc_t, n>::load(number);
    if (!small && !differ) numbers.at[0] = *number;
  }
  __device__ __forceinline__ acc_t at(const MaskedMeanArgs& args, int e) const {
    const bool differ = n > 1 && args.columns.stride.mask != 0;
    const acc_t number = differ ? numbers.at[e] : numbers.at[0];
    return args.mask_dtype == DType::kUInt8 ? static_cast<acc_t>(differ ? bytes.at[e] : bytes.at[0]) : number;
  }
};

// Adds packs that are `step` apart to the sums of their n columns.
template <typename scalar_t, int n, typename acc_t>
__device__ __forceinline__ void add_run(const MaskedMeanArgs& args, Place at, const Place& step, int64_t packs,
                                        MaskedSum<acc_t> (&mine)[n]) {
  constexpr int kPacks = kRun<scalar_t, n>;
#pragma unroll 1
  for (; packs > 0; packs -= kPacks, at = at.moved(step, kPacks)) {
    Weights<acc_t, n> w[kPacks] = {};
    Pack<scalar_t, n> x[kPacks] = {};
#pragma unroll
    for (int u = 0; u < kPacks; ++u)
      if (u < packs) w[u].load(args, at.mask + u * step.mask);
    const auto read = [&](const auto& wanted) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
        if (u < packs && wanted(u))
          x[u] = Pack<scalar_t, n>::load(static_cast<const scalar_t*>(args.input) + at.input + u * step.input);
    };
    if (args.columns.stride.mask != 0)
      read([](int) { return true; });
    else
      read([&](int u) { return w[u].at(args, 0) != acc_t(0); });  // a row that is hidden is not read
#pragma unroll
    for (int u = 0; u < kPacks; ++u)
#pragma unroll
      for (int e = 0; e < n; ++e) {
        const acc_t a = u < packs ? w[u].at(args, e) : acc_t(0);
        mine[e].merge(MaskedSum<acc_t>{MaskedSum<acc_t>::term(to_acc(x[u].at[e]), a), a});
      }
  }
}

template <typename scalar_t, int kWidth, int n>
__global__ void __launch_bounds__(kThreads, n == 1 ? 3 : 2)
    sum_kernel(MaskedMeanArgs args, Plan plan, MaskedSum<acc_type<scalar_t>>* partial) {
  using acc_t = acc_type<scalar_t>;
  using Group = RowGroup<kWidth>;
  SCE_SHARED(acc_t, sums, [2 * n][kThreads]);
  const int lane = Group::rank() % plan.lanes, slot = Group::rank() / plan.lanes, slots = kWidth / plan.lanes;
  const int64_t width = int64_t(plan.lanes) * n;
  for (int64_t item = Group::number(); item < plan.items; item += Group::count()) {
    const int64_t group = item / plan.parts, outer = group / plan.blocks, first = group % plan.blocks * width;
    const Place from = Place{}.moved(args.outer.stride, outer).moved(args.columns.stride, first);
    const int64_t begin = item % plan.parts * plan.units_per_part;
    const int64_t end = begin + plan.units_per_part < plan.units ? begin + plan.units_per_part : plan.units;
    const int64_t to = (outer * plan.parts + item % plan.parts) * args.width() + first;
    const auto finish = [&](int64_t c, const MaskedSum<double>& total) {
      if (plan.parts > 1)
        partial[to + c] = {static_cast<acc_t>(total.sum), static_cast<acc_t>(total.weight)};
      else
        args.template finish<scalar_t>(from.out + c, total);
    };
    MaskedSum<acc_t> mine[n];
    if (!args.columns_kept()) {
      for (int64_t unit = begin + slot; unit < end; unit += slots) {
        const int64_t column = unit % plan.spans * kSpan;
        const int64_t columns = args.columns.size - column < kSpan ? args.columns.size - column : kSpan;
        const Place place = from.moved(args.rows.stride, unit / plan.spans).moved(args.columns.stride, column);
        const Place step = Place{}.moved(args.columns.stride, width);
        add_run<scalar_t, n>(args, place.moved(args.columns.stride, lane * n), step,
                             divide_up(columns / n - lane, plan.lanes), mine);
        const int64_t rest = columns / n * n;
        MaskedSum<acc_t> single[1] = {};
        add_run<scalar_t, 1>(args, place.moved(args.columns.stride, rest + lane),
                             Place{}.moved(args.columns.stride, plan.lanes),
                             divide_up(columns - rest - lane, plan.lanes), single);
        mine[0].merge(single[0]);
      }
#pragma unroll
      for (int e = 1; e < n; ++e) mine[0].merge(mine[e]);
      const MaskedSum<acc_t> sum = Group::reduce(mine[0]);
      if (Group::rank() == 0) finish(0, {sum.sum, sum.weight});
      continue;
    }
    const int64_t columns = args.columns.size - first < width ? args.columns.size - first : width;
    if (lane * n < columns)
      add_run<scalar_t, n>(args, from.moved(args.columns.stride, lane * n).moved(args.rows.stride, begin + slot),
                           Place{}.moved(args.rows.stride, slots), divide_up(end - begin - slot, slots), mine);
    __syncthreads();  // the last item's sums are read
#pragma unroll
    for (int e = 0; e < n; ++e) sums[e][threadIdx.x] = mine[e].sum, sums[n + e][threadIdx.x] = mine[e].weight;
    __syncthreads();
    // Now a thread takes a column.
    for (int c = threadIdx.x; c < columns; c += kThreads) {
      MaskedSum<double> total;
      for (int t = c / n; t < kThreads; t += plan.lanes)
        total.merge(MaskedSum<acc_t>{sums[c % n][t], sums[n + c % n][t]});
      finish(c, total);
    }
  }
}

// A group merges the parts of an output: a warp many, a thread few, its neighbours those of outputs side by side.
// partial (outer, parts, width).
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(MaskedMeanArgs args, int64_t parts, const MaskedSum<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWidth>;
  const int64_t width = args.width();
  for (int64_t item = Group::number(); item < args.outer.size * width; item += Group::count()) {
    const int64_t outer = item / width, c = item % width;
    MaskedSum<double> mine;
    for (int64_t p = Group::rank(); p < parts; p += kWidth) mine.merge(partial[(outer * parts + p) * width + c]);
    const MaskedSum<double> total = Group::reduce(mine);
    if (Group::rank() == 0) args.template finish<scalar_t>(args.outer.stride.out * outer + c, total);
  }
}

// n columns of a row of the gradient; at is the place of its column 0.
template <typename scalar_t, int n>
__device__ __forceinline__ void write(const MaskedMeanArgs& args, const Place& at, int64_t c) {
  using acc_t = acc_type<scalar_t>;
  const Place place = at.moved(args.columns.stride, c);
  const acc_t* share = static_cast<const acc_t*>(args.share) + place.out;
  Weights<acc_t, n> w{};
  w.load(args, place.mask);
  Pack<scalar_t, n> pack;
#pragma unroll
  for (int e = 0; e < n; ++e)
    from_acc(MaskedSum<acc_t>::term(share[e * args.columns.stride.out], w.at(args, e)), pack.at[e]);
  pack.store(static_cast<scalar_t*>(args.grad_input) + place.input);
}

// A warp writes a span of a row of the gradient.
template <typename scalar_t, int n>
__global__ void __launch_bounds__(kThreads, 3) gradient_kernel(MaskedMeanArgs args, int64_t spans) {
  using Group = RowGroup<kWarp>;
  const int64_t per_outer = args.rows.size * spans;
  for (int64_t item = Group::number(); item < args.outer.size * per_outer; item += Group::count()) {
    const int64_t row = item % per_outer / spans, first = item % spans * kSpan;
    const int64_t end = args.columns.size - first < kSpan ? args.columns.size : first + kSpan;
    const int64_t rest = first + (end - first) / n * n;
    const Place from = Place{}.moved(args.outer.stride, item / per_outer).moved(args.rows.stride, row);
    for (int64_t c = first + Group::rank() * n; c < rest; c += kWarp * n) write<scalar_t, n>(args, from, c);
    for (int64_t c = rest + Group::rank(); n > 1 && c < end; c += kWarp) write<scalar_t, 1>(args, from, c);
  }
}

int64_t blocks_of(const MaskedMeanArgs& args, int64_t items, int width) {
  return blocks_for(items, kThreads / width, args.max_blocks, kMostBlocks);
}

}  // namespace

size_t masked_mean_workspace(const MaskedMeanArgs& args) {
  const Plan plan = plan_of(args);
  const size_t sum = args.dtype == DType::kFloat64 ? sizeof(MaskedSum<double>) : sizeof(MaskedSum<float>);
  return plan.parts > 1 ? static_cast<size_t>(args.outer.size * plan.parts * args.width()) * sum : 0;
}

cudaError_t masked_mean(const MaskedMeanArgs& args, void* workspace, cudaStream_t stream) {
  const Plan plan = plan_of(args);
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    auto* partial = static_cast<MaskedSum<acc_type<scalar_t>>*>(workspace);
    constexpr int kPack = Pack<scalar_t>::kSize;
    const auto packs = plan.warps ? sum_kernel<scalar_t, kWarp, kPack> : sum_kernel<scalar_t, kThreads, kPack>;
    const auto singles = plan.warps ? sum_kernel<scalar_t, kWarp, 1> : sum_kernel<scalar_t, kThreads, 1>;
    const cudaError_t error = launch(stream, blocks_of(args, plan.items, plan.warps ? kWarp : kThreads), kThreads,
                                     plan.pack > 1 ? packs : singles, args, plan, partial);
    if (error != cudaSuccess || plan.parts == 1) return error;
    const bool few = plan.parts <= kWarp;
    const int64_t blocks = blocks_of(args, args.outer.size * args.width(), few ? 1 : kWarp);
    return launch(stream, blocks, kThreads, few ? merge_kernel<scalar_t, 1> : merge_kernel<scalar_t, kWarp>, args,
                  plan.parts, partial);
  });
}

cudaError_t masked_mean_backward(const MaskedMeanArgs& args, cudaStream_t stream) {
  const int64_t spans = divide_up(args.columns.size, kSpan);
  const int64_t blocks = blocks_of(args, args.outer.size * args.rows.size * spans, kWarp);
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    const bool packs = pack_of(args, args.grad_input) > 1;
    const auto kernel = packs ? gradient_kernel<scalar_t, Pack<scalar_t>::kSize> : gradient_kernel<scalar_t, 1>;
    return launch(stream, blocks, kThreads, kernel, args, spans);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
