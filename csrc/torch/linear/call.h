// linear/call.h - Checks the arguments of the linear head's ops and iterates over their rows in chunks.
#pragma once

#include "../views.h"
#include "head.h"

#include <exception>
#include <vector>

namespace sparse_ce {

inline HeadArguments without_history(HeadArguments head) {
  head.input = detached(head.input), head.weight = detached(head.weight);
  if (head.bias) head.bias = detached(*head.bias);
  return head;
}

inline CrossEntropyArgs chunk_args(const CrossEntropyArgs& all, const LinearChunk& chunk) {
  CrossEntropyArgs args = all;
  args.logits = origin(chunk.z);
  args.dtype = to_dtype(chunk.z, "logits", /*integer=*/false);
  args.rows = chunk.z.size(0);
  args.row_stride = chunk.z.size(1);
  args.first_class = chunk.first_class;
  args.vocab = chunk.first_class + chunk.z.size(1);
  args.target = all.target.slice(chunk.row, chunk.row + args.rows);
  const DType dtype = args.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (all.row_scale) args.row_scale = advance(all.row_scale, dtype, chunk.row * all.row_scale_stride);
  return args;
}

// Checks and stores the arguments of every op. The target has the rows of the input; logits are computed per chunk.
//
// If a loss needs the weight gradient (`weight_grad`) and memory is ample, chunks are larger: that gradient is then
// accumulated over fewer chunks, or none. Forward and backward choose alike, so that both compute the same logits,
// unless memory was short in between or the weight of a loss without a mean is frozen.
template <typename device_t>
struct LinearCall {
  LinearCall(const HeadArguments& head_inputs, const Arguments& inputs, const ChunkOptions& options,
             bool weight_grad = false)
      : head(without_history(head_inputs)), chunk_rows(options.chunk_rows), float32_logits(options.float32_logits) {
    const Tensor &input = head.input, &weight = head.weight;
    head.check_tensors();
    check(!chunk_rows || *chunk_rows > 0, "chunk_rows must be positive, got ", chunk_rows.value_or(0));
    if (weight_grad && !chunk_rows) ample_bytes = device_t().ample_bytes(input);
    inputs.check_options(weight.size(0), "the rows of linear_weight");
    owned.logits = input;
    args.rows = input.size(0);
    args.vocab = inputs.num_classes.value_or(weight.size(0));
    view_arguments(inputs, owned, args);
    if (args.rows > 0) device_t().check_target(args.target, input);
    active = device_t().active_rows(args.target);
    active_args = args;
    if (!active) return;
    active_args.rows = active->count();
    active_args.target = active->view(args.target);
    if (args.row_scale_stride == 0) return;
    active_scale = keep(args.row_scale, args.row_scale_stride);
    active_args.row_scale = origin(*active_scale);
    active_args.row_scale_stride = 1;
  }

  LinearHead<device_t> chunks() const {
    return {head.input,         head.weight, head.bias,      args.vocab,
            active_args.target, chunk_rows,  float32_logits, active ? &*active : nullptr,
            ample_bytes};
  }

