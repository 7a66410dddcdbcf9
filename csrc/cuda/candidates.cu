// Computes the logits of a linear head at a few ids per row, and their gradients. Warps work independently. Each
// processes a few ids of a row (forward), a span of a row's columns (gradient of the input), or a span of an id's
// columns (gradient of the weight). The kernels are bound by reading rows of the weight or the input from random
// positions. They read packs of 16 bytes, kFlight of them in flight per thread.
#include "device/row_group.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kFlight = 4;
constexpr int64_t kMostBlocks = 1 << 20;
constexpr unsigned kAllLanes = 0xffffffffu;
using Warp = RowGroup<kWarp>;

// Accesses rows of elements by packs of kSize.
template <typename element_t, int kSize>
struct Rows {
  using scalar_t = std::remove_const_t<element_t>;
  using pack_t = Pack<scalar_t, kSize>;
  element_t* first;
  int64_t stride, width;
  bool by_packs;

  __device__ Rows(element_t* first, int64_t stride, int64_t width)
      : first(first), stride(stride), width(width), by_packs(pack_t::aligned(first) && stride % kSize == 0) {}

  __device__ bool whole(int64_t c) const { return by_packs && c + kSize <= width; }
  // Loads the elements from c on. Elements beyond the row's end are 0.
  __device__ pack_t load(int64_t r, int64_t c) const {
    const element_t* at = first + r * stride + c;
    if (whole(c)) return pack_t::load(at);
    pack_t pack;
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      from_acc(acc_type<scalar_t>(0), pack.at[e]);
      if (c + e < width) pack.at[e] = at[e];
    }
    return pack;
  }
  __device__ void store(int64_t r, int64_t c, const pack_t& pack) const {
    element_t* at = first + r * stride + c;
    if (whole(c)) return pack.store(at);
#pragma unroll
    for (int e = 0; e < kSize; ++e)
      if (c + e < width) at[e] = pack.at[e];
  }
};

// Computes total += d pack.
template <typename acc_t, typename scalar_t, int kSize>
__device__ void add(acc_t d, const Pack<scalar_t, kSize>& pack, acc_t* total) {
#pragma unroll
  for (int e = 0; e < kSize; ++e) total[e] = multiply_add(d, to_acc(pack.at[e]), total[e]);
}

template <typename scalar_t, typename acc_t, int kSize>
__device__ Pack<scalar_t, kSize> rounded(const acc_t (&total)[kSize]) {
  Pack<scalar_t, kSize> pack;
#pragma unroll
  for (int e = 0; e < kSize; ++e) from_acc(total[e], pack.at[e]);
  return pack;
}

template <typename acc_t>
struct Dots {
  acc_t at[kFlight] = {};

  __device__ void merge(const Dots& other) {
#pragma unroll
    for (int u = 0; u < kFlight; ++u) at[u] += other.at[u];
  }
};

// Returns the number of warps that share a row with the average number of entries.
SCE_HD int64_t warps_a_row(const TargetView& target) {
  const int64_t entries = target.rows > 0 ? divide_up(target.entries, target.rows) : 0;
  return entries > kFlight ? divide_up(entries, kFlight) : 1;
}

