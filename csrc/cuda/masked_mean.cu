// Where the columns are reduced, a warp or a block sums along rows; where they are kept, each thread sums some columns
// across rows. With few outputs their elements are shared among blocks, whose sums a second kernel merges, in a fixed
// order.
#include "row_group.cuh"

#include "masked_mean.h"

#include <algorithm>
#include <type_traits>

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kSpan = 4096;          // columns of a row that a warp takes at a time
constexpr int64_t kLong = 2048;          // elements behind an output that a warp takes alone
constexpr int64_t kLeastPart = 16384;    // elements that are worth a block
constexpr int64_t kMostPart = 1 << 20;   // whose count a float still holds
constexpr int64_t kWantedBlocks = 1024;  // of a device that is busy
constexpr int64_t kMostBlocks = 1 << 20;

// Packs in flight per thread: as many as leave room for three blocks on a multiprocessor.
template <typename scalar_t>
constexpr int kUnroll = sizeof(scalar_t) == 2 ? 2 : 4;

SCE_HD int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

// n numbers that lie side by side, as wide as they can be read at once.
template <int n, typename from_t, typename to_t>
__device__ __forceinline__ void load(const from_t* p, to_t (&out)[n]) {
  struct alignas(n * sizeof(from_t) < 16 ? n * sizeof(from_t) : 16) Numbers {
    from_t at[n];
  };
  const Numbers numbers = *reinterpret_cast<const Numbers*>(p);
#pragma unroll
  for (int e = 0; e < n; ++e) out[e] = static_cast<to_t>(numbers.at[e]);
}

// The weights along a row.
template <typename acc_t>
struct RowWeights {
  const void* at;  // column 0
  DType dtype;
  bool differ;
  acc_t same;  // where they do not differ

  __device__ RowWeights(const MaskedMeanArgs& args, const Place& place)
      : at(static_cast<const char*>(args.mask) + place.mask * size_of(args.mask_dtype)), dtype(args.mask_dtype),
        differ(args.column.mask != 0), same(differ ? acc_t(1) : load_number<acc_t>(at, dtype, 0)) {}

  __device__ acc_t operator[](int64_t c) const { return differ ? load_number<acc_t>(at, dtype, c) : same; }
  __device__ bool hidden() const { return !differ && same == acc_t(0); }

  // Whether packs of n weights can be read at once from where x, a row of the input, lies on a 16-byte boundary.
  template <int n, typename scalar_t>
  __device__ bool by_packs(const scalar_t* x) const {
    const int64_t first = (n - address(x) % 16 / int64_t(sizeof(scalar_t))) % n;
    if (!differ) return true;
    if (dtype == DType::kUInt8) return (address(at) + first) % n == 0;
    return dtype == (sizeof(acc_t) == 8 ? DType::kFloat64 : DType::kFloat32) &&
           (address(at) + first * int64_t(sizeof(acc_t))) % 16 == 0;
  }

  template <int n>
  __device__ __forceinline__ void load(int64_t c, acc_t (&w)[n]) const {
    if (n == 1 || !differ) {
      const acc_t every = n == 1 ? (*this)[c] : same;
#pragma unroll
      for (int e = 0; e < n; ++e) w[e] = every;
    } else if (dtype == DType::kUInt8) {
      cuda::load(static_cast<const uint8_t*>(at) + c, w);
    } else {
      cuda::load(static_cast<const acc_t*>(at) + c, w);
    }
  }
};

// How the elements are shared: a group takes `units` at a time, spans of columns or rows, of one output or of some side
// by side.
struct Plan {
  int64_t spans;   // of a row
  int64_t blocks;  // of columns that are kept
  int64_t units, units_per_part, parts, items;
  int64_t pack;     // kept columns that a thread takes
  int lanes;        // threads side by side on kept columns: a power of two
  bool warp_items;  // along: a warp is enough for an item
};

inline int64_t parts_of(int64_t elements, int64_t groups) {
  const int64_t wanted = std::min((kWantedBlocks + groups - 1) / groups, (elements + kLeastPart - 1) / kLeastPart);
  return std::max<int64_t>({1, wanted, (elements + kMostPart - 1) / kMostPart});
}

