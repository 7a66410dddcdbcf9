// The loss and its gradient by one read of the logits: a row lies in the registers of a warp, a block or a cluster of
// blocks, which exchange their statistics once. The gradient is written from the registers. Forward alone is the
// same kernel without it, so that its bits are the same, and the gradient has the bits of backward_kernel. Where
// registers do not hold a row, so few are worked on at a time that the second cache has them for their gradient.
#include "row_passes.cuh"

#include <atomic>

namespace sparse_ce {
namespace cuda {
namespace {

constexpr int kCacheThreads = 512;  // of a block whose row waits in the cache: alone on its multiprocessor

// What one thread has of a row, whose 16-byte packs its group shares out: kPacks of them, kStride columns apart.
// Columns that are none of the classes are -inf. Places are counted from the slice's first pack, in 32 bits: registers.
template <typename scalar, int kThreadsOfRow, int kPacks>
struct RowSlice {
  using scalar_t = scalar;
  using acc_t = acc_type<scalar_t>;
  static constexpr bool kHolds = true;
  static constexpr int kWidth = kThreadsOfRow, kSize = Pack<scalar_t>::kSize;
  static constexpr int kStride = kWidth * kSize, kColumns = kPacks * kStride;
  static constexpr int blocks(bool plain) { return kPacks > 8 || !plain ? 2 : 3; }  // that a multiprocessor shall hold

  // Part `part` of the row's slices.
  __device__ RowSlice(const scalar_t* row, int64_t classes, int part, int)
      : origin_(int64_t(part) * kColumns - misalignment(row)), lead_(part == 0 ? misalignment(row) : 0) {
    const int64_t count = classes - origin_;
    count_ = count < 0 ? 0 : count < kColumns ? static_cast<int>(count) : kColumns;
  }

  __device__ static int misalignment(const scalar_t* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(scalar_t));
  }

  // The classes [begin, end) are the group's.
  __device__ int64_t begin() const { return origin_ + lead_; }
  __device__ int64_t end() const { return origin_ + count_; }

  __device__ __forceinline__ void load(const scalar_t* row) {
    const scalar_t* mine = row + first();
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (place(u) >= count_) break;  // nobody looks at those behind
      Pack<scalar_t> pack;
      if (whole(u)) {
        pack = Pack<scalar_t>::load(mine + u * kStride);
      } else {
#pragma unroll
        for (int e = 0; e < kSize; ++e) from_acc(-acc_t(INFINITY), pack.at[e]);
        for_edge(u, [&](int e) { pack.at[e] = mine[u * kStride + e]; });
      }
      std::memcpy(words_[u], pack.at, sizeof(pack));
    }
  }

