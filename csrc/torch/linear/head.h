// linear/head.h - Computes the linear head in chunks of rows or classes. It contains no device code.
//   z = x W^T + bias      dx = dz W      dW = dz^T x      dbias = sum over the rows of dz      (x: the input)
#pragma once

#include "../arguments.h"
#include "input_gradient.h"
#include "weight_gradient.h"

namespace sparse_ce {

// Holds a chunk of the logits z: of the rows from `row` on and all classes, or of all rows and the classes from
// `first_class` on. The loss overwrites z with its gradient dz.
struct LinearChunk {
  int64_t row, first_class;
  Tensor z;
};

template <typename device_t>
class LinearHead {
 public:
  // input (rows, width), weight (vocab, width), bias (vocab,). Only the first `classes` of the vocabulary are used, and
  // only the input rows in `active`, or all. Below, "rows" means these rows, which are the rows of `target`. The
  // logits of a chunk may take `ample_bytes` unless `chunk_rows` is given. Logits have the work dtype, or float32 if
  // they must not be rounded to 16 bits.
  LinearHead(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t classes,
             const TargetView& target, std::optional<int64_t> chunk_rows, bool float32_logits, const ActiveRows* active,
             int64_t ample_bytes = 0)
      : plan_({input.scalar_type(), weight.scalar_type(), target.rows, classes, input.size(1), float32_logits,
               active != nullptr},
              chunk_rows, ample_bytes),
        operands_(input, weight, classes, target, plan_, active) {
    operands_.reserve(plan_.chunk_rows * classes, plan_.chunk_rows);
    if (bias) bias_ = torch::stable::to(rows_of(*bias, 0, classes), plan_.logits);
  }
  LinearHead(const LinearHead&) = delete;  // the gradients refer to the operands

  int64_t rows() const { return operands_.rows; }
  ScalarType logits_dtype() const { return plan_.logits; }

  // Returns true if forward must also compute the logits twice, because `chunk_rows` requests less memory than a sum of
  // dW takes. Backward uses the same condition, so that its gradients are bitwise equal to those computed in forward.
  bool saves_memory() const { return plan_.low_exceeds_chunk; }
  // Returns true if for_each_chunk iterates over classes.
  bool by_classes() const { return way_ == WeightSum::kClasses; }

  // Allocates the gradients, with the shapes and dtypes of input, weight and bias. `may_recompute` means that
  // for_each_chunk may compute the logits by classes.
  void begin_gradients(const NeedsGrad& needs_grad, const Tensor& weight, const OptionalTensor& bias,
                       bool may_recompute) {
    const int64_t vocab = weight.size(0), written = rows() > 0 ? operands_.classes : 0;
    if (needs_grad.input) {
      grad_input = device_t().empty_output(operands_.input, {operands_.input.size(0), operands_.width},
                                           operands_.input.scalar_type());
      operands_.active_rows.clear_others(*grad_input);
    }
    if (needs_grad.weight) {
      grad_weight = device_t().empty_output(operands_.input, {vocab, operands_.width}, weight.scalar_type());
      clear_rows(*grad_weight, written, vocab);
      way_ = plan_.weight_sum(may_recompute);
    }
    if (needs_grad.bias && bias) {
      grad_bias = empty(operands_.input, {vocab}, bias->scalar_type());
      clear_rows(*grad_bias, written, vocab);
    }
    prepare();
  }

  // Writes the logits (rows, classes) of all rows into z, whose rows are packed.
  void write_logits(const Tensor& z) {
    x_ = operands_.input_of(0, rows());
    write_logits_of_classes(z, 0, operands_.classes);
  }

  // Returns the logits (n, classes) of the rows [begin, end). All chunks use the same memory.
  Tensor logits(int64_t begin, int64_t end) {
    x_ = operands_.input_of(begin, end);
    return logits_of_classes(0, operands_.classes);
  }

  // Calls f(chunk) for the rows in order.
  template <typename function_t>
  void for_rows(const function_t& f) {
    for_each_block(0, rows(), plan_.chunk_rows,
                   [&](int64_t begin, int64_t end) { f(LinearChunk{begin, 0, logits(begin, end)}); });
  }

