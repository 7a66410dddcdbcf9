// The loss and its gradient by one read of the logits: a row lies in the registers of a warp, or in the shared memory of
// a block or of a cluster of blocks, which exchange their statistics once. The gradient is written from there. Forward
// alone is the same kernel without it, so that its bits are the same, and the gradient has the bits of backward_kernel.
#include "row_passes.cuh"

#include <atomic>

namespace sparse_ce {
namespace cuda {
namespace {

// Of a block, 16 bytes of each thread: 64 KiB, of which a multiprocessor holds three.
constexpr int kSharedPacks = 16;
constexpr int kHeldPacks = 4, kWarpPacks = 48;  // of each thread of a warp, in registers and in shared memory

// What a thread has of a row, in registers: `packs` of them, of which each is named when the kernel is compiled.
template <int packs>
struct InRegisters {
  static constexpr int kUnroll = packs, kBlocks = 3;  // that a multiprocessor shall hold
  static constexpr bool kAll = true;  // packs of a thread are unrolled
  uint4 held[packs];

  __device__ explicit InRegisters(int) {}
  __device__ int count() const { return packs; }
  __device__ __forceinline__ void load(int u, const void* from) { held[u] = *static_cast<const uint4*>(from); }
  __device__ __forceinline__ void set(int u, uint4 pack) { held[u] = pack; }
  __device__ __forceinline__ uint4 get(int u) const { return held[u]; }
  __device__ void wait() {}
  // `zero` is 0, which the compiler must not know: else it keeps the numbers that it has made of the logits, and for
  // these there are no registers, in place of making them again.
  __device__ __forceinline__ void unknow(uint32_t zero) {
#pragma unroll
    for (uint4& pack : held) pack.x ^= zero, pack.y ^= zero, pack.z ^= zero, pack.w ^= zero;
  }
};

// The same in shared memory, on the way to which the logits need no registers. A thread reads none but its own.
template <int kWidth>
struct InSharedMemory {
  static constexpr int kUnroll = 4, kBlocks = 3;
  static constexpr bool kAll = false;
  uint4* held;
  int packs;

  __device__ explicit InSharedMemory(int packs) : packs(packs) {
    SCE_DYNAMIC_SHARED(uint4, shared);
    held = shared + threadIdx.x / kWidth * (packs * kWidth) + threadIdx.x % kWidth;
  }
  __device__ int count() const { return packs; }
  __device__ __forceinline__ void load(int u, const void* from) {
    __pipeline_memcpy_async(held + u * kWidth, from, sizeof(uint4));
  }
  __device__ __forceinline__ void set(int u, uint4 pack) { held[u * kWidth] = pack; }
  __device__ __forceinline__ uint4 get(int u) const { return held[u * kWidth]; }
  __device__ void wait() {
    __pipeline_commit();
    __pipeline_wait_prior(0);
  }
  __device__ void unknow(uint32_t) {}
};

// A group's part of a row, whose 16-byte packs its threads share out, kStride columns apart. Columns that are none of
// the classes are -inf. Places are counted from the slice's first pack, in 32 bits: registers.
template <typename scalar, int kThreadsOfRow, typename storage_t>
struct RowSlice {
  using scalar_t = scalar;
  using acc_t = acc_type<scalar_t>;
  static constexpr int kWidth = kThreadsOfRow, kSize = Pack<scalar_t>::kSize, kStride = kWidth * kSize;
  static constexpr int kUnroll = storage_t::kUnroll, kBlocks = storage_t::kBlocks;
  using Group = RowGroup<kWidth>;

  // Part `part` of the row's slices, of at most `packs` packs a thread.
  __device__ RowSlice(const scalar_t* row, int64_t classes, int part, int packs) : storage_(packs) {
    const int columns = storage_.count() * kStride;
    origin_ = int64_t(part) * columns - misalignment(row);
    lead_ = part == 0 ? misalignment(row) : 0;
    const int64_t count = classes - origin_;
    count_ = count < 0 ? 0 : count < columns ? static_cast<int>(count) : columns;
  }