  template <bool kPlain>
  __device__ __forceinline__ RowStats<acc_t> stats(const ForwardArgs& args, int64_t,
                                                   const LogitTransform<acc_t>& transform) const {
    const bool smooth = !kPlain && args.options.label_smoothing != 0;
    const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
    RowStats<acc_t> stats;
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (place(u) >= count_) break;  // exponentials of nothing would take their time
      acc_t z[kSize];
      numbers(u, z);
      const auto make = [&](const LogitTransform<acc_t>& of_logit) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) z[e] = there(u, e) ? of_logit(z[e]) : -acc_t(INFINITY);
      };
      if constexpr (!kPlain) by_softcap(transform, make);
      stats.push(z, 0, kSize);
      if (!smooth) continue;
      acc_t o[kSize];
      weights(u, weight, o);
      stats.push_weighted(z, o, kSize);
    }
    return stats;
  }

  // `zero` is 0, which the compiler must not know: else it keeps the numbers that it has made of the logits, and for
  // these there are no registers, in place of making them again.
  __device__ __forceinline__ void unknow(uint32_t zero) {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
#pragma unroll
      for (uint32_t& word : words_[u]) word ^= zero;
    }
  }

  // The gradient as if no class had an entry.
  template <bool kPlain>
  __device__ __forceinline__ void write(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                                        const LogitTransform<acc_t>& transform, const scalar_t* row,
                                        scalar_t* gradient) const {
    // Only where labels are smoothed: an infinite one would be multiplied by 0.
    const bool smooth = !kPlain && args.options.label_smoothing != 0;
    const acc_t* weight = smooth ? static_cast<const acc_t*>(args.target.weight) : nullptr;
    const int width = common_width(row, gradient);
    scalar_t* mine = gradient + first();
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (place(u) >= count_) break;
      acc_t x[kSize], o[kSize];
      numbers(u, x);
      if constexpr (!kPlain) weights(u, weight, o);
      const auto make = [&](const LogitTransform<acc_t>& of_logit) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          const auto [z, of_cap] = of_logit.with_slope(x[e]);
          x[e] = c.at(z, o[e]) * (of_logit.scale * of_cap);
        }
      };
      if constexpr (kPlain) {
#pragma unroll
        for (acc_t& of_one : x) of_one = c.at(of_one);
      } else {
        by_softcap(transform, make);
      }
      Pack<scalar_t> pack;
      from_numbers(x, pack);
      if (whole(u))
        pack.store(mine + u * kStride, width);
      else
        for_edge(u, [&](int e) { mine[u * kStride + e] = pack.at[e]; });
    }
  }

 private:
  __device__ static int place(int u) { return (RowGroup<kWidth>::rank() + u * kWidth) * kSize; }
  __device__ int64_t first() const { return origin_ + place(0); }  // the column of the first pack
  __device__ bool there(int u, int e) const { return lead_ <= place(u) + e && place(u) + e < count_; }
  __device__ bool whole(int u) const { return lead_ <= place(u) && place(u) + kSize <= count_; }
  template <typename function_t>
  __device__ __forceinline__ void for_edge(int u, const function_t& f) const {
#pragma unroll
    for (int e = 0; e < kSize; ++e)
      if (there(u, e)) f(e);
  }

  // Of what is no class 0.
  __device__ __forceinline__ void weights(int u, const acc_t* weight, acc_t (&o)[kSize]) const {
    if (whole(u)) return load_weights(weight ? weight + first() + u * kStride : nullptr, o);
#pragma unroll
    for (int e = 0; e < kSize; ++e)
      o[e] = !there(u, e) ? acc_t(0) : weight ? weight[first() + u * kStride + e] : acc_t(1);
  }

  __device__ __forceinline__ void numbers(int u, acc_t (&x)[kSize]) const {
    constexpr int kOfWord = sizeof(uint32_t) / sizeof(scalar_t);
#pragma unroll
    for (int e = 0; e < kSize; ++e) x[e] = number_of<scalar_t>(words_[u][e / kOfWord], e % kOfWord);
  }

  int64_t origin_;  // the column of the slice's first pack, perhaps before the row's first
  int lead_, count_;  // of the places [lead, count) there are classes
  uint32_t words_[kPacks][4];
};

// The same of a row that nobody holds: what is read again comes from the cache.
template <typename scalar>
struct RowInCache {
  using scalar_t = scalar;
  using acc_t = acc_type<scalar_t>;
  static constexpr bool kHolds = false;
  static constexpr int kWidth = kCacheThreads;
  static constexpr int blocks(bool) { return 1; }

  __device__ RowInCache(const scalar_t*, int64_t classes, int part, int parts)
      : begin_(split_begin(classes, parts, part)), end_(split_begin(classes, parts, part + 1)) {}

  __device__ int64_t begin() const { return begin_; }
  __device__ int64_t end() const { return end_; }
  __device__ void load(const scalar_t*) {}
  __device__ void unknow(uint32_t) {}

  template <bool>
  __device__ RowStats<acc_t> stats(const ForwardArgs& args, int64_t r, const LogitTransform<acc_t>&) const {
    return scan_row<kWidth, scalar_t>(args, r, begin_, end_);
  }
  template <bool>
  __device__ void write(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                        const LogitTransform<acc_t>& transform, const scalar_t* row, scalar_t* gradient) const {
    write_dense<kWidth>(args, c, transform, row, gradient, begin_, end_);
  }

 private:
  int64_t begin_, end_;
};

// What the entries among the columns [begin, end) of row r add, relative to `max`; the first part also has those that
// are out of range. All threads of the group.
template <int kWidth, typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ TargetStats<acc_t> entries_of_part(const ForwardArgs& args, EntryRange range,
                                              const LogitTransform<acc_t>& transform, const scalar_t* row,
                                              int64_t begin, int64_t end, int part, acc_t max) {
  using Group = RowGroup<kWidth>;
  TargetSums<LongSum<acc_t>> sums;
  if (!range.valid) sums.mass.sum = Limits<acc_t>::kNaN;
  for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
    const auto entry = args.target.template entry<acc_t>(i);
    const bool none = entry.column < 0;
    if (none ? part != 0 : entry.column < begin || entry.column >= end) continue;
    sums.add(args.target.share(entry), max, [&] { return none ? max : transform(to_acc(row[entry.column])); });
  }
  return Group::reduce(sums.template stats<acc_t>());
}

constexpr int threads_of_block(int width) { return width < kThreads ? kThreads : width; }

