// `lanes` threads stand side by side on the columns of a row, on a pack each, and as many on every other row. Where the
// columns are reduced, a warp or a block goes along rows; where they are kept, each thread goes down its columns. With
// few outputs their elements are shared among blocks, whose sums a second kernel merges, in a fixed order.
#include "device/row_group.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kMostLanes = 32;  // on columns that are kept
constexpr int64_t kLong = 2048;  // elements behind an output that a warp takes alone, however few outputs there are
constexpr int64_t kManyRows = 4096;  // outputs that give every warp of a device its own
constexpr int64_t kSpan = 16384;  // elements that are worth a block; columns of the gradient that a warp writes
constexpr int64_t kWantedBlocks = 1024;  // of a device that is busy
constexpr int64_t kMostBlocks = 1 << 20;

struct Plan : MaskedMeanPlan {
  int64_t pack;  // columns that a thread takes at once
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
  const int64_t rows = args.rows.size, columns = args.columns.size, pack = pack_of(args, args.input);
  const bool warps = !kept && rows * columns <= (args.outer.size >= kManyRows ? kSpan : kLong);
  int lanes = 1;
  while (lanes < (kept ? kMostLanes : warps ? kWarp : kThreads) && lanes * pack < columns) lanes *= 2;
  const int64_t width = kept ? std::min(lanes * pack, columns) : columns;
  const int64_t groups = args.outer.size * divide_up(columns, width);
  const int64_t parts = std::min(divide_up(kWantedBlocks, groups), divide_up(rows * width, kSpan));
  // Columns of a part of a row that is reduced: each begins where a pack may.
  const int64_t piece = divide_up(divide_up(columns, divide_up(parts, rows)), 16) * 16;
  return {{args, divide_up(rows, parts), kept ? width : piece}, pack, lanes, warps};
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

// Adds the packs that are `by` apart, from the first to the end of an axis, to the sums of their n columns.
template <typename scalar_t, int n, typename acc_t>
__device__ __forceinline__ void add_run(const MaskedMeanArgs& args, const Place& from, const Place& stride,
                                        int64_t first, int64_t by, int64_t end, MaskedSum<acc_t>* mine) {
  // In flight: as many as leave room for two blocks on a multiprocessor, of singles for three.
  constexpr int kPacks = n == 1 || sizeof(scalar_t) == 4 ? 4 : 2;
  const Place step = Place{}.moved(stride, by);
  Place at = from.moved(stride, first);
#pragma unroll 1
  for (int64_t packs = divide_up(end - first, by); packs > 0; packs -= kPacks, at = at.moved(step, kPacks)) {
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
  for (int64_t i = Group::number(); i < plan.items; i += Group::count()) {
    const Plan::Item item = plan.item(args, i);
    MaskedSum<acc_t> mine[n];
    if (!args.columns_kept()) {
      const int64_t rest = item.columns / n * n;
      for (int64_t row = slot; row < item.rows; row += slots) {
        const Place from = item.place.moved(args.rows.stride, row);
        add_run<scalar_t, n>(args, from, args.columns.stride, lane * n, plan.lanes * n, rest, mine);
        add_run<scalar_t, 1>(args, from, args.columns.stride, rest + lane, plan.lanes, item.columns, mine);
      }
#pragma unroll
      for (int e = 1; e < n; ++e) mine[0].merge(mine[e]);
      const MaskedSum<acc_t> sum = Group::reduce(mine[0]);
      if (Group::rank() == 0) plan.template put<scalar_t>(args, item, 0, {sum.sum, sum.weight}, partial);
      continue;
    }
    const Place from = item.place.moved(args.columns.stride, lane * n);
    if (lane * n < item.columns) add_run<scalar_t, n>(args, from, args.rows.stride, slot, slots, item.rows, mine);
    __syncthreads();  // the last item's sums are read
#pragma unroll
    for (int e = 0; e < n; ++e) sums[e][threadIdx.x] = mine[e].sum, sums[n + e][threadIdx.x] = mine[e].weight;
    __syncthreads();
    // Now a thread takes a column.
    for (int c = threadIdx.x; c < item.columns; c += kThreads) {
      MaskedSum<double> total;
      for (int t = c / n; t < kThreads; t += plan.lanes)
        total.merge(MaskedSum<acc_t>{sums[c % n][t], sums[n + c % n][t]});
      plan.template put<scalar_t>(args, item, c, total, partial);
    }
  }
}

// A group merges the parts of an output: a warp many, a thread few. partial (parts, outputs).
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(MaskedMeanArgs args, int64_t parts, const MaskedSum<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWidth>;
  for (int64_t out = Group::number(); out < args.outputs(); out += Group::count()) {
    MaskedSum<double> mine;
    for (int64_t p = Group::rank(); p < parts; p += kWidth) mine.merge(partial[p * args.outputs() + out]);
    const MaskedSum<double> total = Group::reduce(mine);
    if (Group::rank() == 0) args.template finish<scalar_t>(out, total);
  }
}

// n columns of a row of the gradient; from is the place of an item.
template <typename scalar_t, int n>
__device__ __forceinline__ void write(const MaskedMeanArgs& args, const Place& from, int64_t c) {
  using acc_t = acc_type<scalar_t>;
  const Place at = from.moved(args.columns.stride, c);
  const acc_t* share = static_cast<const acc_t*>(args.share) + at.out;
  Weights<acc_t, n> w{};
  w.load(args, at.mask);
  Pack<scalar_t, n> pack;
#pragma unroll
  for (int e = 0; e < n; ++e)
    from_acc(MaskedSum<acc_t>::term(share[e * args.columns.stride.out], w.at(args, e)), pack.at[e]);
  scalar_t* to = static_cast<scalar_t*>(args.grad_input) + at.input;
  if constexpr (n > 1)
    pack.store(to, 16);  // by one instruction, which is not left to the compiler
  else
    pack.store(to);
}

// A warp writes an item, of a row of the gradient.
template <typename scalar_t, int n>
__global__ void __launch_bounds__(kThreads, 3) gradient_kernel(MaskedMeanArgs args, MaskedMeanPlan plan) {
  using Group = RowGroup<kWarp>;
  for (int64_t i = Group::number(); i < plan.items; i += Group::count()) {
    const MaskedMeanPlan::Item item = plan.item(args, i);
    const int64_t rest = item.columns / n * n;
    for (int64_t c = Group::rank() * n; c < rest; c += kWarp * n) write<scalar_t, n>(args, item.place, c);
    for (int64_t c = rest + Group::rank(); n > 1 && c < item.columns; c += kWarp)
      write<scalar_t, 1>(args, item.place, c);
  }
}

int64_t blocks_of(const MaskedMeanArgs& args, int64_t items, int width) {
  return blocks_for(items, kThreads / width, args.max_blocks, kMostBlocks);
}

}  // namespace

size_t masked_mean_workspace(const MaskedMeanArgs& args) {
  const int64_t parts = plan_of(args).parts;
  const size_t sum = args.dtype == DType::kFloat64 ? sizeof(MaskedSum<double>) : sizeof(MaskedSum<float>);
  return parts > 1 ? static_cast<size_t>(parts * args.outputs()) * sum : 0;
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
    return launch(stream, blocks_of(args, args.outputs(), few ? 1 : kWarp), kThreads,
                  few ? merge_kernel<scalar_t, 1> : merge_kernel<scalar_t, kWarp>, args, plan.parts, partial);
  });
}

cudaError_t masked_mean_backward(const MaskedMeanArgs& args, cudaStream_t stream) {
  const MaskedMeanPlan plan(args, 1, kSpan);
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    const bool packs = pack_of(args, args.grad_input) > 1;
    const auto kernel = packs ? gradient_kernel<scalar_t, Pack<scalar_t>::kSize> : gradient_kernel<scalar_t, 1>;
    return launch(stream, blocks_of(args, plan.items, kWarp), kThreads, kernel, args, plan);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
