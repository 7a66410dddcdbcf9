// linear/select_ops.h - Implements select for the logits of a linear head, one chunk of rows at a time like
// linear/ops.h.
#pragma once

#include "../select_ops.h"
#include "call.h"

#include <algorithm>

namespace sparse_ce {

template <typename device_t>
class LinearSelectOps {
  using Call = LinearCall<device_t>;

 public:
  static SelectResults select(const HeadArguments& head, const Arguments& inputs, const Outputs& outputs,
                              const ChunkOptions& options) {
    Call call(head, inputs, options, /*weight_grad=*/outputs.loss);  // of a later backward
    return call.with_memory([&] { return run_forward(call, inputs, outputs); });
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const GradOutputs& grad, const HeadArguments& head,
                                                                     const SavedOutputs& outputs,
                                                                     const Arguments& inputs,
                                                                     const ChunkOptions& options,
                                                                     const NeedsGrad& needs_grad, bool scale_grad) {
    Call call(head, inputs, options, grad.loss && needs_grad.weight);
    return call.with_memory([&] {
      SelectGradOutputs grad_outputs(grad, call.head.input, outputs, inputs.indices, call.args);
      return run_backward(call, grad_outputs, needs_grad, scale_grad);
    });
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("linear_select", boxed<&select>);
    m.impl("linear_select_backward", boxed<&backward>);
  }

 private:
  static SelectResults run_forward(const Call& call, const Arguments& inputs, const Outputs& outputs) {
    SelectOutputs rows(call.head.input, call.active_args.rows, inputs.indices, outputs);
    clear_log_probs(call, rows);
    call.chunks().for_rows([&](const LinearChunk& chunk) {
      SelectArgs args{};
      static_cast<CrossEntropyArgs&>(args) = chunk_args(call.active_args, chunk);
      rows.place(args, chunk.row, first_entry(call.active_args, chunk.row));
      device_t().select_forward(args, call.head.input);
    });
    return rows.results(
        [&](const Tensor& t, bool is_requested, int of_ignored) { return call.spread(t, is_requested, of_ignored); });
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> run_backward(const Call& call,
                                                                         SelectGradOutputs& grad_outputs,
                                                                         const NeedsGrad& needs_grad, bool scale_grad) {
    const Tensor& like = call.head.input;
    const auto owned = call.gather_active(grad_outputs.args);
    if (call.active) grad_outputs.keep([&](const void* array, int64_t stride) { return call.keep(array, stride); });
    LinearGradients<device_t> gradients(call, needs_grad, /*may_recompute=*/!scale_grad);  // its gradient needs rows
    const Tensor of_scale = empty(like, {scale_grad ? call.active_args.rows : 0}, arithmetic_dtype(like));
    gradients.head.for_each_chunk([&](const LinearChunk& chunk) {
      SelectBackwardArgs args = grad_outputs.args;
      static_cast<BackwardArgs&>(args) = gradients.args_of(grad_outputs.args, chunk);
      grad_outputs.place(args, chunk.row, first_entry(call.active_args, chunk.row));
      if (scale_grad) args.grad_scale = advance(of_scale.mutable_data_ptr(), grad_outputs.dtype, chunk.row);
      if (needs_grad.values) device_t().cross_entropy_backward_values(args, like);
      device_t().select_backward(args, like);
      gradients.head.add_gradients(chunk);
    });
    return std::tuple_cat(gradients.tensors(), std::tuple<Tensor>(call.spread(of_scale, scale_grad)));
  }

  // Returns the first entry of the rows from `begin` on, in arrays with the shape of the indices.
  static int64_t first_entry(const CrossEntropyArgs& all, int64_t begin) {
    return all.target.offsets ? 0 : begin * all.target.width;
  }

  // Fills the log-probabilities that no active row writes: 0 for the entries of ignored rows, `padding_value` for
  // entries that belong to no row.
  static void clear_log_probs(const Call& call, SelectOutputs& rows) {
    const TargetView& target = call.args.target;
    if (!rows.outputs.log_probs) return;
    if (target.offsets) torch::stable::fill_(rows.log_probs, rows.padding_value());
    if (!call.active) return;
    const int64_t size = rows.log_probs.element_size();
    for (int64_t r = 0; r < target.rows; ++r) {
      if (!target.ignored(r)) continue;
      const EntryRange range = target.row(r);
      char* entries = static_cast<char*>(rows.log_probs.mutable_data_ptr());
      std::fill(entries + range.begin * size, entries + range.end * size, 0);
    }
  }
};

}  // namespace sparse_ce