// One group per row, or `cluster` blocks. `back` counts where kGradient is set, and reads what `args` writes; the
// gradient may be the logits, of which a block overwrites none but its own. kPlain: logits are what is stored, and
// labels are not smoothed.
template <typename slice_t, bool kPlain, bool kGradient>
__global__ void __launch_bounds__(threads_of_block(slice_t::kWidth), slice_t::blocks(kPlain))
    one_pass_kernel(ForwardArgs args, BackwardArgs back, int cluster,
                    EntryGradient<typename slice_t::acc_t>* entry_gradients) {
  using scalar_t = typename slice_t::scalar_t;
  using acc_t = typename slice_t::acc_t;
  constexpr int kWidth = slice_t::kWidth;
  using Group = RowGroup<kWidth>;
  const int64_t classes = args.target.num_classes;
  constexpr bool kMayShare = Cluster::kExist && Group::kPerBlock == 1;  // a row among blocks, of which 32 bits count
  const unsigned blocks = kMayShare ? static_cast<unsigned>(cluster) : 1;
  const int part = kMayShare ? static_cast<int>(blockIdx.x % blocks) : 0;
  const int64_t step = kMayShare ? gridDim.x / blocks : Group::count();
  for (int64_t r = kMayShare ? blockIdx.x / blocks : Group::number(); r < args.rows; r += step) {
    const auto row = [&] { return args.template row<scalar_t>(r); };
    const auto gradient = [&] { return back.template gradient_row<scalar_t>(r); };
    slice_t slice(row(), classes, part, cluster);
    if (kGradient && part == 0) write_zeros<kWidth>(gradient(), classes, back.vocab);
    if (args.target.ignored(r)) {  // and is not read: of some batches that is most rows
      if (part == 0 && Group::rank() == 0) args.write(r, true, RowStats<acc_t>{}, TargetStats<acc_t>{});
      if (kGradient) write_zeros<kWidth>(gradient(), slice.begin(), slice.end());
      continue;
    }
    slice.load(row());
    const EntryRange range = args.target.row(r);
    const LogitTransform<acc_t> transform =
        kPlain ? LogitTransform<acc_t>(LossOptions{}) : args.template transform<acc_t>(r);
    PartStats<acc_t> stats;
    stats.row = Group::broadcast(Group::reduce(slice.template stats<kPlain>(args, r, transform)));
    stats.entries =
        entries_of_part<kWidth>(args, range, transform, row(), slice.begin(), slice.end(), part, stats.row.max);
    if (kMayShare && cluster > 1) stats = merge_of_cluster(stats, cluster);
    if (part == 0 && Group::rank() == 0) args.write(r, false, stats.row, stats.entries);
    if constexpr (kGradient) {
      if (back.template without_gradient<acc_t>(r)) {
        Group::sync();  // the logits are read
        write_zeros<kWidth>(gradient(), slice.begin(), slice.end());
        continue;
      }
      const acc_t mass = mass_of_row<kWidth, acc_t>(args.target, range);
      const RowLoss<acc_t> of_row(stats.row, stats.entries, args.options, classes);  // whose lse all threads know
      const auto c = back.coefficients(r, mass, of_row.lse, back.lse_residual ? of_row.lse_residual : acc_t(0));
      make_entry_gradients<kWidth>(back, c, transform, range, row(), slice.begin(), slice.end(), entry_gradients);
      Group::sync();  // the logits at the entries are read
      slice.unknow(static_cast<uint32_t>(cluster) >> 8);
      slice.template write<kPlain>(back, c, transform, row(), gradient());
      Group::sync();  // the dense gradient is written
      write_entry_gradients<kWidth>(args.target, range, slice.begin(), slice.end(), entry_gradients, gradient());
    }
  }
}

// ------------------------------------------------------------------------------------------------ launchers

template <typename slice_t>
cudaError_t launch_form(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward, void* workspace,
                        cudaStream_t stream) {
  const int cluster = form.cluster, threads = threads_of_block(form.width);
  const auto launch = [&](auto kernel) {
    // Rows that have no gradient to wait for may be more than the cache has.
    const int64_t most = backward && form.rows > 0 ? form.rows : ((int64_t(1) << 31) - 1) / cluster;
    const int64_t groups = blocks_for(forward.rows, threads / form.width, forward.max_blocks, most);
    return launch_clusters(stream, cluster * groups, threads, cluster, kernel, forward,
                           backward ? *backward : BackwardArgs{}, cluster,
                           static_cast<EntryGradient<typename slice_t::acc_t>*>(workspace));
  };
  const LossOptions& options = forward.options;
  const bool same = options.logit_scale == 1 && options.softcap == 0 && !forward.row_scale;
  if constexpr (slice_t::kHolds) {
    if (same && options.label_smoothing == 0)
      return launch(backward ? one_pass_kernel<slice_t, true, true> : one_pass_kernel<slice_t, true, false>);
  }
  return launch(backward ? one_pass_kernel<slice_t, false, true> : one_pass_kernel<slice_t, false, false>);
}

