// Computes masked means. `lanes` threads process the columns of a row, a pack each, and further groups of as many
// process other rows. If the columns are reduced, a warp or a block moves along rows. If they are kept, each thread
// moves down its columns. If there are few outputs, several blocks share their elements, and a second kernel merges the
// sums in a fixed order. Long rows under a bool mask have a kernel of their own, which spends 4 instructions on an
// element.
#include "device/row_group.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kMostLanes = 32;  // for kept columns
constexpr int64_t kLong = 2048;  // elements per output that a warp processes alone, even if there are few outputs
constexpr int64_t kManyRows = 4096;  // with this many outputs, every warp of a device has one
constexpr int64_t kSpan = 16384;  // elements per block; columns of the gradient per warp
constexpr int64_t kEnoughBlocks = 1024;  // enough to occupy a device
constexpr int64_t kMostBlocks = 1 << 20;

struct Plan : MaskedMeanPlan {
  int64_t pack;  // columns per thread at a time
  int lanes;  // a power of two
  bool warps;  // true if a warp is enough for an item
  bool selects;  // true if selected_kernel runs
};

// Returns how many columns can be read and written at once. For packs, every row must begin at a pack's boundary.
inline int64_t pack_of(const MaskedMeanArgs& args, const void* tensor) {
  if (args.dtype == DType::kFloat64) return 1;  // it is not packed; see for_columns
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
  const int64_t parts = std::min(divide_up(kEnoughBlocks, groups), divide_up(rows * width, kSpan));
  // Columns in a part of a reduced row. Each part begins at a pack's boundary.
  const int64_t piece = divide_up(divide_up(columns, divide_up(parts, rows)), 16) * 16;
  const bool fills = pack > 1 && lanes == (warps ? kWarp : kThreads) && args.dtype != DType::kFloat64;
  const bool selects = args.selects && !kept && fills && args.columns.stride.mask != 0;
  return {{args, divide_up(rows, parts), kept ? width : piece}, pack, lanes, warps, selects};
}

// Holds the weights of n adjacent columns as they were read. Converting them waits for the loads.
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

// Adds the packs of an axis, at distance `by` from the first on, to the sums of their n columns.
template <typename scalar_t, int n, typename acc_t>
__device__ __forceinline__ void add_run(const MaskedMeanArgs& args, const Place& from, const Place& stride,
                                        int64_t first, int64_t by, int64_t end, MaskedSum<acc_t>* mine) {
  // Packs in flight: as many as leave registers for two blocks per multiprocessor, or for three with single elements.
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
    const auto read = [&](const auto& selected) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
        if (u < packs && selected(u))
          x[u] = Pack<scalar_t, n>::load(static_cast<const scalar_t*>(args.input) + at.input + u * step.input);
    };
    if (args.columns.stride.mask != 0)
      read([](int) { return true; });
    else
      read([&](int u) { return w[u].at(args, 0) != acc_t(0); });  // masked rows are not read
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
      const int64_t packed_end = item.columns / n * n;
      for (int64_t row = slot; row < item.rows; row += slots) {
        const Place from = item.place.moved(args.rows.stride, row);
        add_run<scalar_t, n>(args, from, args.columns.stride, lane * n, plan.lanes * n, packed_end, mine);
        add_run<scalar_t, 1>(args, from, args.columns.stride, packed_end + lane, plan.lanes, item.columns, mine);
      }
#pragma unroll
      for (int e = 1; e < n; ++e) mine[0].merge(mine[e]);
      const MaskedSum<acc_t> sum = Group::reduce(mine[0]);
      if (Group::rank() == 0) plan.template put<scalar_t>(args, item, 0, {sum.sum, sum.weight}, partial);
      continue;
    }
    const Place from = item.place.moved(args.columns.stride, lane * n);
    if (lane * n < item.columns) add_run<scalar_t, n>(args, from, args.rows.stride, slot, slots, item.rows, mine);
    __syncthreads();  // the sums of the previous item have been read
#pragma unroll
    for (int e = 0; e < n; ++e) sums[e][threadIdx.x] = mine[e].sum, sums[n + e][threadIdx.x] = mine[e].weight;
    __syncthreads();
    // Each thread now processes one column.
    for (int c = threadIdx.x; c < item.columns; c += kThreads) {
      MaskedSum<double> total;
      for (int t = c / n; t < kThreads; t += plan.lanes)
        total.merge(MaskedSum<acc_t>{sums[c % n][t], sums[n + c % n][t]});
      plan.template put<scalar_t>(args, item, c, total, partial);
    }
  }
}

// Sums the elements that a bool mask selects.
template <typename scalar_t>
struct SelectedSum {
  static constexpr int kSize = Pack<scalar_t>::kSize, kWords = kSize / 4, kOfWord = 4 / sizeof(scalar_t);
  using Mask = Pack<uint32_t, kWords>;  // a byte per element, 0 or 1
  float sums[2] = {0, 0};
  uint32_t number = 0;

