// small_calls.cpp - Computes the plain loss of small logits without the dispatcher.
//
// An op costs 10 to 20 us before its kernel starts, because arguments are boxed into schema values and results into
// tensors. Python calls this C function with addresses instead. It supports only calls that need no copy and no error
// message. If it returns false, Python calls the op, which raises the error.
#include "views.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

namespace sparse_ce {
namespace {

// The arguments as Python packs them; see sparse_ce/ops/logits/small_calls.py.
//
// Shapes: logits (rows, vocab) with column stride 1, indices (rows,) or (rows, width), values of the same shape or
// null. With a sparse target, indices and values are (width,), and row_indices are those of a CSR tensor (rows + 1,) or
// of a COO tensor (width,). loss, normalizer and grad_mean have the arithmetic dtype; normalizer and grad_mean are (1,)
// or null. All arrays are on the CPU and packed, except for the row stride of the logits. Options have their defaults.
struct Call {
  const void *logits, *indices, *values, *row_indices, *normalizer, *grad_mean;
  void* loss;  // (rows,), or (1,) for the mean
  void* grad_logits;  // (rows, vocab), gradient of the mean; requires grad_mean
  int64_t rows, vocab, row_stride, width, ignore_index;
  int64_t dtype, indices_dtype, values_dtype, row_indices_dtype;
  bool mean, coo;
};

// Matches Python's struct.Struct("@8P9q2?").
static_assert(offsetof(Call, rows) == 8 * sizeof(void*) &&
              offsetof(Call, mean) == 8 * sizeof(void*) + 9 * sizeof(int64_t));

// Returns where the entries of each row begin and end. Throws if those of a COO tensor are not sorted.
std::vector<int64_t> offsets_of(const Call& call) {
  const auto at = [&](int64_t i) { return load_int(call.row_indices, static_cast<DType>(call.row_indices_dtype), i); };
  std::vector<int64_t> offsets(static_cast<size_t>(call.rows) + 1);
  int64_t row = 0;
  for (int64_t i = 0; call.coo && i < call.width; ++i) {
    if (at(i) < row - 1 || at(i) >= call.rows) throw std::invalid_argument("row indices");
    while (row <= at(i)) offsets[static_cast<size_t>(row++)] = i;
  }
  for (; row <= call.rows; ++row) offsets[static_cast<size_t>(row)] = call.coo ? call.width : at(row);
  if (offsets[0] != 0 || offsets.back() != call.width || !std::is_sorted(offsets.begin(), offsets.end()))
    throw std::invalid_argument("row indices");
  return offsets;
}

ForwardArgs view(const Call& call, const std::vector<int64_t>& offsets) {
  ForwardArgs args{};
  args.logits = call.logits;
  args.dtype = static_cast<DType>(call.dtype);
  args.rows = call.rows;
  args.vocab = call.vocab;
  args.row_stride = call.row_stride;
  TargetView& target = args.target;
  target.indices = call.indices;
  target.values = call.values;
  target.indices_dtype = static_cast<DType>(call.indices_dtype);
  target.values_dtype = static_cast<DType>(call.values_dtype);
  target.rows = call.rows;
  if (call.row_indices) {
    target.offsets = offsets.data();
    target.offsets_dtype = DType::kInt64;
    target.offsets_step = 1;
    target.entries = call.width;
  } else {
    target.entries = call.rows * call.width;
    target.width = call.width;
  }
  target.num_classes = call.vocab;
  target.ignore_index = call.ignore_index;
  return args;
}

void run(const Call& call) {
  const std::vector<int64_t> offsets = call.row_indices ? offsets_of(call) : std::vector<int64_t>();
  ForwardArgs forward = view(call, offsets);
  check_entries(forward.target);
  std::vector<double> scratch(3 * static_cast<size_t>(call.rows));  // large enough for both arithmetic dtypes
  forward.loss = call.mean ? scratch.data() : call.loss;
  forward.lse = scratch.data() + call.rows;
  if (!call.mean) return cpu::cross_entropy_forward(forward);
  double divisor, grad_loss;
  LossMeanArgs mean{};
  mean.dtype = forward.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  mean.target = forward.target;
  mean.normalizer = call.normalizer;
  mean.divisor = &divisor;
  if (call.grad_mean) {
    LossMeanArgs count = mean;
    count.grad_mean = call.grad_mean;
    count.grad_loss = &grad_loss;
    cpu::loss_mean(count);
    forward.lse_residual = scratch.data() + 2 * call.rows;
    BackwardArgs backward{};
    static_cast<CrossEntropyArgs&>(backward) = forward;
    backward.grad_loss = &grad_loss;
    backward.lse = forward.lse;
    backward.lse_residual = forward.lse_residual;
    backward.grad_logits = call.grad_logits;
    backward.grad_row_stride = forward.vocab;
    cpu::cross_entropy_forward_with_gradient(forward, backward);
  } else {
    cpu::cross_entropy_forward(forward);
  }
  mean.loss = forward.loss;
  mean.loss_stride = 1;
  mean.mean = call.loss;
  cpu::loss_mean(mean);
}

}  // namespace
}  // namespace sparse_ce

extern "C" __attribute__((visibility("default"))) bool sparse_ce_small_cross_entropy(const void* call) try {
  sparse_ce::run(*static_cast<const sparse_ce::Call*>(call));
  return true;
} catch (...) {
  return false;
}
