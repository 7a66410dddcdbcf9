// linear/ops.h - Implements the ops of the linear head on tensors, for CPU and CUDA.
#pragma once

#include "../cross_entropy_ops.h"
#include "call.h"

namespace sparse_ce {

template <typename device_t>
class LinearOps {
  using Call = LinearCall<device_t>;
  using Gradients = LinearGradients<device_t>;

 public:
  static std::tuple<Tensor, Tensor> forward(const HeadArguments& head, const Arguments& inputs,
                                            const ChunkOptions& options) {
    const Rows rows = run_forward(Call(head, inputs, options));
    return {rows.loss, rows.lse};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward_with_residual(const HeadArguments& head, const Arguments& inputs,
                                                                  const ChunkOptions& options) {
    Call call(head, inputs, options, /*weight_grad=*/true);  // of a later backward
    const Rows rows = call.with_memory([&] { return run_forward(call); });
    return {rows.loss, rows.lse, rows.residual};
  }

  static std::tuple<Tensor, Tensor> mean(const HeadArguments& head, const Arguments& inputs,
                                         const OptionalTensor& normalizer, const ChunkOptions& options,
                                         const OptionalTensor& row_weight) {
    const auto [mean, lse, entropy, argmax] =
        mean_with_metrics(head, inputs, normalizer, options, row_weight, false, false);
    return {mean, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> mean_with_metrics(
      const HeadArguments& head, const Arguments& inputs, const OptionalTensor& normalizer, const ChunkOptions& options,
      const OptionalTensor& row_weight, bool entropy, bool argmax) {
    const Call call(head, inputs, options);
    const Rows rows = run_forward(call, entropy, argmax);
    Tensor one = empty(head.input, {}, arithmetic_dtype(head.input));
    torch::stable::fill_(one, 1.0);
    LossMean<device_t> mean(call.args.target, head.input, normalizer, one, row_weight);
    mean.finish(rows.loss);
    return {mean.mean, rows.lse, rows.entropy, rows.argmax};
  }

  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static Result forward_with_gradient(const Tensor& grad_mean, const OptionalTensor& normalizer,
                                      const HeadArguments& head, const Arguments& inputs, const ChunkOptions& options,
                                      const NeedsGrad& needs_grad, const OptionalTensor& row_weight, bool entropy,
                                      bool argmax) {
    Call call(head, inputs, options, needs_grad.weight);
    return call.with_memory(
        [&] { return run_with_gradient(call, grad_mean, normalizer, needs_grad, row_weight, entropy, argmax); });
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_loss, const OptionalTensor& grad_lse,
                                                             const HeadArguments& head, const Tensor& lse,
                                                             const OptionalTensor& lse_residual,
                                                             const Arguments& inputs, const ChunkOptions& options,
                                                             const NeedsGrad& needs_grad) {
    Call call(head, inputs, options, needs_grad.weight);
    return call.with_memory([&] {
      return run_backward(call, view_grad_outputs(call.args, head.input, grad_loss, grad_lse, lse, lse_residual),
                          needs_grad);
    });
  }

  static void scale_(const Tensor& gradient, const Tensor& scale, const OptionalTensor& expected) {
    ScaleArgs args{};
    args.scale = view_scalar(scale, gradient, "scale");
    if (expected) args.expected = view_scalar(*expected, gradient, "expected");
    args.dtype = to_dtype(gradient, "gradient", /*integer=*/false);
    const bool packed = gradient.is_contiguous();
    const bool rows = gradient.dim() == 2 && gradient.stride(1) == 1 && gradient.stride(0) >= gradient.size(1);
    check(packed || rows, "gradient must be contiguous or have contiguous, non-overlapping rows, got shape ",
          shape(gradient));
    const Overwritten overwritten(gradient, "gradient");
    overwritten.check_apart(scale, "scale", expected, "expected");
    args.values = mutable_origin(gradient);
    args.rows = packed ? 1 : gradient.size(0);
    args.count = packed ? gradient.numel() : gradient.size(1);
    args.row_stride = packed ? args.count : gradient.stride(0);
    if (gradient.numel() > 0) device_t().scale(args, gradient);
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("linear_forward", boxed<&forward>);
    m.impl("linear_forward_with_residual", boxed<&forward_with_residual>);
    m.impl("linear_forward_with_gradient", boxed<&forward_with_gradient>);
    m.impl("linear_backward", boxed<&backward>);
    m.impl("linear_mean", boxed<&mean>);
    m.impl("linear_mean_with_metrics", boxed<&mean_with_metrics>);
    m.impl("scale_", boxed<&scale_>);
  }

 private:
  // Holds the outputs of forward for the active rows, and for all rows after `spread`.
  struct Rows {
    explicit Rows(const Call& call, bool entropy = false, bool argmax = false)
        : has_entropy(entropy), has_argmax(argmax), loss(per_row(call)), lse(per_row(call)), residual(per_row(call)),
          entropy(per_row(call, entropy)),
          argmax(empty(call.head.input, {argmax ? call.active_args.rows : 0}, ScalarType::Long)) {}
    static Tensor per_row(const Call& call, bool requested = true) {
      return empty(call.head.input, {requested ? call.active_args.rows : 0}, arithmetic_dtype(call.head.input));
    }

    ForwardArgs args_of(const CrossEntropyArgs& all, const LinearChunk& chunk) const {
      ForwardArgs args{};
      static_cast<CrossEntropyArgs&>(args) = chunk_args(all, chunk);
      const DType dtype = to_dtype(loss, "loss", /*integer=*/false);
      args.loss = advance(loss.mutable_data_ptr(), dtype, chunk.row);
      args.lse = advance(lse.mutable_data_ptr(), dtype, chunk.row);
      args.lse_residual = advance(residual.mutable_data_ptr(), dtype, chunk.row);
      return args;
    }

    SelectArgs select_args_of(const CrossEntropyArgs& all, const LinearChunk& chunk) const {
      SelectArgs args{};
      static_cast<ForwardArgs&>(args) = args_of(all, chunk);
      const DType dtype = to_dtype(loss, "loss", /*integer=*/false);
      if (entropy.size(0) > 0) args.entropy = advance(entropy.mutable_data_ptr(), dtype, chunk.row);
      if (argmax.size(0) > 0) args.argmax = static_cast<int64_t*>(argmax.mutable_data_ptr()) + chunk.row;
      args.outputs.loss = true;
      args.outputs.entropy = args.entropy != nullptr;
      args.outputs.argmax = args.argmax != nullptr;
      return args;
    }

    void spread(const Call& call) {
      for (Tensor* of_rows : {&loss, &lse, &residual}) *of_rows = call.spread(*of_rows);
      entropy = call.spread(entropy, has_entropy);
      argmax = call.spread(argmax, has_argmax, -1);
    }

    bool has_entropy, has_argmax;
    Tensor loss, lse, residual, entropy, argmax;
  };

  static Rows run_forward(const Call& call, bool entropy = false, bool argmax = false) {
    Rows rows(call, entropy, argmax);
    LinearHead<device_t> head = call.chunks();
    head.for_rows([&](const LinearChunk& chunk) { compute_loss(call, rows, chunk); });
    rows.spread(call);
    return rows;
  }

  static void compute_loss(const Call& call, const Rows& rows, const LinearChunk& chunk) {
    rows.has_entropy || rows.has_argmax
        ? device_t().select_forward(rows.select_args_of(call.active_args, chunk), call.head.input)
        : device_t().cross_entropy_forward(rows.args_of(call.active_args, chunk), call.head.input);
  }

  static Result run_with_gradient(const Call& call, const Tensor& grad_mean, const OptionalTensor& normalizer,
                                  const NeedsGrad& needs_grad, const OptionalTensor& row_weight, bool entropy,
                                  bool argmax) {
    const Tensor& like = call.head.input;
    LossMean<device_t> mean(call.args.target, like, normalizer, grad_mean, row_weight);
    Rows rows(call, entropy, argmax);
    Gradients gradients(call, needs_grad);
    BackwardArgs backward{};
    static_cast<CrossEntropyArgs&>(backward) = call.active_args;
    mean.set_grad_loss(backward);
    OptionalTensor active_weight;
    if (call.active && row_weight) {
      active_weight = call.keep(backward.row_weight, backward.row_weight_stride);
      backward.row_weight = origin(*active_weight);
      backward.row_weight_stride = 1;
    }
    backward.lse = rows.lse.const_data_ptr();
    backward.lse_residual = rows.residual.const_data_ptr();
    if (gradients.head.by_classes()) {
      gradients.head.for_rows([&](const LinearChunk& chunk) { compute_loss(call, rows, chunk); });
      add_chunks(call, gradients, backward, needs_grad);
    } else {
      gradients.head.for_each_chunk([&](const LinearChunk& chunk) {
        const BackwardArgs args = gradients.args_of(backward, chunk);
        if (needs_grad.values) {  // reads the logits before the gradient overwrites them
          compute_loss(call, rows, chunk);
          device_t().cross_entropy_backward_values(args, like);
          device_t().cross_entropy_backward(args, like);
        } else if (entropy || argmax) {
          device_t().select_forward_with_gradient(rows.select_args_of(call.active_args, chunk), args, like);
        } else {
          device_t().cross_entropy_forward_with_gradient(rows.args_of(call.active_args, chunk), args, like);
        }
        gradients.head.add_gradients(chunk);
      });
    }
    rows.spread(call);
    mean.finish(rows.loss);
    return std::tuple_cat(
        std::make_tuple(mean.mean, mean.divisor, rows.loss, rows.lse, rows.residual, rows.entropy, rows.argmax),
        gradients.tensors());
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> run_backward(const Call& call, BackwardArgs backward,
                                                                 const NeedsGrad& needs_grad) {
    const auto owned = call.gather_active(backward);
    Gradients gradients(call, needs_grad);
    add_chunks(call, gradients, backward, needs_grad);
    return gradients.tensors();
  }

  // Computes the gradients. The losses must be known.
  static void add_chunks(const Call& call, Gradients& gradients, const BackwardArgs& backward,
                         const NeedsGrad& needs_grad) {
    gradients.head.for_each_chunk([&](const LinearChunk& chunk) {
      const BackwardArgs args = gradients.args_of(backward, chunk);
      if (needs_grad.values) device_t().cross_entropy_backward_values(args, call.head.input);
      if (!(needs_grad.input || needs_grad.weight || needs_grad.bias)) return;
      device_t().cross_entropy_backward(args, call.head.input);
      gradients.head.add_gradients(chunk);
    });
  }
};

}  // namespace sparse_ce