// Whether every thread's columns of every row can be read as packs: then all addresses are multiples of a pack.
inline bool across_by_packs(const MaskedMeanArgs& args) {
  const int64_t pack = 16 / size_of(args.dtype), weight = size_of(args.mask_dtype);
  const DType number = args.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const bool direct = args.mask_dtype == DType::kUInt8 || args.mask_dtype == number;
  const int64_t mask_pack = args.column.mask == 0 ? 1 : std::min(pack, 16 / weight);
  bool fit = args.columns % pack == 0 && address(args.input) % 16 == 0 && (args.column.mask == 0 || direct) &&
             address(args.mask) % (mask_pack * weight) == 0;
  for (const Axes* axes : {&args.outer, &args.rows})
    for (int d = 0; d < axes->dims; ++d)
      fit = fit && axes->stride[d].input % pack == 0 && axes->stride[d].mask % mask_pack == 0;
  return fit;
}

inline Plan plan_of(const MaskedMeanArgs& args) {
  Plan plan{};
  const int64_t pack = plan.pack = across_by_packs(args) ? 16 / size_of(args.dtype) : 1;
  plan.spans = args.columns_kept ? 1 : (args.columns + kSpan - 1) / kSpan;
  plan.units = args.rows.count * plan.spans;
  plan.lanes = 1;
  while (plan.lanes < kWarp && plan.lanes * pack < args.columns) plan.lanes *= 2;
  const int64_t block = std::min(args.columns, plan.lanes * pack);
  plan.blocks = args.columns_kept ? (args.columns + block - 1) / block : 1;
  const int64_t elements = args.rows.count * (args.columns_kept ? block : args.columns);
  const int64_t parts = parts_of(elements, args.outer.count * plan.blocks);
  plan.units_per_part = (plan.units + parts - 1) / parts;
  plan.parts = (plan.units + plan.units_per_part - 1) / plan.units_per_part;
  plan.items = args.outer.count * plan.blocks * plan.parts;
  plan.warp_items = elements <= kLong;
  return plan;
}

// What a thread adds up: n columns side by side.
template <typename acc_t, int n>
struct ColumnSums {
  acc_t sum[n] = {}, weight[n] = {};

  template <typename scalar_t>
  __device__ void add(const scalar_t (&x)[n], const acc_t (&w)[n]) {
#pragma unroll
    for (int e = 0; e < n; ++e) sum[e] += MaskedSum<acc_t>::term(to_acc(x[e]), w[e]), weight[e] += w[e];
  }
};

// Adds a thread's share of the columns [0, n) of a row from a place on. All threads of the warp.
template <typename scalar_t, typename acc_t>
__device__ void add_span(const MaskedMeanArgs& args, const Place& place, int64_t n, MaskedSum<acc_t>& mine) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const scalar_t* x = static_cast<const scalar_t*>(args.input) + place.input;
  const RowWeights<acc_t> w(args, place);
  if (w.hidden()) return;  // it is not read
  const auto add = [&](scalar_t value, acc_t weight) {
    mine.sum += MaskedSum<acc_t>::term(to_acc(value), weight);
    mine.weight += weight;
  };
  for_columns<kWarp, kUnroll<scalar_t>>(
      x, 0, n, w.template by_packs<kSize>(x),
      [&](int64_t c, auto count) {
        constexpr int kPacks = decltype(count)::value;
        Pack<scalar_t> packs[kPacks];
        acc_t weights[kPacks][kSize];
#pragma unroll
        for (int u = 0; u < kPacks; ++u) packs[u] = Pack<scalar_t>::load(x + c + u * kWarp * kSize);
#pragma unroll
        for (int u = 0; u < kPacks; ++u) w.load(c + u * kWarp * kSize, weights[u]);
#pragma unroll
        for (int u = 0; u < kPacks; ++u)
#pragma unroll
          for (int e = 0; e < kSize; ++e) add(packs[u].at[e], weights[u][e]);
      },
      [&](int64_t c) { add(x[c], w[c]); });
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads)
    along_kernel(MaskedMeanArgs args, Plan plan, MaskedSum<acc_type<scalar_t>>* partial) {
  using acc_t = acc_type<scalar_t>;
  using Group = RowGroup<kWidth>;
  for (int64_t item = Group::number(); item < plan.items; item += Group::count()) {
    const Place from = args.outer.at(item / plan.parts);
    const int64_t begin = item % plan.parts * plan.units_per_part;
    const int64_t end = begin + plan.units_per_part < plan.units ? begin + plan.units_per_part : plan.units;
    MaskedSum<acc_t> mine;
    for (int64_t unit = begin + Group::rank() / kWarp; unit < end; unit += kWidth / kWarp) {
      const int64_t first = unit % plan.spans * kSpan;
      const int64_t n = args.columns - first < kSpan ? args.columns - first : kSpan;
      const Place place = args.rows.at(unit / plan.spans).moved(args.column, first).moved(from, 1);
      add_span<scalar_t>(args, place, n, mine);
    }
    const MaskedSum<acc_t> sum = Group::reduce(mine);
    if (Group::rank() != 0) continue;
    if (plan.parts > 1)
      partial[item] = sum;
    else
      args.template finish<scalar_t>(from.out, {sum.sum, sum.weight});
  }
}

