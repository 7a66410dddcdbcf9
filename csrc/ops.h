// ops.h - the ops on tensors, for the CPU and for CUDA alike: check, allocate, hand over to the device.
//
// `device_t` has forward, forward_with_gradient, backward, backward_values and mean on the plain arguments of
// cross_entropy.h, `empty_output` for large fresh tensors, and `check_target`, called before any work.
#pragma once

#include "check.h"

#include <array>
#include <tuple>

namespace sparse_ce {

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(size.begin(), size.size()), dtype);
}

// The schema's target and options, which every op takes last.
#define SCE_PARAMETERS                                                                                                \
  Tensor indices, OptionalTensor values, OptionalTensor offsets, OptionalTensor weight, OptionalTensor row_mask,      \
      int64_t ignore_index, double label_smoothing, double z_loss, double logit_scale, std::optional<double> softcap, \
      std::optional<int64_t> num_classes
#define SCE_KIND bool logprobs  // last in every schema
#define SCE_TARGET_ARGUMENTS {indices, values, offsets, weight, row_mask, logprobs}
#define SCE_OPTION_ARGUMENTS {ignore_index, label_smoothing, z_loss, logit_scale, softcap, num_classes}

// The two ends of a loss that is a mean: the upstream gradient of every row's loss, known from the target alone, and the
// mean itself once the losses are there.
template <typename device_t>
class Mean {
 public:
  Mean(const TargetView& target, const Tensor& like, const OptionalTensor& normalizer, const Tensor& grad_mean)
      : mean(empty(like, {}, arithmetic_dtype(like))),
        divisor(empty(like, {}, arithmetic_dtype(like))),
        like_(like),
        grad_loss_(empty(like, {}, arithmetic_dtype(like))) {
    args_.dtype = to_dtype(mean, "mean", /*integer=*/false);
    args_.target = target;
    args_.normalizer = normalizer ? view_scalar(*normalizer, like, "normalizer") : nullptr;
    args_.divisor = divisor.mutable_data_ptr();
    MeanArgs count = args_;
    count.grad_mean = view_scalar(grad_mean, like, "grad_mean");
    count.grad_loss = grad_loss_.mutable_data_ptr();
    device_t::mean(count, like);
  }

  const void* grad_loss() const { return grad_loss_.const_data_ptr(); }

  // loss (rows,), contiguous.
  void finish(const Tensor& loss) {
    args_.loss = loss.const_data_ptr();
    args_.loss_stride = 1;
    args_.mean = mean.mutable_data_ptr();
    device_t::mean(args_, like_);
  }

  Tensor mean, divisor;

 private:
  Tensor like_, grad_loss_;
  MeanArgs args_{};
};

