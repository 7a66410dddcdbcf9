// select_ops.h - the ops on tensors, for the CPU and for CUDA alike. `device_t` as for cross_entropy_ops.h, with
// select_forward and select_backward on the arguments of select.h.
#pragma once

#include "cross_entropy_views.h"
#include "select.h"

#include <tuple>

namespace sparse_ce {

template <typename device_t>
class SelectOps {
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

 public:
  static Results select(const Tensor& logits, const Arguments& given, const Outputs& wanted) {
    Held held;
    SelectArgs args{};
    view_call(logits, given, held, args);
    if (args.rows > 0) device_t::check_target(args.target, logits);
    const ScalarType dtype = arithmetic_dtype(logits);
    // An empty tensor for what is not asked for: no two outputs of an op may be one.
    const auto rows_if = [&](bool is_wanted, ScalarType of) { return empty(logits, {is_wanted ? args.rows : 0}, of); };
    const Tensor loss = rows_if(wanted.loss, dtype), lse = rows_if(true, dtype), residual = rows_if(true, dtype);
    const Tensor log_rest = rows_if(wanted.log_rest, dtype), entropy = rows_if(wanted.entropy, dtype);
    const Tensor mean_logit = rows_if(wanted.mean_logit, dtype), argmax = rows_if(wanted.argmax, ScalarType::Long);
    args.padding_value = wanted.padding_value.value_or(-INFINITY);
    Tensor log_probs = rows_if(false, dtype);
    if (wanted.log_probs) {
      log_probs = torch::stable::new_empty(given.indices, given.indices.sizes(), dtype);
      if (args.target.offsets) torch::stable::fill_(log_probs, args.padding_value);  // entries may be in no row
    }
    const auto if_wanted = [](bool is_wanted, const Tensor& t) { return is_wanted ? t.mutable_data_ptr() : nullptr; };
    args.loss = if_wanted(wanted.loss, loss);
    args.lse = lse.mutable_data_ptr();
    args.lse_residual = residual.mutable_data_ptr();
    args.log_probs = if_wanted(wanted.log_probs, log_probs);
    args.log_rest = if_wanted(wanted.log_rest, log_rest);
    args.entropy = if_wanted(wanted.entropy, entropy);
    args.mean_logit = if_wanted(wanted.mean_logit, mean_logit);
    args.argmax = static_cast<int64_t*>(if_wanted(wanted.argmax, argmax));
    if (args.rows > 0) device_t::select_forward(args, logits);
    return {loss, lse, residual, log_probs, log_rest, entropy, mean_logit, argmax};
  }

  static std::tuple<Tensor, Tensor> backward(const Upstreams& grad, const Tensor& logits, const Tensor& lse,
                                             const OptionalTensor& lse_residual, const OptionalTensor& log_rest,
                                             const OptionalTensor& entropy, const Arguments& given, bool scale_grad) {
    Call call(grad, logits, lse, lse_residual, log_rest, entropy, given, scale_grad);
    SelectBackwardArgs& args = call.args;
    Tensor grad_logits = device_t::empty_output(logits, {args.rows, args.vocab}, logits.scalar_type());
    args.grad_logits = grad_logits.mutable_data_ptr();
    args.grad_row_stride = args.vocab;
    if (args.rows > 0) device_t::select_backward(args, logits);
    return {grad_logits, call.grad_scale};
  }

  static Tensor backward_(const Upstreams& grad, const Tensor& logits, const Tensor& lse,
                          const OptionalTensor& lse_residual, const OptionalTensor& log_rest,
                          const OptionalTensor& entropy, const Arguments& given, bool scale_grad) {
    Call call(grad, logits, lse, lse_residual, log_rest, entropy, given, scale_grad);
    SelectBackwardArgs& args = call.args;
    check_overwritable(logits, args);
    args.grad_logits = logits.mutable_data_ptr();
    args.grad_row_stride = args.row_stride;
    if (args.rows > 0) device_t::select_backward(args, logits);
    return call.grad_scale;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("select", boxed<&select>);
    m.impl("select_backward", boxed<&backward>);
    m.impl("select_backward_", boxed<&backward_>);
  }

 private:
  // What both backwards are called with, checked.
  struct Call {
    Call(const Upstreams& grad, const Tensor& logits, const Tensor& lse, const OptionalTensor& lse_residual,
         const OptionalTensor& log_rest, const OptionalTensor& entropy, const Arguments& given, bool scale_grad)
        : grad_scale(empty(logits, {scale_grad ? logits.size(0) : 0}, arithmetic_dtype(logits))) {
      CrossEntropyArgs rows{};
      view_call(logits, given, held, rows);
      static_cast<BackwardArgs&>(args) = view_upstream(rows, logits, grad.loss, grad.lse, lse, lse_residual);
      if (args.rows > 0) device_t::check_target(args.target, logits);
      if (grad.log_probs) {
        const Tensor& of_entries = *grad.log_probs;
        check_same_device(of_entries, logits, "grad_log_probs");
        check(of_entries.scalar_type() == arithmetic_dtype(logits), "grad_log_probs must be of dtype ",
              name(arithmetic_dtype(logits)), ", got ", name(of_entries.scalar_type()));
        check(of_entries.dim() == given.indices.dim() && same_sizes(of_entries.sizes(), given.indices.sizes()),
              "grad_log_probs must have the shape of indices ", shape(given.indices), ", got ", shape(of_entries));
        grad_log_probs = packed(of_entries);
        args.grad_log_probs = grad_log_probs->const_data_ptr();
      }
      view(grad.log_rest, logits, "grad_log_rest", args.grad_log_rest);
      view(grad.entropy, logits, "grad_entropy", args.grad_entropy);
      view(grad.mean_logit, logits, "grad_mean_logit", args.grad_mean_logit);
      args.log_rest = made(log_rest, grad.log_rest, logits, "log_rest");
      args.entropy = made(entropy, grad.entropy, logits, "entropy");
      if (scale_grad) args.grad_scale = grad_scale.mutable_data_ptr();
    }

    static void view(const OptionalTensor& grad, const Tensor& logits, const char* argument, Upstream& out) {
      if (grad) out.grad = view_rows(*grad, logits, argument, out.stride);
    }
    // What forward made, which its gradient needs.
    static const void* made(const OptionalTensor& made, const OptionalTensor& grad, const Tensor& logits,
                            const char* argument) {
      if (!grad) return nullptr;
      check(made.has_value(), argument, " must be what select gave where there is a gradient for it, got None");
      int64_t stride = 1;
      const void* data = view_rows(*made, logits, argument, stride);
      check(logits.size(0) <= 1 || stride == 1, argument, " must be contiguous, got stride ", stride);
      return data;
    }

    Held held;
    OptionalTensor grad_log_probs;
    Tensor grad_scale;
    SelectBackwardArgs args{};
  };
};

}  // namespace sparse_ce