  __device__ static int misalignment(const scalar_t* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(scalar_t));
  }

  // The classes [begin, end) are the group's.
  __device__ int64_t begin() const { return origin_ + lead_; }
  __device__ int64_t end() const { return origin_ + count_; }

  // Asks for the logits, which are there after wait.
  __device__ __forceinline__ void load(const scalar_t* row) {
    const scalar_t* mine = row + first();
    for_packs([&](int u) {
      if (whole(u)) return storage_.load(u, mine + u * kStride);
      Pack<scalar_t> pack;
#pragma unroll
      for (int e = 0; e < kSize; ++e) from_acc(-acc_t(INFINITY), pack.at[e]);
      for_edge(u, [&](int e) { pack.at[e] = mine[u * kStride + e]; });
      uint4 words;
      std::memcpy(&words, pack.at, sizeof(words));
      storage_.set(u, words);
    });
  }
  __device__ __forceinline__ void wait() { storage_.wait(); }

  // Of the whole slice, in all threads of the group. Contains barriers.
  template <bool kPlain>
  __device__ __forceinline__ RowStats<acc_t> stats(const ForwardArgs& args, const LogitTransform<acc_t>& transform) {
    if constexpr (kPlain) {
      // The largest first, which are numbers as they are stored: then no sum is moved from one to another.
      LargestOf<scalar_t> largest;
      for_packs([&](int u) { largest.push(storage_.get(u)); });
      const acc_t max = Group::broadcast(Group::template reduce<true>(Largest<acc_t>{largest.number()})).max;
      acc_t sums[2] = {};
      for_packs([&](int u) {
        acc_t z[kSize];
        numbers(u, z);
#pragma unroll
        for (int e = 0; e < kSize; ++e) sums[e % 2] += exponential(z[e] - max);
      });
      const acc_t sum = Group::broadcast(Group::template reduce<true>(Sum<acc_t>{sums[0] + sums[1]})).sum;
      return {max, sum, acc_t(0), acc_t(0)};
    }
    const bool smooth = args.options.label_smoothing != 0;
    const acc_t* weight = static_cast<const acc_t*>(args.target.weight);
    RowStats<acc_t> stats;
    for_packs([&](int u) {
      acc_t z[kSize];
      numbers(u, z);
      by_softcap(transform, [&](const LogitTransform<acc_t>& of_logit) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) z[e] = there(u, e) ? of_logit(z[e]) : -acc_t(INFINITY);
      });
      stats.push(z, 0, kSize);
      if (!smooth) return;
      acc_t o[kSize];
      weights(u, weight, o);
      stats.push_weighted(z, o, kSize);
    });
    return Group::broadcast(Group::reduce(stats));
  }

