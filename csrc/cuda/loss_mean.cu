// One block: a loss has a few thousand rows, and a second launch would cost more than it saves.
#include "row_group.cuh"

#include "cross_entropy.h"

namespace sparse_ce {
namespace cuda {
namespace {

template <typename acc_t>
__global__ void __launch_bounds__(kThreads) loss_mean_kernel(LossMeanArgs args) {
  using Group = RowGroup<kThreads>;
  LossMeanStats<double> mine;
#pragma unroll 4
  for (int64_t r = Group::rank(); r < args.target.rows; r += kThreads) mine.merge(args.template row<acc_t>(r));
  const LossMeanStats<double> stats = Group::reduce(mine);
  if (Group::rank() == 0) args.template finish<acc_t>(stats);
}

}  // namespace

cudaError_t loss_mean(const LossMeanArgs& args, cudaStream_t stream) {
  return args.dtype == DType::kFloat64 ? launch(stream, 1, kThreads, loss_mean_kernel<double>, args)
                                       : launch(stream, 1, kThreads, loss_mean_kernel<float>, args);
}

}  // namespace cuda
}  // namespace sparse_ce
