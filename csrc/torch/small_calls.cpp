// small_calls.cpp - the plain loss of few logits without the dispatcher. An op costs 10 to 20 us before it has looked
// at a number (arguments made into values of a schema, results into tensors); this is a C function that Python calls
// with addresses. It takes what needs no copy and no message: where it returns false, the op is called, which says why.
#include "views.h"

#include <cstddef>
#include <vector>

namespace sparse_ce {
namespace {

// A call, as Python packs it: see sparse_ce/ops/cross_entropy_small.py. logits (rows, vocab) of column stride 1;
// indices (rows,) or (rows, width), values of that shape or null; loss, normalizer and grad_mean in the arithmetic
// dtype, the last two (1,) or null. All of it lies in this memory, packed but for the rows of the logits. Options are
// the defaults.
struct Call {
  const void *logits, *indices, *values, *normalizer, *grad_mean;
  void* loss;  // (rows,), or the mean (1,)
  void* grad_logits;  // (rows, vocab), of the mean; with grad_mean
  int64_t rows, vocab, row_stride, width, ignore_index;
  int64_t dtype, indices_dtype, values_dtype;
  bool mean;
};

// struct.Struct("@7P8q?") of Python
static_assert(offsetof(Call, rows) == 7 * sizeof(void*) &&
              offsetof(Call, mean) == 7 * sizeof(void*) + 8 * sizeof(int64_t));

ForwardArgs view(const Call& call) {
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
  target.entries = call.rows * call.width;
  target.width = call.width;
  target.num_classes = call.vocab;
  target.ignore_index = call.ignore_index;
  return args;
}

void run(const Call& call) {
  ForwardArgs forward = view(call);
  check_entries(forward.target);
  std::vector<double> scratch(3 * static_cast<size_t>(call.rows));  // of either arithmetic dtype
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
