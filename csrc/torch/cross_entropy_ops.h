// cross_entropy_ops.h - Implements the loss ops on tensors, for CPU and CUDA: checks arguments, allocates outputs and
// calls the device.
#pragma once

#include "device.h"
#include "views.h"

#include <tuple>

namespace sparse_ce {

// Computes the parts of a mean loss. The gradient of each row's loss depends only on the target, so it is computed
// before the losses; the mean is computed after them.
template <typename device_t>
class LossMean {
 public:
  LossMean(const TargetView& target, const Tensor& like, const OptionalTensor& normalizer, const Tensor& grad_mean,
           const OptionalTensor& row_weight)
      : mean(empty(like, {}, arithmetic_dtype(like))), divisor(empty(like, {}, arithmetic_dtype(like))), like_(like),
        grad_loss_(empty(like, {}, arithmetic_dtype(like))) {
    args_.dtype = to_dtype(mean, "mean", /*integer=*/false);
    args_.target = target;
    args_.normalizer = normalizer ? view_scalar(*normalizer, like, "normalizer") : nullptr;
    if (row_weight) args_.row_weight = view_rows(*row_weight, like, "row_weight", args_.row_weight_stride);
    args_.divisor = divisor.mutable_data_ptr();
    LossMeanArgs count = args_;
    count.grad_mean = view_scalar(grad_mean, like, "grad_mean");
    count.grad_loss = grad_loss_.mutable_data_ptr();
    device_t().loss_mean(count, like);
  }

  // Sets the gradient of each row's loss, which the row's weight scales.
  void set_grad_loss(BackwardArgs& backward) const {
    backward.grad_loss = grad_loss_.const_data_ptr();
    backward.row_weight = args_.row_weight;
    backward.row_weight_stride = args_.row_weight_stride;
  }

  // Computes the mean. `loss` (rows,) must be contiguous.
  void finish(const Tensor& loss) {
    args_.loss = loss.const_data_ptr();
    args_.loss_stride = 1;
    args_.mean = mean.mutable_data_ptr();
    device_t().loss_mean(args_, like_);
  }

  Tensor mean, divisor;

 private:
  Tensor like_, grad_loss_;
  LossMeanArgs args_{};
};

template <typename device_t>
class CrossEntropyOps {
  using RowsAndMean = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // mean, divisor, loss, lse, lse_residual