  // Adds the packs of `count`, kStride elements apart. All loads are issued before the first sum.
  template <int64_t kStride, typename count_t>
  __device__ __forceinline__ void add(const scalar_t* x, const uint8_t* mask, count_t count) {
    constexpr int n = count_t::value;
    Pack<scalar_t> packs[n];
    Mask masks[n];
    load_packs<kStride>(x, count, packs);
#pragma unroll
    for (int u = 0; u < n; ++u) {
      masks[u] = Mask{};  // missing packs are not selected
      if (count.has(u)) masks[u] = Mask::load(reinterpret_cast<const uint32_t*>(mask + u * kStride));
    }
    uint32_t counts = 0;  // four, one per byte
    static_assert(4 * n * kWords < 256, "their sum fits into a byte");
#pragma unroll
    for (int u = 0; u < n; ++u) {
      uint32_t words[4];
      std::memcpy(words, packs[u].at, sizeof(words));
#pragma unroll
      for (int w = 0; w < kWords; ++w) counts += masks[u].at[w];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // All bits of a selected element are 1. An AND hides NaN and inf, unlike a multiplication.
        const uint32_t bits = masks[u].at[w * kWords / 4] * 0xffu;
        words[w] &= kOfWord == 1 ? __byte_perm(bits, 0, w * 0x1111u) : __byte_perm(bits, 0, w % 2 ? 0x3322u : 0x1100u);
      }
      // The sum of a pack is a tree, so that an error grows with the number of packs.
      float of_word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        of_word[w] = number_of<scalar_t>(words[w], 0);
        if constexpr (kOfWord == 2) of_word[w] += number_of<scalar_t>(words[w], 1);
      }
      sums[u % 2] += (of_word[0] + of_word[1]) + (of_word[2] + of_word[3]);
    }
    number += counts * 0x01010101u >> 24;  // the sum of the four
  }
};

// Sums the items of reduced columns, as sum_kernel does, in another order. The columns occupy all threads of a group.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    selected_kernel(MaskedMeanArgs args, Plan plan, MaskedSum<float>* partial) {
  using Group = RowGroup<kWidth>;
  constexpr int kPacks = 4, kSize = Pack<scalar_t>::kSize;
  constexpr int64_t kStride = int64_t(kWidth) * kSize;
  for (int64_t i = Group::number(); i < plan.items; i += Group::count()) {
    const Plan::Item item = plan.item(args, i);
    SelectedSum<scalar_t> mine;
    for (int64_t row = 0; row < item.rows; ++row) {
      const Place at = item.place.moved(args.rows.stride, row);
      const scalar_t* x = static_cast<const scalar_t*>(args.input) + at.input + Group::rank() * kSize;
      const uint8_t* mask = static_cast<const uint8_t*>(args.mask) + at.mask + Group::rank() * kSize;
      int64_t left = item.columns - Group::rank() * kSize;
#pragma unroll 1
      for (; left > (kPacks - 1) * kStride + kSize - 1; left -= kPacks * kStride) {
        mine.template add<kStride>(x, mask, Count<kPacks>{});
        x += kPacks * kStride, mask += kPacks * kStride;
      }
      if (left >= kSize)
        mine.template add<kStride>(x, mask, Some<kPacks>{static_cast<int>((left - kSize) / kStride) + 1});
      // The elements behind the last pack, one per thread.
      const int64_t last = item.columns / kSize * kSize + Group::rank();
      if (last >= item.columns || !static_cast<const uint8_t*>(args.mask)[at.mask + last]) continue;
      mine.sums[1] += to_acc(static_cast<const scalar_t*>(args.input)[at.input + last]);
      mine.number += 1;
    }
    const MaskedSum<float> sum =
        Group::reduce(MaskedSum<float>{mine.sums[0] + mine.sums[1], static_cast<float>(mine.number)});
    if (Group::rank() == 0) plan.template put<scalar_t>(args, item, 0, {sum.sum, sum.weight}, partial);
  }
}

// A group merges the parts of an output: a warp for many parts, a thread for few. partial is (parts, outputs).
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

// Writes n columns of a row of the gradient. `from` is the place of an item.
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
    pack.store(to, 16);  // forces a single instruction
  else
    pack.store(to);
}

// A warp writes an item of a row of the gradient.
template <typename scalar_t, int n>
__global__ void __launch_bounds__(kThreads, 3) gradient_kernel(MaskedMeanArgs args, MaskedMeanPlan plan) {
  using Group = RowGroup<kWarp>;
  for (int64_t i = Group::number(); i < plan.items; i += Group::count()) {
    const MaskedMeanPlan::Item item = plan.item(args, i);
    const int64_t packed_end = item.columns / n * n;
    for (int64_t c = Group::rank() * n; c < packed_end; c += kWarp * n) write<scalar_t, n>(args, item.place, c);
    for (int64_t c = packed_end + Group::rank(); n > 1 && c < item.columns; c += kWarp)
      write<scalar_t, 1>(args, item.place, c);
  }
}

int64_t blocks_of(const MaskedMeanArgs& args, int64_t items, int width) {
  return blocks_for(items, kThreads / width, args.max_blocks, kMostBlocks);
}

}  // namespace

size_t workspace_of(const MaskedMeanArgs& args) {
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
    auto packs = plan.warps ? sum_kernel<scalar_t, kWarp, kPack> : sum_kernel<scalar_t, kThreads, kPack>;
    if constexpr (sizeof(scalar_t) < sizeof(double))
      if (plan.selects) packs = plan.warps ? selected_kernel<scalar_t, kWarp> : selected_kernel<scalar_t, kThreads>;
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