  // The gradient as if no class had an entry.
  template <bool kPlain>
  __device__ __forceinline__ void write(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                                        const LogitTransform<acc_t>& transform, const scalar_t* row,
                                        scalar_t* gradient) {
    // Only where labels are smoothed: an infinite one would be multiplied by 0.
    const bool smooth = !kPlain && args.options.label_smoothing != 0;
    const acc_t* weight = smooth ? static_cast<const acc_t*>(args.target.weight) : nullptr;
    const int width = common_width(row, gradient);
    scalar_t* mine = gradient + first();
    for_packs([&](int u) {
      acc_t x[kSize], o[kSize];
      numbers(u, x);
      if constexpr (kPlain) {
#pragma unroll
        for (acc_t& of_one : x) of_one = c.at(of_one);
      } else {
        weights(u, weight, o);
        by_softcap(transform, [&](const LogitTransform<acc_t>& of_logit) {
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            const auto [z, of_cap] = of_logit.with_slope(x[e]);
            x[e] = c.at(z, o[e]) * (of_logit.scale * of_cap);
          }
        });
      }
      Pack<scalar_t> pack;
      from_numbers(x, pack);
      if (whole(u))
        pack.store(mine + u * kStride, width);
      else
        for_edge(u, [&](int e) { mine[u * kStride + e] = pack.at[e]; });
    });
  }

  __device__ __forceinline__ void unknow(uint32_t zero) { storage_.unknow(zero); }

 private:
  __device__ static int place(int u) { return (Group::rank() + u * kWidth) * kSize; }
  __device__ int64_t first() const { return origin_ + place(0); }  // the column of the first pack
  __device__ bool there(int u, int e) const { return lead_ <= place(u) + e && place(u) + e < count_; }
  __device__ bool whole(int u) const { return lead_ <= place(u) && place(u) + kSize <= count_; }
  template <typename function_t>
  __device__ __forceinline__ void for_edge(int u, const function_t& f) const {
#pragma unroll
    for (int e = 0; e < kSize; ++e)
      if (there(u, e)) f(e);
  }
  // f(u) for the thread's packs that have a class: exponentials of nothing would take their time.
  template <typename function_t>
  __device__ __forceinline__ void for_packs(const function_t& f) const {
    if constexpr (storage_t::kAll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (place(u) >= count_) break;
        f(u);
      }
    } else {
      const int mine = place(0) < count_ ? (count_ - place(0) - 1) / kStride + 1 : 0;
#pragma unroll kUnroll
      for (int u = 0; u < mine; ++u) f(u);
    }
  }

  // Of what is no class 0.
  __device__ __forceinline__ void weights(int u, const acc_t* weight, acc_t (&o)[kSize]) const {
    if (whole(u)) return load_weights(weight ? weight + first() + u * kStride : nullptr, o);
#pragma unroll
    for (int e = 0; e < kSize; ++e)
      o[e] = !there(u, e) ? acc_t(0) : weight ? weight[first() + u * kStride + e] : acc_t(1);
  }

  __device__ __forceinline__ void numbers(int u, acc_t (&x)[kSize]) const {
    const uint4 words = storage_.get(u);
    Pack<scalar_t> pack;
    std::memcpy(pack.at, &words, sizeof(words));
    to_numbers(pack, x);
  }

  int64_t origin_;  // the column of the slice's first pack, perhaps before the row's first
  int lead_, count_;  // of the places [lead, count) there are classes
  storage_t storage_;
};

// What the entries of a row add: those of a part of it, relative to a maximum, and the mass of all.
template <typename acc_t>
struct EntrySums {
  TargetStats<acc_t> part;
  acc_t mass = 0;

  SCE_HD void merge(const EntrySums& other) {
    part.merge(other.part);
    mass += other.mass;
  }
};

// Of a row's entries those that a group has among the columns [begin, end). Where they are few a thread has one, which
// it reads while the logits are on their way and writes from its registers; elsewhere they are read each time.
template <typename slice_t>
class EntriesOfPart {
  using scalar_t = typename slice_t::scalar_t;
  using acc_t = typename slice_t::acc_t;
  static constexpr int kWidth = slice_t::kWidth;
  using Group = RowGroup<kWidth>;
  using Warp = RowGroup<kWarp>;
  static constexpr int64_t kFew = kWidth == kWarp ? kWarp : 4 * kWarp;

 public:
  __device__ EntriesOfPart(const TargetView& target, EntryRange range, const scalar_t* row, int64_t begin, int64_t end)
      : target_(target), range_(range), begin_(begin), end_(end) {
    if (!few()) return;
    const int64_t i = range.begin + rank();
    if (i < range.end) mine_ = target.template entry<acc_t>(i);
    if (own(mine_.column)) logit_ = to_acc(row[mine_.column]);
  }

