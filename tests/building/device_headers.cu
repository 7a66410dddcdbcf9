// Instantiates each header of csrc/cuda/device once, with every feature that depends on the architecture: maxima of
// pairs, asynchronous copies, clusters. tests/building/test_build.py compiles it for all architectures of a release.
#include "device/binary_row.cuh"
#include "device/classes_of_row.cuh"
#include "device/dense_row.cuh"
#include "device/entries_of_part.cuh"
#include "device/entry_bitmap.cuh"
#include "device/folded.cuh"
#include "device/launch.cuh"
#include "device/launch_sharing.cuh"
#include "device/many_entries.cuh"
#include "device/one_pass_kernel.cuh"
#include "device/online_stats.cuh"
#include "device/packs.cuh"
#include "device/row_group.cuh"
#include "device/row_passes.cuh"
#include "device/row_rounds.h"
#include "device/row_slice.cuh"
#include "device/row_storage.cuh"
#include "device/select_gradient.cuh"
#include "device/select_kernels.cuh"
#include "device/select_scan.cuh"
#include "device/softmax_sums.cuh"
#include "device/strided_rows.cuh"

namespace sparse_ce {
namespace cuda {

__global__ void largest_kernel(const uint4* packs, float* largest) {
  LargestOf<Half> of;
  of.push(packs[threadIdx.x]);
  largest[threadIdx.x] = of.number();
}

__global__ void bitmap_kernel(TargetView target, unsigned* bits) {
  const auto write = [&](int64_t from, int64_t, const auto& marks) { bits[from / 32] = marks(from); };
  const auto range = [&] { return target.row(0); };
  for_windows<kThreads, float>(true, target, range, 0, target.num_classes, -1, write);
}

__global__ void ignored_kernel(SelectArgs args) {
  finish_ignored<kWarp, float>(args, 0, Scanned<float>{}, args.target.row(0));
}

// Uses maxima of bfloat16 pairs, asynchronous copies and clusters, and the headers of rows and entries.
template __global__ void one_pass_kernel<SliceOfBlock<BFloat16>, true, false>(ForwardArgs, BackwardArgs, int, int,
                                                                              RowRounds);
template __global__ void strided_forward_kernel<BFloat16>(ForwardArgs, int64_t, RowStats<float>*);

}  // namespace cuda
}  // namespace sparse_ce