// Adds rows r, r + step, ... of which there are kRows, from a place on, which is that of the thread's first column.
template <int kRows, typename scalar_t, typename acc_t, int n>
__device__ __forceinline__ void add_rows(const MaskedMeanArgs& args, const Place& from, int64_t r, int64_t step,
                                         ColumnSums<acc_t, n>& mine) {
  scalar_t x[kRows][n] = {};
  acc_t weights[kRows][n];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const Place place = args.rows.at(r + u * step).moved(from, 1);
    const RowWeights<acc_t> w(args, place);
    w.load(0, weights[u]);
    if (!w.hidden()) load(static_cast<const scalar_t*>(args.input) + place.input, x[u]);  // else it is not read
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) mine.add(x[u], weights[u]);
}

// A thread takes n columns, which are a pack or one.
template <typename scalar_t, int n>
__global__ void __launch_bounds__(kThreads, sizeof(scalar_t) == 2 ? 2 : 3)
    across_kernel(MaskedMeanArgs args, Plan plan, MaskedSum<acc_type<scalar_t>>* partial) {
  using acc_t = acc_type<scalar_t>;
  SCE_SHARED(acc_t, sums, [2 * n][kThreads]);
  const int lane = threadIdx.x % plan.lanes, slot = threadIdx.x / plan.lanes, slots = kThreads / plan.lanes;
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    const int64_t part = item % plan.parts, group = item / plan.parts, outer = group / plan.blocks;
    const int64_t first = group % plan.blocks * plan.lanes * n, column = first + int64_t(lane) * n;
    const Place from = args.outer.at(outer).moved(args.column, column);
    const int64_t begin = part * plan.units_per_part;
    const int64_t end = begin + plan.units_per_part < plan.units ? begin + plan.units_per_part : plan.units;
    // Where the sums go, kept in place of what says it: registers are what this kernel has least of.
    const int64_t to = plan.parts > 1 ? (outer * plan.parts + part) * args.columns + first : from.out - lane * n;
    const int columns = static_cast<int>(args.columns - first < plan.lanes * n ? args.columns - first : plan.lanes * n);
    ColumnSums<acc_t, n> mine;
    int64_t r = column < args.columns ? begin + slot : end;
#pragma unroll 1
    for (; r + slots < end; r += 2 * slots) add_rows<2, scalar_t>(args, from, r, slots, mine);
    if (r < end) add_rows<1, scalar_t>(args, from, r, slots, mine);

    __syncthreads();  // the last item's sums are read
#pragma unroll
    for (int e = 0; e < n; ++e) sums[e][threadIdx.x] = mine.sum[e], sums[n + e][threadIdx.x] = mine.weight[e];
    __syncthreads();
    // Now a thread takes a column.
    for (int c = threadIdx.x; c < columns; c += kThreads) {
      MaskedSum<double> total;
      for (int t = c / n; t < kThreads; t += plan.lanes)
        total.merge(MaskedSum<acc_t>{sums[c % n][t], sums[n + c % n][t]});
      if (plan.parts > 1)
        partial[to + c] = {static_cast<acc_t>(total.sum), static_cast<acc_t>(total.weight)};
      else
        args.template finish<scalar_t>(to + c, total);
    }
  }
}

