// masked_mean_planning.cpp - for planning.cpp: how masked_mean.cu, whose plan is its own, shares out its work.
#include "../../csrc/cuda/masked_mean.cu"

#include <tuple>

// Of the mean of each row: (whether a warp takes it, parts of a row, columns that a thread reads at once).
std::tuple<bool, int64_t, int64_t> masked_mean_plan_of(int64_t rows, int64_t columns, int size) {
  sparse_ce::MaskedMeanArgs args{};
  args.dtype = size == 4 ? sparse_ce::DType::kFloat32 : sparse_ce::DType::kBFloat16;
  args.mask_dtype = sparse_ce::DType::kUInt8;
  args.outer = {rows, {columns, columns, 1}};
  args.columns = {columns, {1, 1, 0}};
  const auto plan = sparse_ce::cuda::plan_of(args);
  return {plan.warps, plan.parts, plan.pack};
}
