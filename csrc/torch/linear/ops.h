// linear/ops.h - Implements the ops of a linear head, whose loss the caller computes: its logits and gradients, for one
// chunk of rows or block of classes at a time.
#pragma once

#include "../arguments.h"
#include "../views.h"
#include "gradients.h"

#include <exception>
#include <initializer_list>
#include <utility>

namespace sparse_ce {

// Computes the logits of all rows of an input and of the first `classes`: z = x W^T + bias.
template <typename device_t>
class LinearLogits {
 public:
  LinearLogits(HeadArguments head, int64_t classes, bool float32_logits)
      : plan_({head.input.scalar_type(), head.weight.scalar_type(), head.input.size(0), classes, head.input.size(1),
               float32_logits},
              std::max<int64_t>(1, head.input.size(0)), 0),
        operands_(head.input, head.weight, classes, plan_) {
    if (head.bias) bias_ = torch::stable::to(rows_of(*head.bias, 0, classes), plan_.logits);
  }

  ScalarType dtype() const { return plan_.logits; }

  // Writes the logits into z, whose rows are packed.
  void write(const Tensor& z) {
    const Tensor x = operands_.input_of(0, operands_.rows);
    for_each_block(0, operands_.classes, operands_.weight_block(), [&](int64_t v, int64_t end) {
      const Tensor w = transposed(operands_.weight_of(v, end)), part = columns_of(z, v, end);
      if (bias_ && dtype() == operands_.work) return device_t().add_product(part, rows_of(*bias_, v, end), x, w);
      operands_.products.multiply(part, x, w);
      if (!bias_) return;  // else the logits are wider than the operands of a GEMM
      device_t().add_product(part, part, transposed(operands_.ones(operands_.rows, dtype())),
                             torch::stable::unsqueeze(rows_of(*bias_, v, end), 0));
    });
  }

 private:
  LinearPlan<device_t> plan_;
  LinearOperands<device_t> operands_;
  OptionalTensor bias_;
};

template <typename device_t>
class LinearOps {
 public:
  static Tensor logits(const HeadArguments& inputs, std::optional<int64_t> num_classes, bool float32_logits) {
    const HeadArguments head = checked(inputs);
    const int64_t vocab = head.weight.size(0), classes = num_classes.value_or(vocab);
    check(classes > 0 && classes <= vocab, "num_classes must be in [1, ", vocab, "] (the rows of linear_weight), got ",
          classes);
    LinearLogits<device_t> of_head(head, classes, float32_logits);
    const Tensor z = device_t().empty_output(head.input, {head.input.size(0), classes}, of_head.dtype());
    of_head.write(z);
    const ScalarType dtype = device_t().logits_dtype(head.input.scalar_type());
    return size_in_bytes(z.scalar_type()) >= size_in_bytes(dtype) ? z : torch::stable::to(z, dtype);
  }

  // Writes the same logits, in the dtype of the plan.
  static void logits_(const HeadArguments& inputs, const Tensor& logits, bool float32_logits) {
    const HeadArguments head = checked(inputs);
    const int64_t rows = head.input.size(0), classes = logits.dim() == 2 ? logits.size(1) : 0;
    check(classes > 0 && logits.size(0) == rows && classes <= head.weight.size(0), "logits must be (", rows,
          ", classes), got ", shape(logits));
    check_same_device(logits, head.input, "logits");
    LinearLogits<device_t> of_head(head, classes, float32_logits);
    check(logits.scalar_type() == of_head.dtype(), "logits must be of dtype ", name(of_head.dtype()), ", got ",
          name(logits.scalar_type()));
    check(logits.stride(1) == 1 && logits.stride(0) >= classes, "logits must have packed rows, got shape ",
          shape(logits));
    Overwritten(logits, "logits")
        .check_apart(head.input, "input", head.weight, "linear_weight", head.bias, "linear_bias");
    if (logits.numel() > 0) of_head.write(logits);
  }

