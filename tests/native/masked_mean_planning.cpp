// masked_mean_planning.cpp - Exposes the plan of masked_mean.cu to planning.cpp. That source has a Plan type of its
// own.
#include "../../csrc/cuda/masked_mean.cu"

#include <tuple>

// Returns the plan of a mean of each row: (whether a warp processes it, parts of a row, columns that a thread reads at
// once).
std::tuple<bool, int64_t, int64_t> masked_mean_plan_of(int64_t rows, int64_t columns, int size) {
  sparse_ce::MaskedMeanArgs args{};
  args.dtype = size == 4 ? sparse_ce::DType::kFloat32 : sparse_ce::DType::kBFloat16;
  args.mask_dtype = sparse_ce::DType::kUInt8;
  args.outer = {rows, {columns, columns, 1}};
  args.columns = {columns, {1, 1, 0}};
  const auto plan = sparse_ce::cuda::plan_of(args);
  return {plan.warps, plan.parts, plan.pack};
}