 public:
  static std::tuple<Tensor, Tensor> forward(const Tensor& logits, const Arguments& inputs) {
    auto [loss, lse, residual] = run_forward(logits, inputs, false);
    return {loss, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward_with_residual(const Tensor& logits, const Arguments& inputs) {
    auto [loss, lse, residual] = run_forward(logits, inputs, true);
    return {loss, lse, *residual};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward_with_gradient(
      const Tensor& grad_mean, const OptionalTensor& normalizer, const Tensor& logits, const Arguments& inputs,
      const OptionalTensor& row_weight) {
    Owned owned;
    ForwardArgs args{};
    view_call(logits, inputs, owned, args, /*strided=*/true);
    device_t().check_target(args.target, logits);
    LossMean<device_t> mean(args.target, logits, normalizer, grad_mean, row_weight);
    BackwardArgs backward = backward_of(args);
    const Tensor grad_logits = empty_gradient(logits, backward);
    return std::tuple_cat(run_with_gradient(args, backward, mean, logits), std::tuple(grad_logits));
  }

  static RowsAndMean forward_with_gradient_(const Tensor& grad_mean, const OptionalTensor& normalizer,
                                            const Tensor& logits, const Arguments& inputs,
                                            const OptionalTensor& row_weight) {
    Owned owned;
    ForwardArgs args{};
    view_call(logits, inputs, owned, args, /*strided=*/true);
    check_overwritable(logits, args);
    const Overwritten overwritten(logits, "logits");
    check_apart(overwritten, inputs);
    overwritten.check_apart(grad_mean, "grad_mean", normalizer, "normalizer", row_weight, "row_weight");
    device_t().check_target(args.target, logits);
    LossMean<device_t> mean(args.target, logits, normalizer, grad_mean, row_weight);
    BackwardArgs backward = backward_of(args);
    overwrite(logits, backward);
    return run_with_gradient(args, backward, mean, logits);
  }

  static Tensor backward(const Tensor& grad_loss, const OptionalTensor& grad_lse, const Tensor& logits,
                         const Tensor& lse, const OptionalTensor& lse_residual, const Arguments& inputs) {
    Owned owned;
    BackwardArgs args = view_backward(grad_loss, grad_lse, logits, lse, lse_residual, inputs, owned);
    if (args.rows > 0) device_t().check_target(args.target, logits);
    const Tensor grad_logits = empty_gradient(logits, args);
    if (args.rows == 0) return grad_logits;
    device_t().cross_entropy_backward(args, logits);
    return grad_logits;
  }

  static void backward_(const Tensor& grad_loss, const OptionalTensor& grad_lse, const Tensor& logits,
                        const Tensor& lse, const OptionalTensor& lse_residual, const Arguments& inputs) {
    Owned owned;
    BackwardArgs args = view_backward(grad_loss, grad_lse, logits, lse, lse_residual, inputs, owned);
    check_overwritable(logits, args);
    const Overwritten overwritten(logits, "logits");
    check_apart(overwritten, inputs);
    overwritten.check_apart(grad_loss, "grad_loss", grad_lse, "grad_lse", lse, "lse", lse_residual, "lse_residual");
    if (args.rows == 0) return;
    device_t().check_target(args.target, logits);
    overwrite(logits, args);
    device_t().cross_entropy_backward(args, logits);
  }

  static void backward_anew_(const Tensor& expected, const Tensor& grad_mean, const Tensor& grad_loss,
                             const Tensor& logits, const Tensor& lse, const OptionalTensor& lse_residual,
                             const Tensor& grad_logits, const Arguments& inputs) {
    Owned owned;
    BackwardArgs args = view_backward(grad_loss, std::nullopt, logits, lse, lse_residual, inputs, owned);
    args.expected = view_scalar(expected, logits, "expected");
    args.grad_mean = view_scalar(grad_mean, logits, "grad_mean");
    view_gradient(grad_logits, logits, args);
    const Overwritten overwritten(grad_logits, "grad_logits");
    check_apart(overwritten, inputs);
    overwritten.check_apart(grad_loss, "grad_loss", lse, "lse", lse_residual, "lse_residual", expected, "expected",
                            grad_mean, "grad_mean", logits, "logits");
    if (args.rows == 0) return;
    device_t().check_target(args.target, logits);
    device_t().cross_entropy_backward(args, logits);
  }

  static Tensor backward_values(const Tensor& grad_loss, const Tensor& logits, const Tensor& lse,
                                const OptionalTensor& lse_residual, const Arguments& inputs) {
    Owned owned;
    BackwardArgs args = view_backward(grad_loss, std::nullopt, logits, lse, lse_residual, inputs, owned);
    Tensor grad_values = torch::stable::new_zeros(inputs.indices, inputs.indices.sizes(), arithmetic_dtype(logits));
    if (args.rows == 0 || args.target.entries == 0) return grad_values;
    device_t().check_target(args.target, logits);
    args.grad_values = grad_values.mutable_data_ptr();
    device_t().cross_entropy_backward_values(args, logits);
    return grad_values;
  }

  static std::tuple<Tensor, Tensor> loss_mean(const Tensor& loss, const OptionalTensor& normalizer,
                                              const TargetArguments& inputs, const OptionalTensor& row_weight) {
    Owned owned;
    LossMeanArgs args = view_loss_mean(loss, normalizer, inputs, row_weight, owned);
    // The divisor of labels uses the class weights, so the labels must be valid. Other targets only count rows.
    if (inputs.weight && args.target.labels && args.target.rows > 0) device_t().check_target(args.target, loss);
    Tensor mean = empty(loss, {}, loss.scalar_type()), divisor = empty(loss, {}, loss.scalar_type());
    args.mean = mean.mutable_data_ptr();
    args.divisor = divisor.mutable_data_ptr();
    device_t().loss_mean(args, loss);
    return {mean, divisor};
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("forward", boxed<&forward>);
    m.impl("forward_with_residual", boxed<&forward_with_residual>);
    m.impl("forward_with_gradient", boxed<&forward_with_gradient>);
    m.impl("forward_with_gradient_", boxed<&forward_with_gradient_>);
    m.impl("backward", boxed<&backward>);
    m.impl("backward_", boxed<&backward_>);
    m.impl("backward_anew_", boxed<&backward_anew_>);
    m.impl("backward_values", boxed<&backward_values>);
    m.impl("loss_mean", boxed<&loss_mean>);
  }

 private:
  static void overwrite(const Tensor& logits, BackwardArgs& args) {
    args.grad_logits = mutable_origin(logits);
    args.grad_row_stride = args.row_stride;
    args.grad_strided = args.strided;
  }

  // Allocates a gradient with the layout of the logits: packed rows, or classes strided.
  static Tensor empty_gradient(const Tensor& logits, BackwardArgs& args) {
    Tensor gradient;
    if (logits.dim() == 2) {
      gradient = device_t().empty_output(logits, {args.rows, args.vocab}, logits.scalar_type());
    } else {
      const int64_t outer = logits.size(0), inner = logits.size(1);
      const Tensor packed = device_t().empty_output(logits, {outer * args.vocab, inner}, logits.scalar_type());
      gradient = torch::stable::transpose(torch::stable::view(packed, {outer, args.vocab, inner}), 1, 2);
    }
    write_to(gradient, args);
    return gradient;
  }
  static void write_to(const Tensor& gradient, BackwardArgs& args) {
    args.grad_logits = mutable_origin(gradient);
    args.grad_row_stride = args.vocab;
    if (gradient.dim() == 3) args.grad_strided = {gradient.size(1), args.vocab * gradient.size(1), gradient.size(1)};
  }

  // Views an existing gradient of that layout.
  static void view_gradient(const Tensor& gradient, const Tensor& logits, BackwardArgs& args) {
    check_same_device(gradient, logits, "grad_logits");
    check(gradient.scalar_type() == logits.scalar_type(), "grad_logits must be of dtype ", name(logits.scalar_type()),
          ", got ", name(gradient.scalar_type()));
    check(same_sizes(gradient.sizes(), logits.sizes()), "grad_logits must be ", shape(logits), ", got ",
          shape(gradient));
    const Tensor packed = logits.dim() == 3 ? torch::stable::transpose(gradient, 1, 2) : gradient;
    check(packed.is_contiguous(),
          "grad_logits must have the memory layout that forward_with_gradient returns, got stride ",
          gradient.stride(0));
    write_to(gradient, args);
  }

  static std::tuple<Tensor, Tensor, OptionalTensor> run_forward(const Tensor& logits, const Arguments& inputs,
                                                                bool with_residual) {
    Owned owned;
    ForwardArgs args{};
    view_call(logits, inputs, owned, args, /*strided=*/true);
    const ScalarType dtype = arithmetic_dtype(logits);
    Tensor loss = empty(logits, {args.rows}, dtype), lse = empty(logits, {args.rows}, dtype);
    OptionalTensor residual;
    if (with_residual) residual = empty(logits, {args.rows}, dtype);
    if (args.rows == 0) return {loss, lse, residual};
    device_t().check_target(args.target, logits);
    args.loss = loss.mutable_data_ptr();
    args.lse = lse.mutable_data_ptr();
    args.lse_residual = residual ? residual->mutable_data_ptr() : nullptr;
    device_t().cross_entropy_forward(args, logits);
    return {loss, lse, residual};
  }

  static BackwardArgs backward_of(const CrossEntropyArgs& args) {
    BackwardArgs backward{};
    static_cast<CrossEntropyArgs&>(backward) = args;
    return backward;
  }

  // `backward` determines where the gradient is written; it may overwrite the logits.
  static RowsAndMean run_with_gradient(ForwardArgs forward, BackwardArgs backward, LossMean<device_t>& mean,
                                       const Tensor& logits) {
    const ScalarType dtype = arithmetic_dtype(logits);
    Tensor loss = empty(logits, {forward.rows}, dtype), lse = empty(logits, {forward.rows}, dtype);
    Tensor residual = empty(logits, {forward.rows}, dtype);
    mean.set_grad_loss(backward);
    forward.loss = loss.mutable_data_ptr();
    backward.lse = forward.lse = lse.mutable_data_ptr();
    backward.lse_residual = forward.lse_residual = residual.mutable_data_ptr();
    if (forward.rows > 0) device_t().cross_entropy_forward_with_gradient(forward, backward, logits);
    mean.finish(loss);
    return {mean.mean, mean.divisor, loss, lse, residual};
  }

  static BackwardArgs view_backward(const Tensor& grad_loss, const OptionalTensor& grad_lse, const Tensor& logits,
                                    const Tensor& lse, const OptionalTensor& lse_residual, const Arguments& inputs,
                                    Owned& owned) {
    CrossEntropyArgs args{};
    view_call(logits, inputs, owned, args, /*strided=*/true);
    return view_grad_outputs(args, logits, grad_loss, grad_lse, lse, lse_residual);
  }
};

}  // namespace sparse_ce
