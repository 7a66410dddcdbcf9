// linear_ops.h - the ops of the linear head on tensors, for the CPU and for CUDA alike. `device_t` as for
// cross_entropy_ops.h and linear_head.h.
#pragma once

#include "cross_entropy_ops.h"
#include "linear_call.h"

namespace sparse_ce {

template <typename device_t>
class LinearOps {
  using Call = LinearCall<device_t>;
  using Gradients = LinearGradients<device_t>;

 public:
  static std::tuple<Tensor, Tensor> forward(const HeadArguments& head, const Arguments& given,
                                            std::optional<int64_t> chunk_rows) {
    const auto [loss, lse, residual] = run_forward(Call(head, given, chunk_rows));
    return {loss, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward_with_residual(const HeadArguments& head, const Arguments& given,
                                                                  std::optional<int64_t> chunk_rows) {
    return run_forward(Call(head, given, chunk_rows));
  }

  static std::tuple<Tensor, Tensor> mean(const HeadArguments& head, const Arguments& given,
                                         const OptionalTensor& normalizer, std::optional<int64_t> chunk_rows) {
    const Call call(head, given, chunk_rows);
    const auto [loss, lse, residual] = run_forward(call);
    Tensor one = empty(head.input, {}, arithmetic_dtype(head.input));
    torch::stable::fill_(one, 1.0);
    LossMean<device_t> mean(call.args.target, head.input, normalizer, one);
    mean.finish(loss);
    return {mean.mean, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward_with_gradient(
      const Tensor& grad_mean, const OptionalTensor& normalizer, const HeadArguments& head, const Arguments& given,
      std::optional<int64_t> chunk_rows, const Wanted& wanted) {
    const Call call(head, given, chunk_rows);
    const Tensor& like = head.input;
    LossMean<device_t> mean(call.args.target, like, normalizer, grad_mean);
    const Rows rows(call);
    Gradients gradients(call, wanted);
    BackwardArgs backward{};
    static_cast<CrossEntropyArgs&>(backward) = call.live_args;
    backward.grad_loss = mean.grad_loss();
    backward.lse = rows.lse.const_data_ptr();
    backward.lse_residual = rows.residual.const_data_ptr();
    call.for_each_chunk(gradients.head, [&](int64_t begin, const Tensor& z) {
      const ForwardArgs forward = rows.chunk(call.live_args, begin, z);
      const BackwardArgs chunk = gradients.chunk(backward, begin, z);
      if (wanted.values) {  // needs the logits, which the gradient overwrites
        device_t::forward(forward, like);
        device_t::backward_values(chunk, like);
        device_t::backward(chunk, like);
      } else {
        device_t::forward_with_gradient(forward, chunk, like);
      }
      gradients.head.add_gradients(begin, z);
    });
    mean.finish(call.spread(rows.loss));
    auto [grad_input, grad_weight, grad_bias, grad_values] = gradients.tensors();
    return {mean.mean, mean.divisor, call.spread(rows.lse), call.spread(rows.residual), grad_input, grad_weight,
            grad_bias, grad_values};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_loss, const OptionalTensor& grad_lse,
                                                             const HeadArguments& head, const Tensor& lse,
                                                             const OptionalTensor& lse_residual, const Arguments& given,
                                                             std::optional<int64_t> chunk_rows, const Wanted& wanted) {
    const Call call(head, given, chunk_rows);
    BackwardArgs backward = view_upstream(call.args, head.input, grad_loss, grad_lse, lse, lse_residual);
    const auto held = call.keep_live(backward);
    Gradients gradients(call, wanted);
    call.for_each_chunk(gradients.head, [&](int64_t begin, const Tensor& z) {
      const BackwardArgs chunk = gradients.chunk(backward, begin, z);
      if (wanted.values) device_t::backward_values(chunk, head.input);
      if (!(wanted.input || wanted.weight || wanted.bias)) return;
      device_t::backward(chunk, head.input);
      gradients.head.add_gradients(begin, z);
    });
    return gradients.tensors();
  }

  static void scale_(const Tensor& gradient, const Tensor& scale) {
    ScaleArgs args{};
    args.scale = view_scalar(scale, gradient, "scale");
    args.dtype = to_dtype(gradient, "gradient", /*integer=*/false);
    check(gradient.is_contiguous(), "gradient must be contiguous, got shape ", shape(gradient));
    args.values = gradient.mutable_data_ptr();
    args.count = gradient.numel();
    if (args.count > 0) device_t::scale(args, gradient);
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("linear_forward", boxed<&forward>);
    m.impl("linear_forward_with_residual", boxed<&forward_with_residual>);
    m.impl("linear_forward_with_gradient", boxed<&forward_with_gradient>);
    m.impl("linear_backward", boxed<&backward>);
    m.impl("linear_mean", boxed<&mean>);
    m.impl("scale_", boxed<&scale_>);
  }

 private:
  // What forward gives for every row.
  struct Rows {
    explicit Rows(const Call& call) : loss(per_row(call)), lse(per_row(call)), residual(per_row(call)) {}
    static Tensor per_row(const Call& call) {
      return empty(call.head.input, {call.live_args.rows}, arithmetic_dtype(call.head.input));
    }

    ForwardArgs chunk(const CrossEntropyArgs& all, int64_t begin, const Tensor& z) const {
      ForwardArgs args{};
      static_cast<CrossEntropyArgs&>(args) = chunk_args(all, begin, z);
      const DType dtype = to_dtype(loss, "loss", /*integer=*/false);
      args.loss = advance(loss.mutable_data_ptr(), dtype, begin);
      args.lse = advance(lse.mutable_data_ptr(), dtype, begin);
      args.lse_residual = advance(residual.mutable_data_ptr(), dtype, begin);
      return args;
    }

    Tensor loss, lse, residual;
  };

  static std::tuple<Tensor, Tensor, Tensor> run_forward(const Call& call) {
    const Rows rows(call);
    LinearHead<device_t> head = call.chunks();
    call.for_each_chunk(head, [&](int64_t begin, const Tensor& z) {
      device_t::forward(rows.chunk(call.live_args, begin, z), call.head.input);
    });
    return {call.spread(rows.loss), call.spread(rows.lse), call.spread(rows.residual)};
  }
};

}  // namespace sparse_ce
