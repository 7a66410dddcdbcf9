// planning.cpp - Exposes to tests how the CUDA kernels distribute their work and how the linear head chooses its CUDA
// chunks, which the host plans from shapes, and the kernels' own implementation of tanh.
#include "coc.h"

#include "../../csrc/cuda/head_plan.h"
#include "../../csrc/cuda/device/row_rounds.h"
#include "../../csrc/cuda/row_plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

// Defined in masked_mean_planning.cpp.
std::tuple<bool, int64_t, int64_t> masked_mean_plan_of(int64_t rows, int64_t columns, int size);

namespace {

sparse_ce::DType dtype_of(int size) {
  return size == 8 ? sparse_ce::DType::kFloat64 : size == 4 ? sparse_ce::DType::kFloat32 : sparse_ce::DType::kBFloat16;
}

// Returns (threads per row or part of a row, number of parts, blocks in total). `side_by_side` means adjacent rows.
std::tuple<int, int64_t, int64_t> plan_of(int64_t rows, int64_t classes, int size, int64_t max_blocks,
                                          int multiprocessors, bool side_by_side) {
  sparse_ce::CrossEntropyArgs args{};
  args.dtype = dtype_of(size);
  args.rows = rows;
  args.vocab = args.row_stride = args.target.num_classes = classes;
  args.max_blocks = max_blocks;
  if (side_by_side) args.strided = {rows + 1, 0, rows + 1};
  const auto plan = sparse_ce::cuda::plan_of(args, multiprocessors);
  return {plan.width, plan.splits, plan.blocks};
}

// Returns (threads, packs per thread, blocks) that hold a row `offset` bytes after a 16-byte boundary; zeros if none
// can.
std::tuple<int, int, int> one_pass_of(int64_t rows, int64_t classes, int size, int64_t offset, bool clusters,
                                      int64_t shared_bytes) {
  sparse_ce::CrossEntropyArgs args{};
  args.dtype = dtype_of(size);
  args.rows = rows;
  args.vocab = args.row_stride = args.target.num_classes = classes;
  args.logits = reinterpret_cast<const void*>(4096 + offset);
  const auto form = sparse_ce::cuda::one_pass_of(args, {clusters, shared_bytes});
  return {form.width, form.packs, form.cluster};
}

// Returns (first row, number of rows) of each group, in the order in which they begin. They are `distance` apart, which
// is returned as well.
std::tuple<int64_t, std::vector<std::pair<int64_t, int64_t>>> dealt(const std::string& way, int64_t rows,
                                                                    int64_t groups) {
  using Rounds = sparse_ce::cuda::RowRounds;
  const Rounds rounds = way == "once"    ? Rounds::once(rows)
                        : way == "equal" ? Rounds::equal(rows, groups)
                                         : Rounds::halving(rows, groups);
  std::vector<std::pair<int64_t, int64_t>> found;
  for (int64_t group = 0; group < rounds.count(rows); ++group) {
    const auto share = rounds.of(group, rows);
    found.emplace_back(share.first, share.rows);
  }
  return {rounds.groups, found};
}

// Returns the rows of a chunk of the linear head in 16 bits. `memory` is that of the device, or 0 if no weight gradient
// is computed.
int64_t head_chunk_rows(int64_t rows, int64_t width, int64_t classes, int64_t memory) {
  using Plan = sparse_ce::cuda::HeadPlan;
  const bool borrows = rows <= std::max(width, Plan::stored_rows(width, false));
  return std::min(rows, sparse_ce::default_chunk_rows<Plan>(
                            {rows, classes, width, 2, 2 * classes, 0, borrows, Plan::ample_bytes_of(memory)}));
}

}  // namespace

PYBIND11_MODULE(planning, m) {
  m.def("plan_of", plan_of, pybind11::arg("rows"), pybind11::arg("classes"), pybind11::arg("size"),
        pybind11::arg("max_blocks"), pybind11::arg("multiprocessors"), pybind11::arg("side_by_side") = false);
  m.def("one_pass_of", one_pass_of);
  m.def("dealt", dealt);
  m.def("head_chunk_rows", head_chunk_rows);
  m.def("masked_mean_plan_of", masked_mean_plan_of);
  m.def("tanh_of", [](float x) { return sparse_ce::tanh_of(x); });
}
