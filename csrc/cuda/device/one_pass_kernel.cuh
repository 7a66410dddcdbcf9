// one_pass_kernel.cuh - Defines the kernel that computes the loss and its gradient with one read of the logits, and its
// launches, which a source per storage type instantiates. A row is held in the registers of a warp, or in the shared
// memory of a warp, a block or a cluster. The blocks of a cluster exchange their statistics once. The gradient is
// computed from there. Forward alone is the same kernel without the gradient and is therefore bitwise equal to it. The
// gradient is bitwise equal to that of backward_kernel.
#pragma once

#include "../storage_launchers.h"
#include "entries_of_part.cuh"
#include "launch_sharing.cuh"
#include "row_rounds.h"
#include "row_slice.cuh"

#include <atomic>

namespace sparse_ce {
namespace cuda {

// One group, or `cluster` blocks, process a row. `back` is used if kGradient is set, and reads what `args` writes. The
// gradient may be the logits: a block overwrites only its own columns. kPlain means that logits are not transformed and
// labels are not smoothed. In shared memory, a thread loads its part of the group's next row as soon as it has finished
// with this one, so that loads are in flight all the time.
template <typename slice_t, bool kPlain, bool kGradient>
__global__ void __launch_bounds__(kThreads, slice_t::blocks(kPlain))
    one_pass_kernel(ForwardArgs args, BackwardArgs back, int cluster, int packs, RowRounds rounds) {
  using scalar_t = typename slice_t::scalar_t;
  using acc_t = typename slice_t::acc_t;
  constexpr int kWidth = slice_t::kWidth;
  using Group = RowGroup<kWidth>;
  const int64_t classes = args.target.num_classes;
  constexpr bool kMayShare = Cluster::kExist && Group::kPerBlock == 1;  // blocks share a row; counts fit into 32 bits
  const bool shares = kMayShare && cluster > 1;
  const unsigned blocks = kMayShare ? static_cast<unsigned>(cluster) : 1;
  const int part = kMayShare ? static_cast<int>(blockIdx.x % blocks) : 0;
  if (shares) Cluster::arrive();
  unsigned turn = 0;
  bool loading = false;  // the row's logits have been requested, so it is not ignored
  RowRounds::Share share = rounds.of(kMayShare ? blockIdx.x / blocks : Group::number(), args.rows);
  for (int64_t r = share.first; share.rows > 0 && r < args.rows; --share.rows, r += rounds.groups) {
    hide(r);  // Otherwise more numbers that grow with each row would take registers.
    const auto row = [&] { return args.template row<scalar_t>(r); };
    const auto gradient = [&] { return back.template gradient_row<scalar_t>(r); };
    const auto negated = [&](int64_t of) { return !kPlain && args.template transform<acc_t>(of).scale < acc_t(0); };
    slice_t slice(row(), classes, part, packs);
    if (kGradient && part == 0) write_zeros<kWidth>(gradient(), classes, back.vocab);
    if (!loading && args.target.ignored(r)) {  // ignored rows, in some batches most of them, are not read
      if (part == 0 && Group::rank() == 0) args.write(r, true, RowStats<acc_t>{}, TargetStats<acc_t>{});
      if (kGradient) write_zeros<kWidth>(gradient(), slice.begin(), slice.end());
      continue;
    }
    if (!loading) slice.load(row(), negated(r));
    const LogitTransform<acc_t> transform =
        kPlain ? LogitTransform<acc_t>(LossOptions{}) : args.template transform<acc_t>(r);
    EntriesOfPart<slice_t, kGradient> entries(args.target, args.target.row(r), row(), slice);
    loading = !slice_t::kInRegisters && share.rows > 1 && r + rounds.groups < args.rows &&
              !args.target.ignored(r + rounds.groups);
    const auto load_next = [&] {
      if (!loading) return;
      const scalar_t* next = args.template row<scalar_t>(r + rounds.groups);
      slice_t(next, classes, part, packs).load(next, negated(r + rounds.groups));
    };
    slice.wait();
    PartStats<acc_t> stats;
    stats.row = slice.template stats<kPlain>(args, transform);
    if (!entries.few()) slice.share();
    const EntrySums<acc_t> sums = entries.sums(transform, slice, args.target.row(r), part, stats.row.max);
    stats.entries = sums.part;
    if constexpr (!kGradient) {
      if (!entries.few()) Group::sync();  // all logits at the entries have been read
      load_next();
    }
    if (shares) {
      if (turn == 0) Cluster::wait();
      stats = merge_of_cluster(stats, cluster, part, turn++);
    }
    if (part == 0 && Group::rank() == 0) args.write(r, false, stats.row, stats.entries);
    if constexpr (kGradient) {
      const bool zero = back.template without_gradient<acc_t>(r);
      if (zero) {
        Group::sync();  // all logits have been read
        write_zeros<kWidth>(gradient(), slice.begin(), slice.end());
      } else {
        const RowLoss<acc_t> of_row(stats.row, stats.entries, args.options, classes);  // all threads know its lse
        const auto c = back.coefficients(r, sums.mass, of_row.lse, back.lse_residual ? of_row.lse_residual : acc_t(0));
        entries.make(c, transform, slice, args.target.row(r));
        __syncwarp();  // Otherwise lanes with an entry would write their packs separately, after the others.
        slice.unknow(static_cast<uint32_t>(cluster) >> 8);
        slice.template write<kPlain>(back, c, transform, row(), gradient());
        if (!entries.few()) entries.write_many(c, transform, slice, args.target.row(r), gradient());
      }
      if (!entries.few()) Group::sync();  // all logits at the entries have been read
      load_next();
      if (!zero && entries.few()) entries.write(slice, gradient());
    }
  }
  if (shares && turn == 0) Cluster::wait();
}

// ------------------------------------------------------------------------------------------------ launchers

template <typename scalar_t>
using SliceOfBlock = RowSlice<scalar_t, kThreads, InSharedMemory<kThreads>>;
template <typename scalar_t>
using SliceOfWarp = RowSlice<scalar_t, kWarp, InSharedMemory<kWarp>>;
template <typename scalar_t>
using ShortSlice = RowSlice<scalar_t, kWarp, InRegisters<kRegisterPacks>>;

// Returns the same. `known` caches the last answer of each device, because the query takes as long as a launch.
template <typename kernel_t>
int64_t resident_clusters(std::atomic<uint64_t> (&known)[kMostDevices], kernel_t kernel, int cluster, int64_t shared,
                          int64_t most) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  const uint64_t asked = static_cast<uint64_t>(shared) << 8 | static_cast<uint64_t>(cluster);
  const uint64_t answer = device < kMostDevices ? known[device].load() : 0;
  if (answer >> 32 == asked) return static_cast<int64_t>(answer & 0xffffffffu);
  if (shared > 0 && request_shared(kernel, most) != cudaSuccess) return 0;
  const int64_t count = query_resident_clusters(reinterpret_cast<const void*>(kernel), cluster, shared);
  if (device < kMostDevices) known[device] = asked << 32 | static_cast<uint64_t>(count);
  return count;
}

// Returns the most bytes of shared memory that a block requests.
inline int64_t most_shared(int width, const Device& device) {
  return packs_in_shared_memory(width, device) * (kBytesOfPacks + kBytesOfMarks);
}

template <typename slice_t, bool kPlain, bool kGradient>
cudaError_t launch_kernel(const OnePass& form, const ForwardArgs& forward, const BackwardArgs& backward,
                          cudaStream_t stream) {
  const auto kernel = one_pass_kernel<slice_t, kPlain, kGradient>;
  const int cluster = form.cluster;
  const bool many = forward.target.offsets || forward.target.width > EntriesOfPart<slice_t, kGradient>::kFew;
  const int64_t packs = !slice_t::kInRegisters ? form.packs : many ? kRegisterPacks : 0;
  const int64_t shared = packs * (kBytesOfPacks + (many ? kBytesOfMarks : 0));
  const int64_t most = std::max(shared, most_shared(form.width, current_device()));
  const int64_t per_block = kThreads / form.width, most_blocks = ((int64_t(1) << 31) - 1) / cluster;
  RowRounds rounds = RowRounds::once(forward.rows);
  if (forward.max_blocks > 0) {
    rounds = RowRounds::equal(forward.rows, forward.max_blocks * per_block);
  } else if (form.persistent) {
    static std::atomic<uint64_t> known[kMostDevices];
    const int64_t resident = resident_clusters(known, kernel, cluster, shared, most) * per_block;
    if (resident > 0) rounds = RowRounds::halving(forward.rows, resident);
  }
  const int64_t blocks = std::min(divide_up(rounds.count(forward.rows), per_block), most_blocks);
  return launch_sharing(stream, cluster * blocks, kThreads, cluster, shared, most, kernel, forward, backward, cluster,
                        form.packs, rounds);
}

template <typename slice_t>
cudaError_t launch_slices(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                          cudaStream_t stream) {
  const BackwardArgs none{};
  if (forward.plain())
    return backward ? launch_kernel<slice_t, true, true>(form, forward, *backward, stream)
                    : launch_kernel<slice_t, true, false>(form, forward, none, stream);
  return backward ? launch_kernel<slice_t, false, true>(form, forward, *backward, stream)
                  : launch_kernel<slice_t, false, false>(form, forward, none, stream);
}

template <typename scalar_t>
cudaError_t OnePassLauncher<scalar_t>::launch(const OnePass& form, const ForwardArgs& forward,
                                              const BackwardArgs* backward, cudaStream_t stream) {
  if (form.width != kWarp) return launch_slices<SliceOfBlock<scalar_t>>(form, forward, backward, stream);
  if (form.packs > kRegisterPacks) return launch_slices<SliceOfWarp<scalar_t>>(form, forward, backward, stream);
  return launch_slices<ShortSlice<scalar_t>>(form, forward, backward, stream);
}

template <typename scalar_t>
bool OnePassLauncher<scalar_t>::has_clusters(const Device& device) {
  return once_per_device([&] {
    const auto kernel = one_pass_kernel<SliceOfBlock<scalar_t>, false, true>;  // has the most registers
    const int64_t most = most_shared(kThreads, device);
    return request_shared(kernel, most) == cudaSuccess && cuda::has_clusters(kernel, most);
  });
}

}  // namespace cuda
}  // namespace sparse_ce