  // For all threads of the group: the mass has the bits of mass_of_row. The first part also has the entries that are out
  // of range. Contains barriers where a warp has not enough lanes for them.
  __device__ EntrySums<acc_t> sums(const LogitTransform<acc_t>& transform, const scalar_t* row, int part,
                                   acc_t max) const {
    TargetSums<LongSum<acc_t>> sums;
    LongSum<acc_t> mass;
    if (!range_.valid) sums.mass.sum = mass.sum = Limits<acc_t>::kNaN;
    const auto add = [&](const Entry<acc_t>& entry, const auto& logit) {
      const acc_t share = target_.share(entry);
      mass.add(share);
      if (entry.column < 0 ? part == 0 : own(entry.column))
        sums.add(share, max, [&] { return entry.column < 0 ? max : transform(logit()); });
    };
    if (few()) {
      if (range_.begin + rank() < range_.end) add(mine_, [&] { return logit_; });
    } else {
      for (int64_t i = range_.begin + Group::rank(); i < range_.end; i += kWidth) {
        const auto entry = target_.template entry<acc_t>(i);
        add(entry, [&] { return to_acc(row[entry.column]); });
      }
    }
    const EntrySums<acc_t> of_thread = {sums.template stats<acc_t>(), mass.sum};
    if (kWidth > kWarp && !alike()) return Group::template reduce<true>(of_thread);
    return Warp::broadcast(Warp::reduce(of_thread));
  }

  // Makes the gradients at the entries, before the dense ones are written; then `write` writes them. Both contain
  // barriers. `workspace`: as that of make_entry_gradients.
  __device__ void make(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                       const LogitTransform<acc_t>& transform, const scalar_t* row,
                       EntryGradient<acc_t>* workspace) {
    if (!few()) {
      const auto same = classes_of_row<kWidth>(target_, range_, begin_, end_, workspace);
      make_entry_gradients<kWidth>(args, c, transform, same, range_, row, begin_, end_, workspace);
      return Group::sync();  // the logits at the entries are read
    }
    const int me = Group::rank();
    const auto count = static_cast<int>(range_.end - range_.begin);
    const bool mine = me < count && own(mine_.column);
    SCE_SHARED(int4, all, [kThreads / 4]);  // where the entries' columns are in the part
    const int place = mine ? static_cast<int>(mine_.column - begin_) : -1;
    if (count > 1 || kWidth == kWarp) {  // a block has met since its logits were read
      reinterpret_cast<int*>(all)[threadIdx.x] = place;
      Group::sync();
    }
    if (!mine) {
      mine_.column = -1;
      return;
    }
    int alike = count > 1 ? 0 : 1;
    const int4* quads = all + (threadIdx.x - me) / 4;
#pragma unroll 4
    for (int k = 0; 4 * k < count && count > 1; ++k) {
      const int4 four = quads[k];
      alike += (four.x == place) + (four.y == place) + (four.z == place) + (four.w == place);
    }
    const acc_t o = target_.template class_weight<acc_t>(mine_.column), z = transform(logit_);
    acc_t sum = mine_.value;
    bool first = true;
    if (alike > 1) {
      const int* places = reinterpret_cast<const int*>(quads);
      for (int k = 0; k < count; ++k) {
        if (k == me || places[k] != place) continue;
        first = first && k > me;
        sum += target_.template entry<acc_t>(range_.begin + k).value;
      }
    }
    mine_.value = c.at(z, o, sum * o) * transform.slope(z);
    if (!first) mine_.column = -1;
  }

  __device__ void write(const EntryGradient<acc_t>* workspace, scalar_t* gradient) const {
    Group::sync();  // the dense gradient is written
    if (!few()) return write_entry_gradients<kWidth>(target_, range_, begin_, end_, workspace, gradient);
    if (mine_.column >= 0) from_acc(mine_.value, gradient[mine_.column]);
  }

 private:
  __device__ bool few() const { return range_.end - range_.begin <= kFew; }
  // Whether each warp of a block has the same entries as the others.
  __device__ bool alike() const { return range_.end - range_.begin <= kWarp; }
  __device__ int rank() const { return alike() ? Warp::rank() : Group::rank(); }
  __device__ bool own(int64_t column) const { return column >= begin_ && column < end_; }

  const TargetView& target_;
  const EntryRange range_;
  const int64_t begin_, end_;
  Entry<acc_t> mine_ = {-1, acc_t(0)};
  acc_t logit_ = 0;
};

