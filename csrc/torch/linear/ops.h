// linear/ops.h - Implements the ops of the linear head on tensors, for CPU and CUDA.
#pragma once

#include "../cross_entropy_ops.h"
#include "call.h"

#include <initializer_list>
#include <utility>

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

  static Tensor logits(const HeadArguments& inputs, std::optional<int64_t> num_classes, bool float32_logits) {
    const HeadArguments head = without_history(inputs);
    head.check_tensors();
    const int64_t vocab = head.weight.size(0), classes = num_classes.value_or(vocab);
    check(classes > 0 && classes <= vocab, "num_classes must be in [1, ", vocab, "] (the rows of linear_weight), got ",
          classes);
    TargetView rows{};
    rows.rows = head.input.size(0);
    LinearHead<device_t> chunks(head.input, head.weight, head.bias, classes, rows, std::max<int64_t>(1, rows.rows),
                                float32_logits, nullptr);
    const Tensor z = chunks.logits(0, rows.rows);
    const ScalarType dtype = device_t().logits_dtype(head.input.scalar_type());
    return size_in_bytes(z.scalar_type()) >= size_in_bytes(dtype) ? z : torch::stable::to(z, dtype);
  }

  // Accumulates the gradients of one chunk of rows, which the caller passes in separate calls.
  static void add_gradients_(const HeadArguments& inputs, const Tensor& grad_logits, const OptionalTensor& grad_input,
                             const OptionalTensor& grad_weight, const OptionalTensor& weight_low,
                             const OptionalTensor& grad_bias, const OptionalTensor& bias_low, bool first, bool last) {
    const HeadArguments head = without_history(inputs);
    head.check_tensors();
    TargetView rows{};
    rows.rows = head.input.size(0);
    check(grad_logits.dim() == 2 && grad_logits.size(0) == rows.rows && grad_logits.size(1) <= head.weight.size(0),
          "grad_logits must be (", rows.rows, ", classes), got ", shape(grad_logits));
    check_same_device(grad_logits, head.input, "grad_logits");
    to_dtype(grad_logits, "grad_logits", /*integer=*/false);
    const int64_t classes = grad_logits.size(1), width = head.input.size(1);
    check(!grad_bias || head.bias, "grad_bias must be None without linear_bias, got a tensor");
    const std::pair<const OptionalTensor&, const char*> written[] = {{grad_input, "grad_input"},
                                                                     {grad_weight, "grad_weight"},
                                                                     {weight_low, "weight_low"},
                                                                     {grad_bias, "grad_bias"},
                                                                     {bias_low, "bias_low"}};
    check_sum(grad_input, head.input, head.input.scalar_type(), {rows.rows, width}, "grad_input");
    check_sum(grad_weight, head.input, head.weight.scalar_type(), {head.weight.size(0), width}, "grad_weight");
    if (head.bias) check_sum(grad_bias, head.input, head.bias->scalar_type(), {head.weight.size(0)}, "grad_bias");
    check_sum(weight_low, head.input, ScalarType::Byte, {classes, width}, "weight_low");
    check_sum(bias_low, head.input, ScalarType::Byte, {1, classes}, "bias_low");
    const auto needs_low = [&](const OptionalTensor& gradient) {
      return gradient && size_in_bytes(gradient->scalar_type()) == 2 && !(first && last);
    };
    check(weight_low || !needs_low(grad_weight),
          "weight_low must be a tensor to sum a 16-bit gradient over chunks, got None");
    check(bias_low || !needs_low(grad_bias),
          "bias_low must be a tensor to sum a 16-bit gradient over chunks, got None");
    for (const auto& [gradient, argument] : written) {
      if (!gradient) continue;
      const Overwritten overwritten(*gradient, argument);
      overwritten.check_apart(head.input, "input", head.weight, "linear_weight", grad_logits, "grad_logits");
      for (const auto& [other, name_of_other] : written)
        if (&other != &gradient) overwritten.check_apart(other, name_of_other);
    }
    if (classes == 0) {  // no GEMM writes the gradient
      if (grad_input) clear_rows(*grad_input, 0, rows.rows);
      return;
    }
    LinearHead<device_t> chunk(head.input, head.weight, std::nullopt, classes, rows, rows.rows, false, nullptr);
    chunk.continue_gradients(grad_input, grad_weight, weight_low, grad_bias, bias_low);
    chunk.add_gradients_of_chunk(grad_logits, first, last);
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
    m.impl("linear_logits", boxed<&logits>);
    m.impl("linear_add_gradients_", boxed<&add_gradients_>);
    m.impl("scale_", boxed<&scale_>);
  }

 private:
  // Checks a gradient, or the low bits of its sum, to which chunks are added.
  static void check_sum(const OptionalTensor& sum, const Tensor& like, ScalarType dtype,
                        std::initializer_list<int64_t> sizes, const char* argument) {
    if (!sum) return;
    check_same_device(*sum, like, argument);
    check(sum->scalar_type() == dtype, argument, " must be of dtype ", name(dtype), ", got ", name(sum->scalar_type()));
    check(sum->is_contiguous(), argument, " must be contiguous, got a tensor of shape ", shape(*sum), " that is not");
    check(same_sizes(sum->sizes(), Sizes(sizes.begin(), sizes.size())), argument, " must be (", *sizes.begin(),
          sizes.size() > 1 ? ", " : ",", sizes.size() > 1 ? std::to_string(sizes.begin()[1]) : "", "), got ",
          shape(*sum));
  }

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