template <typename device_t>
struct Ops {
  static std::tuple<Tensor, Tensor> forward(
      Tensor logits, SCE_PARAMETERS, SCE_KIND) {
    const Target target SCE_TARGET_ARGUMENTS;
    const Options options SCE_OPTION_ARGUMENTS;
    auto [loss, lse, residual] = run_forward(logits, target, options, false);
    return {loss, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward_with_residual(
      Tensor logits, SCE_PARAMETERS, SCE_KIND) {
    const Target target SCE_TARGET_ARGUMENTS;
    const Options options SCE_OPTION_ARGUMENTS;
    auto [loss, lse, residual] = run_forward(logits, target, options, true);
    return {loss, lse, *residual};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_with_gradient(
      Tensor grad_mean, OptionalTensor normalizer, Tensor logits, SCE_PARAMETERS, SCE_KIND) {
    const Target target SCE_TARGET_ARGUMENTS;
    const Options options SCE_OPTION_ARGUMENTS;
    Held held;
    ForwardArgs forward{};
    make_args(logits, target, options, held, forward);
    device_t::check_target(forward.target, logits);
    const ScalarType dtype = arithmetic_dtype(logits);
    Mean<device_t> mean(forward.target, logits, normalizer, grad_mean);
    Tensor loss = empty(logits, {forward.rows}, dtype), lse = empty(logits, {forward.rows}, dtype);
    Tensor residual = empty(logits, {forward.rows}, dtype);
    Tensor grad_logits = device_t::empty_output(logits, {forward.rows, forward.vocab}, logits.scalar_type());

    BackwardArgs backward{};
    static_cast<CrossEntropyArgs&>(backward) = forward;
    backward.grad_loss = mean.grad_loss();
    forward.loss = loss.mutable_data_ptr();
    backward.lse = forward.lse = lse.mutable_data_ptr();
    backward.lse_residual = forward.lse_residual = residual.mutable_data_ptr();
    backward.grad_logits = grad_logits.mutable_data_ptr();
    backward.grad_row_stride = backward.vocab;
    if (forward.rows > 0) device_t::forward_with_gradient(forward, backward, logits);
    mean.finish(loss);
    return {mean.mean, mean.divisor, lse, residual, grad_logits};
  }

  static Tensor backward(
      Tensor grad_loss, OptionalTensor grad_lse, Tensor logits, Tensor lse, OptionalTensor lse_residual, SCE_PARAMETERS,
      SCE_KIND) {
    const Target target SCE_TARGET_ARGUMENTS;
    const Options options SCE_OPTION_ARGUMENTS;
    Held held;
    BackwardArgs args = backward_args(grad_loss, grad_lse, logits, lse, lse_residual, target, options, held);
    if (args.rows > 0) device_t::check_target(args.target, logits);
    Tensor grad_logits = device_t::empty_output(logits, {args.rows, args.vocab}, logits.scalar_type());
    if (args.rows == 0) return grad_logits;
    args.grad_logits = grad_logits.mutable_data_ptr();
    args.grad_row_stride = args.vocab;
    device_t::backward(args, logits);
    return grad_logits;
  }

  static void backward_(
      Tensor grad_loss, OptionalTensor grad_lse, Tensor logits, Tensor lse, OptionalTensor lse_residual, SCE_PARAMETERS,
      SCE_KIND) {
    const Target target SCE_TARGET_ARGUMENTS;
    const Options options SCE_OPTION_ARGUMENTS;
    Held held;
    BackwardArgs args = backward_args(grad_loss, grad_lse, logits, lse, lse_residual, target, options, held);
    check(args.rows <= 1 || args.row_stride >= args.vocab,
          "logits must be rows that do not overlap to be overwritten, got row stride ", args.row_stride);
    check(args.logits == logits.const_data_ptr(), "logits must have column stride 1 to be overwritten, got ",
          logits.stride(1));
    if (args.rows == 0) return;
    device_t::check_target(args.target, logits);
    args.grad_logits = logits.mutable_data_ptr();
    args.grad_row_stride = args.row_stride;
    device_t::backward(args, logits);
  }

  static Tensor backward_values(
      Tensor grad_loss, Tensor logits, Tensor lse, OptionalTensor lse_residual, SCE_PARAMETERS, SCE_KIND) {
    const Target target SCE_TARGET_ARGUMENTS;
    const Options options SCE_OPTION_ARGUMENTS;
    Held held;
    BackwardArgs args = backward_args(grad_loss, std::nullopt, logits, lse, lse_residual, target, options, held);
    Tensor grad_values = torch::stable::new_zeros(indices, indices.sizes(), arithmetic_dtype(logits));
    if (args.rows == 0 || args.target.entries == 0) return grad_values;
    device_t::check_target(args.target, logits);
    args.grad_values = grad_values.mutable_data_ptr();
    device_t::backward_values(args, logits);
    return grad_values;
  }

  static std::tuple<Tensor, Tensor> mean(Tensor loss, Tensor indices, OptionalTensor values, OptionalTensor offsets,
                                         OptionalTensor weight, OptionalTensor row_mask, int64_t ignore_index,
                                         int64_t num_classes, OptionalTensor normalizer) {
    const Target target{indices, values, offsets, weight, row_mask, false};
    Held held;
    MeanArgs args = mean_args(loss, target, ignore_index, num_classes, normalizer, held);
    Tensor out = empty(loss, {}, loss.scalar_type()), divisor = empty(loss, {}, loss.scalar_type());
    args.mean = out.mutable_data_ptr();
    args.divisor = divisor.mutable_data_ptr();
    device_t::mean(args, loss);
    return {out, divisor};
  }

 private:
  static std::tuple<Tensor, Tensor, OptionalTensor> run_forward(
      const Tensor& logits, const Target& target, const Options& options, bool with_residual) {
    Held held;
    ForwardArgs args{};
    make_args(logits, target, options, held, args);
    const ScalarType dtype = arithmetic_dtype(logits);
    Tensor loss = empty(logits, {args.rows}, dtype), lse = empty(logits, {args.rows}, dtype);
    OptionalTensor residual;
    if (with_residual) residual = empty(logits, {args.rows}, dtype);
    if (args.rows == 0) return {loss, lse, residual};
    device_t::check_target(args.target, logits);
    args.loss = loss.mutable_data_ptr();
    args.lse = lse.mutable_data_ptr();
    args.lse_residual = residual ? residual->mutable_data_ptr() : nullptr;
    device_t::forward(args, logits);
    return {loss, lse, residual};
  }

  static BackwardArgs backward_args(const Tensor& grad_loss, const OptionalTensor& grad_lse, const Tensor& logits,
                                    const Tensor& lse, const OptionalTensor& lse_residual, const Target& target,
                                    const Options& options, Held& held) {
    CrossEntropyArgs args{};
    make_args(logits, target, options, held, args);
    return view_upstream(args, logits, grad_loss, grad_lse, lse, lse_residual);
  }
};

#define SCE_REGISTER_OPS(m, ops_t)                                        \
  m.impl("forward", TORCH_BOX(&ops_t::forward));                          \
  m.impl("forward_with_residual", TORCH_BOX(&ops_t::forward_with_residual)); \
  m.impl("forward_with_gradient", TORCH_BOX(&ops_t::forward_with_gradient)); \
  m.impl("backward", TORCH_BOX(&ops_t::backward));                        \
  m.impl("backward_", TORCH_BOX(&ops_t::backward_));                      \
  m.impl("backward_values", TORCH_BOX(&ops_t::backward_values));          \
  m.impl("mean", TORCH_BOX(&ops_t::mean))

}  // namespace sparse_ce