// With three blocks a thread has 80 registers. Without this bound ptxas assigns 64 and spills (sm_80, sm_90).
template <typename input_t, typename weight_t>
__global__ void __launch_bounds__(kThreads, 3) logits_kernel(CandidateForwardArgs args) {
  using acc_t = acc_type<input_t>;
  constexpr int kSize = 16 / sizeof(weight_t);
  const LogitTransform<acc_t> transform(args.options);
  const Rows<const input_t, kSize> inputs(args.input_row<input_t>(0), args.input_stride, args.width);
  const Rows<const weight_t, kSize> weights(args.weight_row<weight_t>(0), args.weight_stride, args.width);
  const int64_t body = inputs.by_packs && weights.by_packs ? args.width / kSize * kSize : 0;  // the columns of packs
  const int64_t parts = warps_a_row(args.target);
  for (int64_t item = Warp::number(); item < args.target.rows * parts; item += Warp::count()) {
    const int64_t r = item / parts;
    const EntryRange range = args.target.row(r);
    const bool ignored = args.target.ignored(r);
    for (int64_t i = range.begin + item % parts * kFlight; i < range.end; i += parts * kFlight) {
      int64_t columns[kFlight], any = -1;  // entries without a class read the column `any` again
#pragma unroll
      for (int u = kFlight - 1; u >= 0; --u) {
        const bool padding = ignored || i + u >= range.end;
        columns[u] = padding ? TargetView::kPadding : args.target.template column<acc_t>(i + u);
        if (columns[u] >= 0) any = columns[u];
      }
      Dots<acc_t> dots;
      if (any >= 0) {
        const input_t* x = args.input_row<input_t>(r);
        const weight_t* w[kFlight];
#pragma unroll
        for (int u = 0; u < kFlight; ++u) w[u] = args.weight_row<weight_t>(columns[u] < 0 ? any : columns[u]);
        // Without this pragma the compiler unrolls the loops, and the registers suffice only for two blocks.
#pragma unroll 1
        for (int64_t c = Warp::rank() * kSize; c < body; c += kWarp * kSize) {
          const auto xs = Pack<input_t, kSize>::load(x + c);
          Pack<weight_t, kSize> ws[kFlight];
#pragma unroll
          for (int u = 0; u < kFlight; ++u) ws[u] = Pack<weight_t, kSize>::load(w[u] + c);
#pragma unroll
          for (int u = 0; u < kFlight; ++u) {
#pragma unroll
            for (int e = 0; e < kSize; ++e)
              dots.at[u] = multiply_add(to_acc(xs.at[e]), static_cast<acc_t>(to_acc(ws[u].at[e])), dots.at[u]);
          }
        }
#pragma unroll 1
        for (int64_t c = body + Warp::rank(); c < args.width; c += kWarp) {
#pragma unroll
          for (int u = 0; u < kFlight; ++u)
            dots.at[u] = multiply_add(to_acc(x[c]), static_cast<acc_t>(to_acc(w[u][c])), dots.at[u]);
        }
        dots = Warp::reduce(dots);
      }
      if (Warp::rank() != 0) continue;
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (i + u >= range.end) continue;
        if (columns[u] < 0)
          args.template write_none<acc_t>(i + u, columns[u]);
        else
          args.write(i + u, columns[u], dots.at[u], transform);
      }
    }
  }
}

// Each lane computes the gradient of one entry. Then all lanes add its row of the weight.
template <typename input_t, typename weight_t>
__global__ void __launch_bounds__(kThreads) input_kernel(CandidateBackwardArgs args) {
  using acc_t = acc_type<input_t>;
  constexpr int kSize = 16 / sizeof(weight_t);
  const LogitTransform<acc_t> transform(args.options);
  const Rows<const weight_t, kSize> weights(args.weight_row<weight_t>(0), args.weight_stride, args.width);
  const Rows<input_t, kSize> gradients(static_cast<input_t*>(args.grad_input), args.width, args.width);
  const int64_t spans = args.grad_input && args.width > 0 ? divide_up(args.width, kWarp * kSize) : 1;
  for (int64_t item = Warp::number(); item < args.target.rows * spans; item += Warp::count()) {
    const int64_t r = item / spans, c = (item % spans * kWarp + Warp::rank()) * kSize;
    const bool keeps = args.ids && item % spans == 0;
    const EntryRange range = args.target.row(r);
    const int64_t end = args.target.ignored(r) ? range.begin : range.end;
    acc_t total[kSize] = {};
    for (int64_t first = range.begin; first < end; first += kWarp) {
      const int64_t i = first + Warp::rank();
      const CandidateGradient<acc_t> mine =
          i < end ? args.gradient(i, transform) : CandidateGradient<acc_t>{-1, acc_t(0)};
      if (keeps && mine.column >= 0) args.keep(i, r, mine);
      if (!args.grad_input) continue;
      for (int k = 0; k < kWarp && first + k < end; k += kFlight) {
        Pack<weight_t, kSize> w[kFlight] = {};
        acc_t d[kFlight];
#pragma unroll
        for (int u = 0; u < kFlight; ++u) {
          const int64_t column = __shfl_sync(kAllLanes, mine.column, k + u);
          d[u] = __shfl_sync(kAllLanes, mine.d, k + u);
          if (column >= 0 && c < args.width) w[u] = weights.load(column, c);
        }
#pragma unroll
        for (int u = 0; u < kFlight; ++u) add(d[u], w[u], total);
      }
    }
    if (args.grad_input && c < args.width) gradients.store(r, c, rounded<input_t>(total));
  }
}

