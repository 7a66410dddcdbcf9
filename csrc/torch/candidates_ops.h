// candidates_ops.h - Implements the candidate ops on tensors, for CPU and CUDA.
#pragma once

#include "device.h"
#include "views.h"

#include <array>

namespace sparse_ce {

template <typename device_t>
class CandidateOps {
 public:
  static Tensor candidate_logits(const HeadArguments& head, const CandidateArguments& inputs) {
    const Call call(head, inputs);
    CandidateForwardArgs args{};
    static_cast<CandidateArgs&>(args) = call.args;
    Tensor logits = torch::stable::new_empty(inputs.indices, inputs.indices.sizes(), arithmetic_dtype(head.input));
    if (call.args.target.entries == 0) return logits;
    // An entry may belong to no row.
    if (inputs.offsets) torch::stable::fill_(logits, -std::numeric_limits<double>::infinity());
    args.logits = logits.mutable_data_ptr();
    device_t().candidate_logits(args, head.input);
    return logits;
  }

  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const OptionalTensor& output,
                                                     const HeadArguments& head, const CandidateArguments& inputs,
                                                     const HeadNeedsGrad& needs_grad) {
    const Backward backward(grad, output, head, inputs, needs_grad);
    OptionalTensor grad_weight;
    if (needs_grad.weight) {
      grad_weight =
          device_t().empty_output(head.weight, {head.weight.size(0), head.weight.size(1)}, head.weight.scalar_type());
      torch::stable::zero_(*grad_weight);
    }
    const OptionalTensor grad_bias = backward.sum(grad_weight, std::nullopt);
    return {backward.or_empty(backward.grad_input), backward.or_empty(grad_weight), backward.or_empty(grad_bias)};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward_sparse(const Tensor& grad, const OptionalTensor& output,
                                                                    const HeadArguments& head,
                                                                    const CandidateArguments& inputs,
                                                                    const HeadNeedsGrad& needs_grad) {
    check(needs_grad.weight, "weight_grad must be True for a sparse gradient, got False");
    device_t().check_may_wait(head.input);
    const Backward backward(grad, output, head, inputs, needs_grad);
    const auto [distinct, slots] = backward.distinct();
    const int64_t count = distinct.size(0) - 1;  // the last element is no id
    const OptionalTensor grad_weight =
        device_t().empty_output(head.weight, {count, head.weight.size(1)}, head.weight.scalar_type());
    const OptionalTensor grad_bias = backward.sum(grad_weight, slots);
    return {backward.or_empty(backward.grad_input), torch::stable::clone(rows_of(distinct, 0, count)), *grad_weight,
            backward.or_empty(grad_bias)};
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("candidate_logits", boxed<&candidate_logits>);
    m.impl("candidate_logits_backward", boxed<&backward>);
    m.impl("candidate_logits_backward_sparse", boxed<&backward_sparse>);
  }

 private:
  static Tensor with_unit_columns(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1 ? t : packed(t); }

  // Checks and stores the arguments of every op.
  struct Call {
    Call(const HeadArguments& head, const CandidateArguments& inputs) {
      head.check_tensors();
      owned.logits = with_unit_columns(head.input);
      weight = with_unit_columns(head.weight);
      args.input = owned.logits.const_data_ptr();
      args.weight = weight.const_data_ptr();
      args.input_dtype = to_dtype(owned.logits, "input", /*integer=*/false);
      args.weight_dtype = to_dtype(weight, "linear_weight", /*integer=*/false);
      args.width = weight.size(1);
      args.input_stride = owned.logits.stride(0);
      args.weight_stride = weight.stride(0);
      if (head.bias) {
        owned.weight = packed(*head.bias);
        args.bias = owned.weight->const_data_ptr();
        args.bias_dtype = to_dtype(*owned.weight, "linear_bias", /*integer=*/false);
      }
      args.options = inputs.options();
      args.target = view_rows_and_entries(inputs, weight.size(0), owned);
      args.target.logprobs = inputs.values && inputs.logprobs;
      if (args.target.rows > 0) device_t().check_target(args.target, owned.logits);
    }
    Owned owned;  // `logits` holds the input, `weight` the bias
    Tensor weight;
    CandidateArgs args{};
  };

  // Computes the gradient for the input, and the entries with a gradient sorted by id.
  struct Backward {
    Backward(const Tensor& grad, const OptionalTensor& forward_output, const HeadArguments& head_arguments,
             const CandidateArguments& inputs, const HeadNeedsGrad& needs)
        : call(head_arguments, inputs), head(head_arguments), needs_grad(needs) {
      needs_grad.bias = needs_grad.bias && head.bias;
      CandidateBackwardArgs args{};
      static_cast<CandidateArgs&>(args) = call.args;
      const Tensor packed_grad = of_entries(grad, inputs, "grad");
      args.grad = packed_grad.const_data_ptr();
      OptionalTensor output;
      if (inputs.softcap) {
        check(forward_output.has_value(), "output must be the result of candidate_logits if softcap is set, got None");
        output = of_entries(*forward_output, inputs, "output");
        args.logits = output->const_data_ptr();
      }
      const Tensor& input = call.owned.logits;
      const int64_t entries = call.args.target.entries;
      if (needs_grad.input) {
        grad_input = device_t().empty_output(input, {input.size(0), input.size(1)}, input.scalar_type());
        args.grad_input = grad_input->mutable_data_ptr();
      }
      if (needs_grad.weight || needs_grad.bias) {
        grad_logits = empty(packed_grad, {entries}, packed_grad.scalar_type());
        rows = empty(input, {entries}, ScalarType::Long);
        ids = empty(input, {entries + 1}, ScalarType::Long);
        torch::stable::fill_(*ids, static_cast<double>(head.weight.size(0)));
        args.grad_logits = grad_logits->mutable_data_ptr();
        args.rows = static_cast<int64_t*>(rows->mutable_data_ptr());
        args.ids = static_cast<int64_t*>(ids->mutable_data_ptr());
      }
      if (args.target.rows > 0 && (args.grad_input || args.ids)) device_t().candidate_logits_backward(args, input);
      if (ids) std::tie(ids, order) = sorted(*ids);
    }

    // Returns the distinct ids followed by `vocab`, and the index of each entry's id among them.
    std::tuple<Tensor, Tensor> distinct() const {
      std::array<StableIValue, 4> stack{torch::stable::detail::from(*ids), torch::stable::detail::from(true),
                                        torch::stable::detail::from(false),
                                        torch::stable::detail::from(std::optional<int64_t>())};
      STABLE_TORCH_ERROR_CODE_CHECK(
          torch_call_dispatcher("aten::unique_consecutive", "", stack.data(), TORCH_ABI_VERSION));
      (void)torch::stable::detail::to<Tensor>(stack[2]);  // owns the handle that was returned
      return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
    }

    // Accumulates the rows of grad_weight that have entries; others stay unchanged. Returns the gradient of the bias.
    OptionalTensor sum(const OptionalTensor& grad_weight, const OptionalTensor& slots) const {
      OptionalTensor grad_bias;
      CandidateWeightArgs args{};
      if (needs_grad.bias) {
        grad_bias = torch::stable::new_zeros(*head.bias, head.bias->sizes());
        args.grad_bias = grad_bias->mutable_data_ptr();
        args.bias_dtype = call.args.bias_dtype;
      }
      if (!ids || call.args.target.entries == 0) return grad_bias;
      args.input = call.args.input;
      args.input_dtype = call.args.input_dtype;
      args.weight_dtype = call.args.weight_dtype;
      args.width = call.args.width;
      args.input_stride = call.args.input_stride;
      args.entries = call.args.target.entries;
      args.vocab = head.weight.size(0);
      args.ids = static_cast<const int64_t*>(ids->const_data_ptr());
      args.order = static_cast<const int64_t*>(order->const_data_ptr());
      args.slots = slots ? static_cast<const int64_t*>(slots->const_data_ptr()) : nullptr;
      args.rows = static_cast<const int64_t*>(rows->const_data_ptr());
      args.grad_logits = grad_logits->const_data_ptr();
      args.grad_weight = grad_weight ? grad_weight->mutable_data_ptr() : nullptr;
      device_t().candidate_weight_gradient(args, call.owned.logits);
      return grad_bias;
    }

    // Returns a new empty tensor if there is no gradient: two outputs of an op must not be the same tensor.
    Tensor or_empty(const OptionalTensor& gradient) const {
      return gradient ? *gradient : empty(head.input, {0}, head.input.scalar_type());
    }

    Call call;
    const HeadArguments& head;
    HeadNeedsGrad needs_grad;
    OptionalTensor grad_input, grad_logits, ids, order, rows;

   private:
    Tensor of_entries(const Tensor& t, const CandidateArguments& inputs, const char* argument) const {
      check_same_device(t, head.input, argument);
      check(same_sizes(t.sizes(), inputs.indices.sizes()), argument, " must have the shape of indices, ",
            shape(inputs.indices), ", got ", shape(t));
      check(t.scalar_type() == arithmetic_dtype(head.input), argument, " must be of dtype ",
            name(arithmetic_dtype(head.input)), ", got ", name(t.scalar_type()));
      return packed(t);
    }

    // Returns the ids in ascending order (stable), and the original position of each.
    static std::tuple<Tensor, Tensor> sorted(const Tensor& ids) {
      std::array<StableIValue, 4> stack{torch::stable::detail::from(ids),
                                        torch::stable::detail::from(std::optional<bool>(true)),
                                        torch::stable::detail::from(int64_t(-1)), torch::stable::detail::from(false)};
      STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
      return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
    }
  };
};

}  // namespace sparse_ce