// The bytes of a row that a form holds.
constexpr int64_t held(const OnePass& form) { return int64_t(16) * form.width * form.packs * form.cluster; }

// Rows at a time, and their gradients behind them, of which something remains in the cache: one for each block that the
// device holds, or as many as there is room for. That is enough while the blocks make exponentials as fast as memory
// gives logits: in half of a device 16-bit ones, in a quarter float32. Predicted of forward + backward: 1.1-1.3 by all,
// 1.2-1.45 by fewer. Both kernels over one part of the rows after the other, each part of a cache's size, would read
// from the cache as well, but in three launches for what takes 50 us: 1.3-1.5.
OnePass in_cache(const CrossEntropyArgs& args, int64_t row_bytes, const Device& device) {
  OnePass form{kCacheThreads, 0, device.clusters ? kMostBlocks : 1};
  const int64_t blocks = std::max(1, device.multiprocessors / form.cluster);
  form.rows = std::min(blocks, device.cache_bytes / 4 * 3 / row_bytes);
  const bool enough = form.rows * size_of(args.dtype) >= blocks && args.rows >= form.rows;
  if (args.reads != Reads::kCached) return enough ? form : OnePass{};
  form.rows = std::max<int64_t>(form.rows, 1);
  return form;
}

}  // namespace

bool device_has_clusters() {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices];  // 0: nobody has asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  if (known[device] == 0)
    known[device] = has_clusters(one_pass_kernel<RowSlice<float, kThreads, 8>, true, false>) ? 1 : -1;
  return known[device] > 0;
}

Device current_device() {
  Device found;
  int device = 0, cache = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return found;
  found.multiprocessors = multiprocessors();
  if (cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device) == cudaSuccess) found.cache_bytes = cache;
  found.clusters = device_has_clusters();
  return found;
}

// The first that holds a row. Beside each what is predicted of forward + backward on an H100, in units of a copy of the
// logits (1 read + 1 write), which no GPU has judged yet; two kernels take 1.5.
OnePass one_pass_of(const CrossEntropyArgs& args, const Device& device) {
  constexpr OnePass kForms[] = {
      {kWarp, 16, 1},  // 8 KiB: 1.15 (65536 x 1000 bfloat16: 100 us)
      {kThreads, 8, 1},  // 32 KiB: 1.05-1.1
      {kThreads, 8, 2},  // 64 KiB: 1.04-1.11 (32768 x 32000 bfloat16: 1.45-1.55 ms)
      {kThreads, 8, 4},  // 128 KiB: the same
      {kThreads, 8, 8},  // 256 KiB: 1.04-1.11 (8192 x 128256 bfloat16: 1.45-1.55 ms)
      {kThreads, 16, 8},  // 512 KiB: 1.06-1.15, two blocks a multiprocessor (1024 x 262144 bfloat16: 380-410 us)
  };
  // Longer rows, and without clusters those above 32 KiB: in_cache, 1.1-1.3, by fewer blocks 1.2-1.45.
  const bool never = args.reads == Reads::kApart || args.dtype == DType::kFloat64;
  if (never || args.strided.inner > 0 || args.rows == 0) return {};
  const int64_t size = size_of(args.dtype);
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 && (args.rows == 1 || args.row_stride * size % 16 == 0);
  const int64_t bytes = args.target.num_classes * size + (aligned ? 0 : 16 - size);
  const int width = plan_of(args, 1).width;  // of backward, which would sum the entries in another order
  for (const OnePass& form : kForms) {
    if (bytes > held(form) || (form.cluster > 1 && !device.clusters)) continue;
    if (form.width != width) return {};
    if (args.reads == Reads::kPlanned || width == kWarp) return form;
  }
  return width == kWarp ? OnePass{} : in_cache(args, bytes, device);
}

cudaError_t cross_entropy_one_pass(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                                   void* workspace, cudaStream_t stream) {
  return with_storage(forward.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    if constexpr (sizeof(scalar_t) < sizeof(double)) {
      auto launch = launch_form<RowSlice<scalar_t, kThreads, 8>>;
      if (form.width == kWarp) launch = launch_form<RowSlice<scalar_t, kWarp, 16>>;
      if (form.packs == 16 && form.width == kThreads) launch = launch_form<RowSlice<scalar_t, kThreads, 16>>;
      if (form.packs == 0) launch = launch_form<RowInCache<scalar_t>>;
      return launch(form, forward, backward, workspace, stream);
    }
    return cudaErrorNotSupported;
  });
}

}  // namespace cuda
}  // namespace sparse_ce
