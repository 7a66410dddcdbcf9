// linear/chunk_ops.h - Implements the ops of a linear head whose loss the caller computes, one chunk of rows or block
// of classes at a time.
#pragma once

#include "call.h"

#include <initializer_list>
#include <utility>

namespace sparse_ce {

template <typename device_t>
class LinearChunkOps {
 public:
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

  // Writes the same logits, in the dtype of the plan.
  static void logits_(const HeadArguments& inputs, const Tensor& logits, bool float32_logits) {
    const HeadArguments head = without_history(inputs);
    head.check_tensors();
    TargetView rows{};
    rows.rows = head.input.size(0);
    const int64_t classes = logits.dim() == 2 ? logits.size(1) : 0;
    check(classes > 0 && logits.size(0) == rows.rows && classes <= head.weight.size(0), "logits must be (", rows.rows,
          ", classes), got ", shape(logits));
    check_same_device(logits, head.input, "logits");
    LinearHead<device_t> chunk(head.input, head.weight, head.bias, classes, rows, std::max<int64_t>(1, rows.rows),
                               float32_logits, nullptr);
    const ScalarType dtype = chunk.logits_dtype();
    check(logits.scalar_type() == dtype, "logits must be of dtype ", name(dtype), ", got ", name(logits.scalar_type()));
    check(logits.stride(1) == 1 && logits.stride(0) >= classes, "logits must have packed rows, got shape ",
          shape(logits));
    Overwritten(logits, "logits")
        .check_apart(head.input, "input", head.weight, "linear_weight", head.bias, "linear_bias");
    if (logits.numel() == 0) return;
    chunk.write_logits(logits);
  }

  static Tensor large_empty_like(const Tensor& like) {
    check(like.dim() == 2, "like must be (rows, width), got ", shape(like));
    to_dtype(like, "like", /*integer=*/false);
    return device_t().empty_output(like, {like.size(0), like.size(1)}, like.scalar_type());
  }

  // Plans the chunks of a head whose caller computes the loss. Returns the rows of a chunk, the classes of a block of
  // stored dz or 0, and memory for a chunk of logits and for the part of dz beside the gradient.
  static std::tuple<int64_t, int64_t, Tensor, Tensor> plan(const Tensor& input, const OptionalTensor& grad_weight,
                                                           int64_t rows, int64_t classes,
                                                           std::optional<int64_t> chunk_rows, bool float32_logits) {
    check(input.dim() == 2, "input must be (rows, width), got ", shape(input));
    to_dtype(input, "input", /*integer=*/false);
    check(rows >= 0, "rows must not be negative, got ", rows);
    check(classes >= 0, "classes must not be negative, got ", classes);
    check(!chunk_rows || *chunk_rows > 0, "chunk_rows must be positive, got ", chunk_rows.value_or(0));
    if (grad_weight)
      check(grad_weight->dim() == 2 && grad_weight->size(0) >= classes, "grad_weight must be (at least ", classes,
            ", width), got ", shape(*grad_weight));
    const ScalarType weight = (grad_weight ? *grad_weight : input).scalar_type();
    const LinearPlan<device_t> plan({input.scalar_type(), weight, rows, classes, input.size(1), float32_logits, false},
                                    chunk_rows, 0);
    int64_t stored = 0, beside = 0;
    if (grad_weight && plan.weight_sum(/*may_recompute=*/false) == WeightSum::kStored) {
      stored = plan.stored_classes();
      beside = stored_gradient<device_t>(rows_of(*grad_weight, 0, classes), plan.stored(), rows, stored).beside();
    }
    return {plan.chunk_rows, stored, device_t().empty_output(input, {plan.chunk_rows * classes}, plan.logits),
            empty(input, {beside}, plan.stored())};
  }

  // Accumulates the gradients of one chunk of rows, which the caller passes in separate calls.
  static void add_gradients_(const HeadArguments& inputs, const Tensor& grad_logits, const OptionalTensor& grad_input,
                             const OptionalTensor& input_low, const OptionalTensor& grad_weight,
                             const OptionalTensor& weight_low, const OptionalTensor& grad_bias,
                             const OptionalTensor& bias_low, bool first, bool last, bool first_classes,
                             bool last_classes) {
    const Sums sums{grad_input, input_low, grad_weight, weight_low,    grad_bias,
                    bias_low,   first,     last,        first_classes, last_classes};
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
    const std::pair<const OptionalTensor&, const char*> written[] = {
        {grad_input, "grad_input"}, {input_low, "input_low"}, {grad_weight, "grad_weight"},
        {weight_low, "weight_low"}, {grad_bias, "grad_bias"}, {bias_low, "bias_low"}};
    check_sum(grad_input, head.input, head.input.scalar_type(), {rows.rows, width}, "grad_input");
    check_sum(input_low, head.input, ScalarType::Byte, {rows.rows, width}, "input_low");
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
      if (grad_input && sums.all_classes()) clear_rows(*grad_input, 0, rows.rows);
      return;
    }
    LinearHead<device_t> chunk(head.input, head.weight, std::nullopt, classes, rows, rows.rows, false, nullptr);
    chunk.add_gradients_of_chunk(grad_logits, sums);
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
    TargetView rows{};
    rows.rows = input.size(0);
    stored_in(grad_weight, beside, rows.rows, classes, stored_classes);
    check_same_device(input, grad_weight, "input");
    to_dtype(input, "input", /*integer=*/false);
    check(input.size(1) == grad_weight.size(1), "input must be (rows, ", grad_weight.size(1), "), got ", shape(input));
    check(logits.dim() == 1 && logits.size(0) >= classes, "logits must be the memory of a chunk, got ", shape(logits));
    Overwritten(grad_weight, "grad_weight").check_apart(input, "input", beside, "beside", logits, "logits");
    Overwritten(logits, "logits").check_apart(input, "input", beside, "beside");
    const LinearPlan<device_t> plan({input.scalar_type(), grad_weight.scalar_type(), rows.rows, classes, input.size(1),
                                     logits.scalar_type() != input.scalar_type(), false},
                                    logits.size(0) / classes, 0);
    check(logits.scalar_type() == plan.logits, "logits must be of dtype ", name(plan.logits), ", got ",
          name(logits.scalar_type()));
    check_same_device(logits, input, "logits");
    check(plan.stored_classes() == stored_classes, "stored_classes must be ", plan.stored_classes(), ", got ",
          stored_classes);
    LinearOperands<device_t> operands(input, grad_weight, classes, rows, plan, nullptr);
    operands.reserve(0, plan.chunk_rows);
    if (logits.scalar_type() == plan.work && logits.size(0) >= rows.rows * stored_classes) operands.borrow(logits);
    WeightGradient<device_t>(operands, rows_of(grad_weight, 0, classes), WeightSum::kStored, plan, std::nullopt, beside)
        .multiply_stored();
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
  }

 private:
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