// One group per row, or `cluster` blocks. `back` counts where kGradient is set, and reads what `args` writes; the
// gradient may be the logits, of which a block overwrites none but its own. kPlain: logits are what is stored, and
// labels are not smoothed.
template <typename slice_t, bool kPlain, bool kGradient>
__global__ void __launch_bounds__(kThreads, slice_t::kBlocks)
    one_pass_kernel(ForwardArgs args, BackwardArgs back, int cluster, int packs,
                    EntryGradient<typename slice_t::acc_t>* entry_gradients) {
  using scalar_t = typename slice_t::scalar_t;
  using acc_t = typename slice_t::acc_t;
  constexpr int kWidth = slice_t::kWidth;
  using Group = RowGroup<kWidth>;
  const int64_t classes = args.target.num_classes;
  constexpr bool kMayShare = Cluster::kExist && Group::kPerBlock == 1;  // a row among blocks, of which 32 bits count
  const bool shares = kMayShare && cluster > 1;
  const unsigned blocks = kMayShare ? static_cast<unsigned>(cluster) : 1;
  const int part = kMayShare ? static_cast<int>(blockIdx.x % blocks) : 0;
  const int64_t step = kMayShare ? gridDim.x / blocks : Group::count();
  if (shares) Cluster::arrive();
  unsigned turn = 0;
  for (int64_t r = kMayShare ? blockIdx.x / blocks : Group::number(); r < args.rows; r += step) {
    const auto row = [&] { return args.template row<scalar_t>(r); };
    const auto gradient = [&] { return back.template gradient_row<scalar_t>(r); };
    slice_t slice(row(), classes, part, packs);
    if (kGradient && part == 0) write_zeros<kWidth>(gradient(), classes, back.vocab);
    if (args.target.ignored(r)) {  // and is not read: of some batches that is most rows
      if (part == 0 && Group::rank() == 0) args.write(r, true, RowStats<acc_t>{}, TargetStats<acc_t>{});
      if (kGradient) write_zeros<kWidth>(gradient(), slice.begin(), slice.end());
      continue;
    }
    slice.load(row());
    EntriesOfPart<slice_t> entries(args.target, args.target.row(r), row(), slice.begin(), slice.end());
    const LogitTransform<acc_t> transform =
        kPlain ? LogitTransform<acc_t>(LossOptions{}) : args.template transform<acc_t>(r);
    slice.wait();
    PartStats<acc_t> stats;
    stats.row = slice.template stats<kPlain>(args, transform);
    const EntrySums<acc_t> sums = entries.sums(transform, row(), part, stats.row.max);
    stats.entries = sums.part;
    if (shares) {
      if (turn == 0) Cluster::wait();
      stats = merge_of_cluster(stats, cluster, part, turn++);
    }
    if (part == 0 && Group::rank() == 0) args.write(r, false, stats.row, stats.entries);
    if constexpr (kGradient) {
      if (back.template without_gradient<acc_t>(r)) {
        Group::sync();  // the logits are read
        write_zeros<kWidth>(gradient(), slice.begin(), slice.end());
        continue;
      }
      const RowLoss<acc_t> of_row(stats.row, stats.entries, args.options, classes);  // whose lse all threads know
      const auto c = back.coefficients(r, sums.mass, of_row.lse, back.lse_residual ? of_row.lse_residual : acc_t(0));
      entries.make(back, c, transform, row(), entry_gradients);
      slice.unknow(static_cast<uint32_t>(cluster) >> 8);
      slice.template write<kPlain>(back, c, transform, row(), gradient());
      entries.write(entry_gradients, gradient());
    }
  }
  if (shares && turn == 0) Cluster::wait();
}

// ------------------------------------------------------------------------------------------------ launchers

constexpr int64_t kBytesOfPacks = int64_t(16) * kThreads;  // of a block, one of each thread
constexpr int64_t kOtherBytes = 12 << 10;  // of shared memory that a block has beside them