  static Tensor large_empty_like(const Tensor& like) {
    check(like.dim() == 2, "like must be (rows, width), got ", shape(like));
    to_dtype(like, "like", /*integer=*/false);
    return device_t().empty_output(like, {like.size(0), like.size(1)}, like.scalar_type());
  }

  // Plans the chunks of a head. Returns the rows of a chunk, the classes of a block of stored dz or 0, the classes of a
  // chunk of classes or 0, whether the caller converts the weight, and memory for a chunk of logits and for the part of
  // dz beside the gradient.
  static std::tuple<int64_t, int64_t, int64_t, bool, Tensor, Tensor> plan(
      const Tensor& input, const OptionalTensor& grad_weight, int64_t rows, int64_t classes,
      std::optional<int64_t> chunk_rows, bool float32_logits, std::optional<bool> recomputes, bool ample,
      bool copies_rows) {
    check(input.dim() == 2, "input must be (rows, width), got ", shape(input));
    to_dtype(input, "input", /*integer=*/false);
    check(rows >= 0, "rows must not be negative, got ", rows);
    check(classes >= 0, "classes must not be negative, got ", classes);
    check(!chunk_rows || *chunk_rows > 0, "chunk_rows must be positive, got ", chunk_rows.value_or(0));
    if (grad_weight)
      check(grad_weight->dim() == 2 && grad_weight->size(0) >= classes, "grad_weight must be (at least ", classes,
            ", width), got ", shape(*grad_weight));
    const ScalarType weight = (grad_weight ? *grad_weight : input).scalar_type();
    const HeadShape head{input.scalar_type(), weight, rows, classes, input.size(1), float32_logits, copies_rows};
    const auto planned = [&](int64_t ample_bytes) {
      const LinearPlan<device_t> plan(head, chunk_rows, ample_bytes);
      const WeightSum way = grad_weight ? plan.weight_sum(recomputes) : WeightSum::kRows;
      const int64_t in_chunk = way == WeightSum::kClasses ? plan.chunk_classes() : 0;
      const int64_t stored = way == WeightSum::kStored ? plan.stored_classes() : 0;
      const int64_t beside =
          stored == 0
              ? 0
              : stored_gradient<device_t>(rows_of(*grad_weight, 0, classes), plan.stored(), rows, stored).beside();
      const int64_t size = std::max(plan.chunk_rows * classes, rows * in_chunk);
      constexpr bool kConverts = !device_t::Plan::kConvertsBlocks;
      return std::tuple(plan.chunk_rows, stored, in_chunk, kConverts,
                        device_t().empty_output(input, {size}, plan.logits), empty(input, {beside}, plan.stored()));
    };
    const int64_t ample_bytes = ample && !chunk_rows ? device_t().ample_bytes(input) : 0;
    if (ample_bytes == 0) return planned(0);
    std::exception_ptr error;
    try {
      return planned(ample_bytes);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    // If smaller chunks fit, memory was short, and all later calls on this device forgo larger ones: each failure makes
    // PyTorch's allocator release its cached memory.
    try {
      auto plan = planned(0);
      device_t().forgo_ample_chunks(input);
      return plan;
    } catch (const std::exception&) {
      std::rethrow_exception(error);
    }
  }

  // Accumulates the gradients of one chunk of rows, which the caller passes in separate calls.
  static void add_gradients_(const HeadArguments& inputs, const Tensor& grad_logits, const OptionalTensor& grad_input,
                             const OptionalTensor& input_low, const OptionalTensor& grad_weight,
                             const OptionalTensor& weight_low, const OptionalTensor& grad_bias,
                             const OptionalTensor& bias_low, bool first, bool last, bool first_classes,
                             bool last_classes) {
    const Sums sums{grad_input, input_low, grad_weight, weight_low,    grad_bias,
                    bias_low,   first,     last,        first_classes, last_classes};
    const HeadArguments head = checked(inputs);
    const int64_t rows = head.input.size(0);
    check(grad_logits.dim() == 2 && grad_logits.size(0) == rows && grad_logits.size(1) <= head.weight.size(0),
          "grad_logits must be (", rows, ", classes), got ", shape(grad_logits));
    check_same_device(grad_logits, head.input, "grad_logits");
    to_dtype(grad_logits, "grad_logits", /*integer=*/false);
    const int64_t classes = grad_logits.size(1), width = head.input.size(1);
    check(!grad_bias || head.bias, "grad_bias must be None without linear_bias, got a tensor");
    const std::pair<const OptionalTensor&, const char*> written[] = {
        {grad_input, "grad_input"}, {input_low, "input_low"}, {grad_weight, "grad_weight"},
        {weight_low, "weight_low"}, {grad_bias, "grad_bias"}, {bias_low, "bias_low"}};
    check_sum(grad_input, head.input, head.input.scalar_type(), {rows, width}, "grad_input");
    check_sum(input_low, head.input, ScalarType::Byte, {rows, width}, "input_low");
    check_sum(grad_weight, head.input, head.weight.scalar_type(), {head.weight.size(0), width}, "grad_weight");
    if (head.bias) check_sum(grad_bias, head.input, head.bias->scalar_type(), {head.weight.size(0)}, "grad_bias");
    check_sum(weight_low, head.input, ScalarType::Byte, {classes, width}, "weight_low");
    check_sum(bias_low, head.input, ScalarType::Byte, {1, classes}, "bias_low");
    const auto check_low = [](const OptionalTensor& low, const OptionalTensor& gradient, bool whole, const char* name) {
      check(low || whole || !gradient || size_in_bytes(gradient->scalar_type()) > 2, name,
            " must be a tensor to sum a 16-bit gradient over chunks, got None");
    };
    check_low(input_low, grad_input, sums.all_classes(), "input_low");
    check_low(weight_low, grad_weight, first && last, "weight_low");
    check_low(bias_low, grad_bias, first && last, "bias_low");
    for (const auto& [gradient, argument] : written) {
      if (!gradient) continue;
      const Overwritten overwritten(*gradient, argument);
      overwritten.check_apart(head.input, "input", head.weight, "linear_weight", grad_logits, "grad_logits");
      for (const auto& [other, name_of_other] : written)
        if (&other != &gradient) overwritten.check_apart(other, name_of_other);
    }
    if (classes == 0) {  // no GEMM writes the gradient
      Tensor none = grad_input.value_or(head.input);
      if (grad_input && sums.all_classes()) torch::stable::zero_(none);
      return;
    }
    const LinearPlan<device_t> plan({head.input.scalar_type(), head.weight.scalar_type(), rows, classes, width, false},
                                    std::max<int64_t>(1, rows), 0);
    LinearOperands<device_t> operands(head.input, head.weight, classes, plan);
    LinearGradients<device_t>(operands).add(grad_logits, sums);
  }

  // Stores the gradient of the logits of the rows from `row` on in the memory of the weight gradient.
  static void store_(const Tensor& grad_logits, const Tensor& grad_weight, const Tensor& beside, int64_t row,
                     int64_t rows, int64_t stored_classes) {
    check(grad_logits.dim() == 2 && row >= 0 && row + grad_logits.size(0) <= rows, "grad_logits must be (at most ",
          rows - row, ", classes), got ", shape(grad_logits));
    to_dtype(grad_logits, "grad_logits", /*integer=*/false);
    BorrowedMemory stored = stored_in(grad_weight, beside, rows, grad_logits.size(1), stored_classes);
    check_same_device(grad_logits, grad_weight, "grad_logits");
    Overwritten(grad_weight, "grad_weight").check_apart(grad_logits, "grad_logits", beside, "beside");
    Overwritten(beside, "beside").check_apart(grad_logits, "grad_logits");
    stored.keep(row, grad_logits, device_t());
  }

  // Computes the weight gradient from the stored gradient of all logits, whose first classes are `classes`. `logits` is
  // memory for a chunk of logits.
  static void multiply_stored_(const Tensor& input, const Tensor& logits, const Tensor& grad_weight,
                               const Tensor& beside, int64_t classes, int64_t stored_classes) {
    check(input.dim() == 2, "input must be (rows, width), got ", shape(input));
    check(classes > 0, "classes must be positive, got ", classes);
    const int64_t rows = input.size(0);
    const BorrowedMemory stored = stored_in(grad_weight, beside, rows, classes, stored_classes);
    check_same_device(input, grad_weight, "input");
    to_dtype(input, "input", /*integer=*/false);
    check(input.size(1) == grad_weight.size(1), "input must be (rows, ", grad_weight.size(1), "), got ", shape(input));
    check(logits.dim() == 1 && logits.size(0) >= classes, "logits must be the memory of a chunk, got ", shape(logits));
    Overwritten(grad_weight, "grad_weight").check_apart(input, "input", beside, "beside", logits, "logits");
    Overwritten(logits, "logits").check_apart(input, "input", beside, "beside");
    const LinearPlan<device_t> plan({input.scalar_type(), grad_weight.scalar_type(), rows, classes, input.size(1),
                                     logits.scalar_type() != input.scalar_type()},
                                    logits.size(0) / classes, 0);
    check(logits.scalar_type() == plan.logits, "logits must be of dtype ", name(plan.logits), ", got ",
          name(logits.scalar_type()));
    check_same_device(logits, input, "logits");
    check(plan.stored_classes() == stored_classes, "stored_classes must be ", plan.stored_classes(), ", got ",
          stored_classes);
    LinearOperands<device_t> operands(input, grad_weight, classes, plan);
    OptionalTensor memory;
    if (logits.scalar_type() == plan.work && logits.size(0) >= rows * stored_classes) memory = logits;
    LinearGradients<device_t>(operands).multiply_stored(stored, rows_of(grad_weight, 0, classes), memory,
                                                        plan.chunk_rows);
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
    m.impl("linear_logits", boxed<&logits>);
    m.impl("linear_logits_", boxed<&logits_>);
    m.impl("linear_plan", boxed<&plan>);
    m.impl("large_empty_like", boxed<&large_empty_like>);
    m.impl("linear_store_", boxed<&store_>);
    m.impl("linear_multiply_stored_", boxed<&multiply_stored_>);
    m.impl("linear_add_gradients_", boxed<&add_gradients_>);
    m.impl("scale_", boxed<&scale_>);
  }

 private:
  static HeadArguments checked(HeadArguments head) {
    head.input = detached(head.input), head.weight = detached(head.weight);
    if (head.bias) head.bias = detached(*head.bias);
    head.check_tensors();
    return head;
  }

  // Returns the memory of stored dz.
  static BorrowedMemory stored_in(const Tensor& grad_weight, const Tensor& beside, int64_t rows, int64_t classes,
                                  int64_t stored_classes) {
    check(grad_weight.dim() == 2 && grad_weight.is_contiguous() && grad_weight.size(0) >= classes,
          "grad_weight must be contiguous (at least ", classes, ", width), got ", shape(grad_weight));
    const ScalarType dtype = beside.scalar_type();
    to_dtype(grad_weight, "grad_weight", /*integer=*/false);
    to_dtype(beside, "beside", /*integer=*/false);
    check(size_in_bytes(dtype) <= grad_weight.element_size(), "beside must be of dtype ",
          name(grad_weight.scalar_type()), ", got ", name(dtype));
    check(stored_classes > 0, "stored_classes must be positive, got ", stored_classes);
    check_same_device(beside, grad_weight, "beside");
    const BorrowedMemory stored =
        stored_gradient<device_t>(rows_of(grad_weight, 0, classes), dtype, rows, stored_classes, beside);
    check(beside.dim() == 1 && beside.size(0) == stored.beside(), "beside must be (", stored.beside(), ",), got ",
          shape(beside));
    return stored;
  }

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
};

}  // namespace sparse_ce