// A warp merges the parts of an output. partial (outer, parts, width).
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(MaskedMeanArgs args, int64_t parts, const MaskedSum<acc_type<scalar_t>>* partial) {
  using Group = RowGroup<kWarp>;
  const int64_t width = args.width();
  for (int64_t item = Group::number(); item < args.outer.count * width; item += Group::count()) {
    const int64_t outer = item / width, c = item % width;
    MaskedSum<double> mine;
    for (int64_t p = Group::rank(); p < parts; p += kWarp) mine.merge(partial[(outer * parts + p) * width + c]);
    const MaskedSum<double> total = Group::reduce(mine);
    if (Group::rank() == 0) args.template finish<scalar_t>(args.outer.at(outer).out + c, total);
  }
}

// A warp writes a span of a row of the gradient.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, 3) gradient_kernel(MaskedMeanArgs args, int64_t spans) {
  using acc_t = acc_type<scalar_t>;
  using Group = RowGroup<kWarp>;
  constexpr int kSize = Pack<scalar_t>::kSize;
  const int64_t rows = args.rows.count * spans;
  for (int64_t item = Group::number(); item < args.outer.count * rows; item += Group::count()) {
    const int64_t first = item % spans * kSpan;
    const int64_t n = args.columns - first < kSpan ? args.columns - first : kSpan;
    const Place row = args.outer.at(item / rows).moved(args.column, first);
    const Place place = args.rows.at(item % rows / spans).moved(row, 1);
    const RowWeights<acc_t> w(args, place);
    const acc_t* share = static_cast<const acc_t*>(args.share) + place.out;
    scalar_t* gradient = static_cast<scalar_t*>(args.grad_input) + place.input;
    const acc_t same = *share;
    const auto at = [&](int64_t c) { return args.columns_kept ? share[c] : same; };
    for_columns<kWarp, 1>(
        gradient, 0, n, w.template by_packs<kSize>(gradient),
        [&](int64_t c, auto) {
          acc_t weights[kSize];
          w.load(c, weights);
          Pack<scalar_t> pack;
#pragma unroll
          for (int e = 0; e < kSize; ++e) from_acc(MaskedSum<acc_t>::term(at(c + e), weights[e]), pack.at[e]);
          // Said in so many words: a plain store of numbers that were just computed falls into four (nvcc 13.0).
          __stwb(reinterpret_cast<uint4*>(gradient + c), bit_cast<uint4>(pack));
        },
        [&](int64_t c) { from_acc(MaskedSum<acc_t>::term(at(c), w[c]), gradient[c]); });
  }
}

int64_t blocks_of(const MaskedMeanArgs& args, int64_t blocks) {
  return blocks_for(blocks, 1, args.max_blocks, kMostBlocks);
}

int64_t in_warps(int64_t items) { return (items + kWarps - 1) / kWarps; }

}  // namespace

size_t masked_mean_workspace(const MaskedMeanArgs& args) {
  const Plan plan = plan_of(args);
  const size_t sum = args.dtype == DType::kFloat64 ? sizeof(MaskedSum<double>) : sizeof(MaskedSum<float>);
  return plan.parts > 1 ? static_cast<size_t>(args.outer.count * plan.parts * args.width()) * sum : 0;
}

cudaError_t masked_mean(const MaskedMeanArgs& args, void* workspace, cudaStream_t stream) {
  const Plan plan = plan_of(args);
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    auto* partial = static_cast<MaskedSum<acc_type<scalar_t>>*>(workspace);
    const auto across = plan.pack > 1 ? across_kernel<scalar_t, Pack<scalar_t>::kSize> : across_kernel<scalar_t, 1>;
    const auto along = plan.warp_items ? along_kernel<scalar_t, kWarp> : along_kernel<scalar_t, kThreads>;
    const int64_t items = args.columns_kept || !plan.warp_items ? plan.items : in_warps(plan.items);
    const cudaError_t error =
        launch(stream, blocks_of(args, items), kThreads, args.columns_kept ? across : along, args, plan, partial);
    if (error != cudaSuccess || plan.parts == 1) return error;
    const int64_t outputs = args.outer.count * args.width();
    return launch(stream, blocks_of(args, in_warps(outputs)), kThreads, merge_kernel<scalar_t>, args, plan.parts,
                  partial);
  });
}

cudaError_t masked_mean_backward(const MaskedMeanArgs& args, cudaStream_t stream) {
  const int64_t spans = (args.columns + kSpan - 1) / kSpan;
  return with_storage(args.dtype, [&](auto storage) {
    return launch(stream, blocks_of(args, in_warps(args.outer.count * args.rows.count * spans)), kThreads,
                  gradient_kernel<decltype(storage)>, args, spans);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