  // Calls f(chunk) for the chunks over which the gradients are summed, in order.
  template <typename function_t>
  void for_each_chunk(const function_t& f) {
    if (!by_classes()) return for_rows(f);
    x_ = operands_.input_of(0, rows());
    for_each_block(0, operands_.classes, plan_.chunk_classes(),
                   [&](int64_t begin, int64_t end) { f(LinearChunk{0, begin, logits_of_classes(begin, end)}); });
  }

  // Accumulates the contribution of a chunk of for_each_chunk, which holds dz.
  void add_gradients(const LinearChunk& chunk) {
    add_gradients(chunk, chunk.row == 0, chunk.row + chunk.z.size(0) == rows());
  }

  // Accumulates the contribution of all rows of this head, which form one chunk of a larger sum, to existing tensors.
  // See LinearProducts::add for those of low bits. The caller handles the gradients of classes beyond `classes`.
  void add_gradients_of_chunk(const Tensor& dz, const Sums& sums) {
    grad_input = sums.input, grad_weight = sums.weight, grad_bias = sums.bias, bias_low_ = sums.bias_low;
    prepare(sums);
    x_ = operands_.input_of(0, rows());
    add_gradients({0, 0, dz}, sums.first, sums.last);
  }

  OptionalTensor grad_input, grad_weight, grad_bias;

 private:
  void prepare(const Sums& sums = {}) {
    adds_classes_ = by_classes() || !sums.all_classes();
    if (grad_input) input_.emplace(operands_, *grad_input, plan_.chunk_rows, sums);
    if (grad_weight)
      weight_.emplace(operands_, rows_of(*grad_weight, 0, operands_.classes), way_, plan_, sums.weight_low);
  }

  void add_gradients(const LinearChunk& chunk, bool first, bool last) {
    Tensor dz = chunk.z;
    if (dz.scalar_type() != plan_.work) {
      dz = operands_.chunk(plan_.work, dz.size(0), dz.size(1));
      torch::stable::copy_(dz, chunk.z);
    }
    if (input_) adds_classes_ ? input_->add_classes(chunk.first_class, dz) : input_->add_rows(chunk.row, dz);
    if (grad_bias) add_bias_gradient(chunk.first_class, dz, first, last);
    if (weight_) weight_->add(chunk.row, chunk.first_class, dz, x_, first, last);  // may overwrite dz
  }

  void add_bias_gradient(int64_t first_class, const Tensor& dz, bool first, bool last) {
    const int64_t classes = dz.size(1);
    const Tensor total = row_of(rows_of(*grad_bias, first_class, first_class + classes));
    if (!(first && last) && !bias_low_) bias_low_ = empty(dz, {1, classes}, ScalarType::Byte);
    operands_.products.add(total, bias_low_, operands_.ones(dz.size(0), plan_.work), dz, first, last,
                           [&] { return empty(dz, {1, classes}, operands_.products.dtype()); });
  }

  // Return or write the logits of the rows x_.
  Tensor logits_of_classes(int64_t begin, int64_t end) {
    const Tensor z = operands_.chunk(plan_.logits, x_.size(0), end - begin);
    write_logits_of_classes(z, begin, end);
    return z;
  }
  void write_logits_of_classes(const Tensor& z, int64_t begin, int64_t end) {
    const int64_t rows = x_.size(0);
    for_each_block(begin, end, operands_.weight_block(), [&](int64_t v, int64_t last) {
      const Tensor w = transposed(operands_.weight_of(v, last));
      const Tensor part = columns_of(z, v - begin, last - begin);
      if (bias_ && !wide()) return device_t().add_product(part, rows_of(*bias_, v, last), x_, w);
      operands_.products.multiply(part, x_, w);
      if (!bias_) return;
      device_t().add_product(part, part, transposed(operands_.ones(rows, plan_.logits)),
                             row_of(rows_of(*bias_, v, last)));
    });
  }

  // Returns true if the logits are wider than the operands of the GEMMs.
  bool wide() const { return plan_.logits != plan_.work; }

  static Tensor row_of(const Tensor& t) { return torch::stable::unsqueeze(t, 0); }

  LinearPlan<device_t> plan_;
  LinearOperands<device_t> operands_;
  WeightSum way_ = WeightSum::kRows;
  bool adds_classes_ = false;  // to the gradient of the input
  OptionalTensor bias_, bias_low_;
  Tensor x_;  // the input of the current chunk
  std::optional<InputGradient<device_t>> input_;
  std::optional<WeightGradient<device_t>> weight_;
};

}  // namespace sparse_ce