  // Returns f(). If f fails with larger chunks, it runs again without them. If that succeeds, memory was short, and all
  // later calls on this device forgo them: each failure makes PyTorch's allocator release its cached memory.
  template <typename function_t>
  auto with_memory(const function_t& f) {
    if (ample_bytes == 0) return f();
    std::exception_ptr error;
    try {
      return f();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    ample_bytes = 0;
    try {
      auto results = f();
      device_t().forgo_ample_chunks(head.input);
      return results;
    } catch (const std::exception&) {
      std::rethrow_exception(error);
    }
  }

  // Scatters values of active rows into all rows (rows,); ignored rows get `fill`. Outputs not requested stay empty.
  Tensor spread(const Tensor& of_active, bool requested = true, double fill = 0) const {
    if (!active || !requested) return of_active;
    Tensor all = empty(of_active, {args.rows}, of_active.scalar_type());
    torch::stable::fill_(all, fill);
    copy_each(of_active.const_data_ptr(), 1, nullptr, all.mutable_data_ptr(), active->rows.data(),
              of_active.element_size());
    return all;
  }

  // Gathers the active rows of a backward's arrays, which have one element per row. Returns the tensors that own them.
  std::vector<Tensor> gather_active(BackwardArgs& backward) const {
    std::vector<Tensor> owned;
    if (!active) return owned;
    static_cast<CrossEntropyArgs&>(backward) = active_args;
    const auto replace = [&](const void*& array, int64_t stride) {
      if (!array) return;
      owned.push_back(keep(array, stride));
      array = origin(owned.back());
    };
    replace(backward.grad_loss, backward.grad_loss_stride);
    replace(backward.grad_lse, backward.grad_lse_stride);
    replace(backward.lse, 1);
    replace(backward.lse_residual, 1);
    backward.grad_loss_stride = backward.grad_lse_stride = 1;
    return owned;
  }

  // Gathers the active rows of an array with one element per row.
  Tensor keep(const void* array, int64_t stride) const {
    Tensor kept = empty(head.input, {active->count()}, arithmetic_dtype(head.input));
    copy_each(array, stride, active->rows.data(), kept.mutable_data_ptr(), nullptr, kept.element_size());
    return kept;
  }

  // Copies numbers of 4 or 8 bytes.
  void copy_each(const void* from, int64_t stride, const int64_t* from_rows, void* to, const int64_t* to_rows,
                 int64_t bytes) const {
    CopyRowsArgs copy{};
    copy.from = from;
    copy.to = to;
    copy.from_dtype = copy.to_dtype = bytes == 8 ? DType::kFloat64 : DType::kFloat32;
    copy.from_stride = stride;
    copy.to_stride = 1;
    copy.from_rows = from_rows;
    copy.to_rows = to_rows;
    copy.count = active->count();
    copy.width = 1;
    device_t().copy_rows(copy);
  }

  HeadArguments head;
  std::optional<int64_t> chunk_rows;
  bool float32_logits;
  int64_t ample_bytes = 0;
  Owned owned;
  CrossEntropyArgs args{};  // of all rows
  std::optional<ActiveRows> active;  // nothing if all rows are active
  CrossEntropyArgs active_args{};  // of the active rows
  OptionalTensor active_scale;
};

// Holds the gradients of a call. It also builds the arguments for a chunk, whose gradient overwrites its logits.
template <typename device_t>
struct LinearGradients {
  // If the caller computes the logits again, that may be by classes: always, or if nothing is given, to save memory.
  LinearGradients(const LinearCall<device_t>& call, const NeedsGrad& needs_grad,
                  std::optional<bool> may_recompute = std::nullopt)
      : head(call.chunks()), like(call.head.input) {
    head.begin_gradients(needs_grad, call.head.weight, call.head.bias, may_recompute.value_or(head.saves_memory()));
    if (needs_grad.values)
      values = torch::stable::new_zeros(call.owned.indices, call.owned.indices.sizes(), arithmetic_dtype(like));
  }

  BackwardArgs args_of(const BackwardArgs& all, const LinearChunk& chunk) const {
    BackwardArgs args = all;
    static_cast<CrossEntropyArgs&>(args) = chunk_args(all, chunk);
    const int64_t row = chunk.row;
    const DType dtype = arithmetic_dtype(like) == ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
    if (all.grad_loss) args.grad_loss = advance(all.grad_loss, dtype, row * all.grad_loss_stride);
    if (all.row_weight) args.row_weight = advance(all.row_weight, dtype, row * all.row_weight_stride);
    if (all.grad_lse) args.grad_lse = advance(all.grad_lse, dtype, row * all.grad_lse_stride);
    args.lse = advance(all.lse, dtype, row);
    if (all.lse_residual) args.lse_residual = advance(all.lse_residual, dtype, row);
    args.grad_logits = mutable_origin(chunk.z);
    args.grad_row_stride = args.row_stride;
    if (values) {
      const int64_t first = all.target.offsets ? 0 : row * all.target.width;
      args.grad_values = advance(values->mutable_data_ptr(), dtype, first);
    }
    return args;
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> tensors() const {
    // A gradient that is not requested is a new empty tensor: two outputs of an op must not be the same tensor.
    const auto or_empty = [&](const OptionalTensor& gradient) {
      return gradient ? *gradient : empty(like, {0}, like.scalar_type());
    };
    return {or_empty(head.grad_input), or_empty(head.grad_weight), or_empty(head.grad_bias), or_empty(values)};
  }

  LinearHead<device_t> head;
  Tensor like;
  OptionalTensor values;
};

}  // namespace sparse_ce