template <typename slice_t>
cudaError_t launch_form(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward, void* workspace,
                        cudaStream_t stream) {
  const int cluster = form.cluster;
  const auto launch = [&](auto kernel) {
    const int64_t most = ((int64_t(1) << 31) - 1) / cluster;
    const int64_t groups = blocks_for(forward.rows, kThreads / form.width, forward.max_blocks, most);
    const int64_t shared = form.width == kWarp && form.packs <= kHeldPacks ? 0 : form.packs * kBytesOfPacks;
    return launch_sharing(stream, cluster * groups, kThreads, cluster, shared, kernel, forward,
                          backward ? *backward : BackwardArgs{}, cluster, form.packs,
                          static_cast<EntryGradient<typename slice_t::acc_t>*>(workspace));
  };
  const LossOptions& options = forward.options;
  const bool plain = options.logit_scale == 1 && options.softcap == 0 && !forward.row_scale &&
                     options.label_smoothing == 0;
  if (plain) return launch(backward ? one_pass_kernel<slice_t, true, true> : one_pass_kernel<slice_t, true, false>);
  return launch(backward ? one_pass_kernel<slice_t, false, true> : one_pass_kernel<slice_t, false, false>);
}

template <typename scalar_t>
using SliceOfBlock = RowSlice<scalar_t, kThreads, InSharedMemory<kThreads>>;
template <typename scalar_t>
using SliceOfWarp = RowSlice<scalar_t, kWarp, InSharedMemory<kWarp>>;
template <typename scalar_t>
using ShortSlice = RowSlice<scalar_t, kWarp, InRegisters<kHeldPacks>>;

}  // namespace

bool device_has_clusters() {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices];  // 0: nobody has asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  if (known[device] == 0)
    known[device] = has_clusters(one_pass_kernel<SliceOfBlock<float>, true, false>) ? 1 : -1;
  return known[device] > 0;
}

Device current_device() {
  Device found;
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return found;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess)
    found.shared_bytes = bytes;
  found.clusters = device_has_clusters();
  return found;
}

// The fewest blocks that hold a row. Measured on an H100, forward + backward, in units of a copy of the logits (1 read
// + 1 write; two kernels take 1.5 and more): a table is in docs/design.md.
OnePass one_pass_of(const CrossEntropyArgs& args, const Device& device) {
  const bool never = args.reads == Reads::kApart || args.dtype == DType::kFloat64;
  if (never || args.strided.inner > 0 || args.rows == 0) return {};
  const int64_t size = size_of(args.dtype);
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 && (args.rows == 1 || args.row_stride * size % 16 == 0);
  const int64_t bytes = args.target.num_classes * size + (aligned ? 0 : 16 - size);
  const int64_t room = (device.shared_bytes - kOtherBytes) / kBytesOfPacks;
  if (plan_of(args, 1).width == kWarp) {  // of backward, which would sum the entries in another order
    const int64_t packs = divide_up(bytes, 16 * kWarp);
    const int64_t most = std::max<int64_t>(kHeldPacks, std::min<int64_t>(kWarpPacks, room));
    return packs <= most ? OnePass{kWarp, static_cast<int>(packs), 1} : OnePass{};
  }
  for (int cluster = 1; cluster <= (device.clusters ? kMostBlocks : 1); cluster *= 2) {
    const int64_t packs = divide_up(bytes, kBytesOfPacks * cluster);
    if (packs <= std::min<int64_t>(kSharedPacks, room)) return {kThreads, static_cast<int>(packs), cluster};
  }
  return {};
}

cudaError_t cross_entropy_one_pass(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                                   void* workspace, cudaStream_t stream) {
  return with_storage(forward.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    if constexpr (sizeof(scalar_t) < sizeof(double)) {
      auto launch = launch_form<SliceOfBlock<scalar_t>>;
      if (form.width == kWarp)
        launch = form.packs <= kHeldPacks ? launch_form<ShortSlice<scalar_t>> : launch_form<SliceOfWarp<scalar_t>>;
      return launch(form, forward, backward, workspace, stream);
    }
    return cudaErrorNotSupported;
  });
}

}  // namespace cuda
}  // namespace sparse_ce