// Adds the entries of an id sequentially, so that their sum is the same in every run.
template <typename input_t, typename weight_t>
__global__ void __launch_bounds__(kThreads) weight_kernel(CandidateWeightArgs args) {
  using acc_t = acc_type<input_t>;
  constexpr int kSize = 16 / sizeof(input_t);
  const Rows<const input_t, kSize> inputs(static_cast<const input_t*>(args.input), args.input_stride, args.width);
  const Rows<weight_t, kSize> gradients(static_cast<weight_t*>(args.grad_weight), args.width, args.width);
  const int64_t spans = args.grad_weight && args.width > 0 ? divide_up(args.width, kWarp * kSize) : 1;
  for (int64_t item = Warp::number(); item < args.entries * spans; item += Warp::count()) {
    const int64_t p = item / spans, c = (item % spans * kWarp + Warp::rank()) * kSize;
    if (!args.begins(p)) continue;
    const bool writes = args.grad_weight && c < args.width;
    const int64_t id = args.ids[p];
    acc_t total[kSize] = {}, of_bias = 0;
    int count = kWarp;  // number of lanes whose entry has this id
    for (int64_t first = p; count == kWarp; first += kWarp) {
      const int64_t q = first + Warp::rank();
      const bool same = q < args.entries && args.ids[q] == id;
      const int64_t i = same ? args.order[q] : 0, row = same ? args.rows[i] : 0;
      const acc_t d = same ? static_cast<const acc_t*>(args.grad_logits)[i] : acc_t(0);
      count = __popc(__ballot_sync(kAllLanes, same));
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        const acc_t of_entry = __shfl_sync(kAllLanes, d, k);
        const int64_t r = __shfl_sync(kAllLanes, row, k);
        of_bias += of_entry;
        if (writes) add(of_entry, inputs.load(r, c), total);
      }
    }
    if (args.grad_bias && item % spans == 0 && Warp::rank() == 0) args.write_bias(p, of_bias);
    if (writes) gradients.store(args.gradient_row(p), c, rounded<weight_t>(total));
  }
}

// A warp processes one of the `items` at a time.
template <typename args_t, typename... parameters_t>
cudaError_t launch_warps(cudaStream_t stream, int64_t items, const args_t& args, void (*kernel)(parameters_t...)) {
  if (items == 0) return cudaSuccess;
  return launch(stream, blocks_for(items, Warp::kPerBlock, args.max_blocks, kMostBlocks), kThreads, kernel, args);
}

// Returns how many spans, which a warp processes at once, a row of `width` elements has.
int64_t spans_of(bool any, int64_t width, DType dtype) {
  return any && width > 0 ? divide_up(width, kWarp * 16 / size_of(dtype)) : 1;
}

}  // namespace

cudaError_t candidate_logits(const CandidateForwardArgs& args, cudaStream_t stream) {
  return with_head(args.input_dtype, args.weight_dtype, [&](auto x, auto w) {
    return launch_warps(stream, args.target.rows * warps_a_row(args.target), args,
                        logits_kernel<decltype(x), decltype(w)>);
  });
}

cudaError_t candidate_logits_backward(const CandidateBackwardArgs& args, cudaStream_t stream) {
  return with_head(args.input_dtype, args.weight_dtype, [&](auto x, auto w) {
    return launch_warps(stream, args.target.rows * spans_of(args.grad_input, args.width, args.weight_dtype), args,
                        input_kernel<decltype(x), decltype(w)>);
  });
}

cudaError_t candidate_weight_gradient(const CandidateWeightArgs& args, cudaStream_t stream) {
  return with_head(args.input_dtype, args.weight_dtype, [&](auto x, auto w) {
    return launch_warps(stream, args.entries * spans_of(args.grad_weight, args.width, args.input_dtype), args,
                        weight_kernel<decltype(x), decltype(w)>);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
