// linear/head.h - Computes the linear head in chunks of rows or classes. It contains no device code.
//   z = input W^T + bias      dinput = dz W      dW += dz^T input      dbias += sum over the rows of dz
//
// GEMMs run in the `work` dtype: the dtype of the input, or float32 on CPUs without 16-bit multiplication (whose 16-bit
// GEMM takes three times as long as the float32 one). Weights of another dtype are converted one block of classes at a
// time. Logits have the `work` dtype, or float32 if they must not be rounded to 16 bits.
#pragma once

#include "../../ops/linear_chunks.h"
#include "../arguments.h"
#include "aliased_grad.h"
#include "products.h"
#include "rows.h"

#include <algorithm>

namespace sparse_ce {

template <typename device_t>
class LinearHead {
 public:
  using Plan = typename device_t::Plan;

  // input (rows, width), weight (vocab, width), bias (vocab,). Only the first `classes` of the vocabulary are used, and
  // only the input rows in `active`, or all. Below, "rows" means these rows, which are the rows of `target`. The
  // logits of a chunk may take `ample_bytes` unless `chunk_rows` is given.
  LinearHead(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t classes,
             const TargetView& target, std::optional<int64_t> chunk_rows, bool float32_logits, const ActiveRows* active,
             int64_t ample_bytes = 0)
      : work_(device_t().work_dtype(input.scalar_type(), float32_logits)), products_(work_),
        logits_dtype_(float32_logits ? products_.dtype() : work_),
        input_(input.dim() == 2 && input.stride(1) == 1 ? input : packed(input)), weight_(rows_of(weight, 0, classes)),
        target_(target), rows_of_input_(active), classes_(classes), width_(input.size(1)),
        block_(weight.scalar_type() == work_ || !Plan::kConvertsBlocks ? classes : block_rows()),
        saves_memory_(chunk_rows && std::min(rows(), *chunk_rows) * size_in_bytes(work_) < width_),
        may_borrow_(may_borrow(weight.scalar_type(), chunk_rows.has_value())),
        chunk_rows_(std::min(rows(), chunk_rows ? *chunk_rows : default_chunk_rows<Plan>(sizes(ample_bytes)))) {
    if (bias) bias_ = torch::stable::to(rows_of(*bias, 0, classes), logits_dtype_);
  }

  int64_t rows() const { return target_.rows; }
  int64_t chunk_rows() const { return chunk_rows_; }
  int64_t classes() const { return classes_; }
  // Returns how many classes of all rows fit into a chunk's memory.
  int64_t chunk_classes() const {
    return std::min(classes_, std::max(kLeastClasses, chunk_rows_ * classes_ / std::max<int64_t>(1, rows())));
  }

  // Returns true if recomputed logits can be processed by classes; the gradients must have begun. The sum over chunks
  // is then the input gradient. A 16-bit weight gradient is larger and needs one more byte per weight while it is
  // accumulated.
  bool recomputes_by_classes() const {
    return grad_weight && size_in_bytes(grad_weight->scalar_type()) == 2 && !(borrowed_ && rows() <= width_) &&
           chunk_rows_ < rows() && rows() < classes_;
  }
  // Returns true if forward must also recompute the logits by classes, because those bytes exceed the requested chunk.
  // Backward uses the same condition, so that its gradients are bitwise equal to those computed in forward.
  bool saves_memory() const { return saves_memory_ && recomputes_by_classes(); }

  // Allocates the gradients, with the shapes and dtypes of input, weight and bias.
  void begin_gradients(const NeedsGrad& needs_grad, const Tensor& weight, const OptionalTensor& bias) {
    const int64_t vocab = weight.size(0);
    if (needs_grad.input) {
      grad_input = device_t().empty_output(input_, {input_.size(0), width_}, input_.scalar_type());
      rows_of_input_.clear_others(*grad_input);
    }
    if (needs_grad.weight) {
      grad_weight = device_t().empty_output(input_, {vocab, width_}, weight.scalar_type());
      clear_rows(*grad_weight, rows() > 0 ? classes_ : 0, vocab);
      if (may_borrow_ && chunk_rows_ < rows()) borrow();
    }
    if (needs_grad.bias && bias) {
      grad_bias = empty(input_, {vocab}, bias->scalar_type());
      clear_rows(*grad_bias, rows() > 0 ? classes_ : 0, vocab);
    }
  }

  // Uses existing tensors as gradients, to accumulate over chunks that arrive in separate calls. See
  // LinearProducts::add for `weight_low` and `bias_low`. The caller handles the gradients of classes beyond `classes`.
  void continue_gradients(const OptionalTensor& input, const OptionalTensor& weight, const OptionalTensor& weight_low,
                          const OptionalTensor& bias, const OptionalTensor& bias_low) {
    grad_input = input, grad_weight = weight, weight_low_ = weight_low, grad_bias = bias, bias_low_ = bias_low;
  }

  // Returns the logits (n, classes) of the rows [begin, end), in the memory of the single chunk.
  Tensor logits(int64_t begin, int64_t end_row) {
    chunk_input_ = work_input(begin, end_row);
    return logits_of_classes(0, classes_);
  }

  // Returns the logits (rows, end - begin) of the classes [begin, end), in the same memory.
  Tensor class_logits(int64_t begin, int64_t end) {
    if (begin == 0) chunk_input_ = work_input(0, rows());
    return logits_of_classes(begin, end);
  }

  // Accumulates the contribution of dz (n, classes), the gradient of `logits`. Chunks come in order, after the logits.
  void add_gradients(int64_t begin, const Tensor& dz) {
    first_ = begin == 0, last_ = begin + dz.size(0) == rows();
    add_chunk(begin, dz);
  }

  // Accumulates the contribution of dz (rows, end - begin), the gradient of `class_logits`. Classes come in order, each
  // after its logits.
  void add_gradients_of_classes(int64_t begin, const Tensor& gradient) {
    const Tensor dz = as_multiplied(gradient);
    const int64_t end = begin + dz.size(1);
    if (grad_input) add_input_gradient(begin, dz);
    for_each_block(begin, end, grad_weight->scalar_type() == work_ ? classes_ : block_rows(),
                   [&](int64_t v, int64_t last) {
                     products_.add(rows_of(*grad_weight, v, last), std::nullopt,
                                   transposed(columns_of(dz, v - begin, last - begin)), chunk_input_, true, true,
                                   [&] { return block_buffer(last - v, products_.dtype()); });
                   });
    if (grad_bias) {
      products_.add(row_of(rows_of(*grad_bias, begin, end)), std::nullopt, ones(rows(), work_), dz, true, true,
                    [&] { return empty(input_, {1, end - begin}, products_.dtype()); });
    }
  }

  // Accumulates the contribution of all rows of this head, which form one chunk of a larger batch.
  void add_gradients_of_chunk(const Tensor& dz, bool first, bool last) {
    chunk_input_ = work_input(0, rows());
    first_ = first, last_ = last;
    add_chunk(0, dz);
  }

  OptionalTensor grad_input, grad_weight, grad_bias;

 private:
  void add_chunk(int64_t begin, const Tensor& gradient) {
    const Tensor dz = as_multiplied(gradient);
    if (grad_input) write_input_gradient(begin, begin + dz.size(0), dz);
    if (grad_weight) borrowed_ ? borrowed_->keep(begin, dz, device_t()) : add_weight_gradient(dz);
    if (grad_bias) add_bias_gradient(dz);
    if (borrowed_ && last_) write_weight_gradient();
  }

  // Returns true if the logits are wider than the operands of the GEMMs.
  bool wide() const { return logits_dtype_ != work_; }

  Tensor as_multiplied(const Tensor& dz) {
    if (dz.scalar_type() == work_) return dz;
    Tensor rounded = in_chunk(work_gradient_, work_, dz.size(0), dz.size(1));
    torch::stable::copy_(rounded, dz);
    return rounded;
  }

  // Computes the logits of the rows of chunk_input_.
  Tensor logits_of_classes(int64_t begin, int64_t end) {
    const int64_t rows = chunk_input_.size(0);
    const Tensor z = in_chunk(chunks_, logits_dtype_, rows, end - begin);
    for_each_block(begin, end, block_, [&](int64_t v, int64_t last) {
      const Tensor w = transposed(work_weight(v, last));
      const Tensor part = columns_of(z, v - begin, last - begin);
      if (bias_ && !wide()) return device_t().add_product(part, rows_of(*bias_, v, last), chunk_input_, w);
      products_.multiply(part, chunk_input_, w);
      if (!bias_) return;
      device_t().add_product(part, part, transposed(ones(rows, logits_dtype_)), row_of(rows_of(*bias_, v, last)));
    });
    return z;
  }

  // Calls f(begin, end) for blocks of the classes [begin, end).
  template <typename function_t>
  static void for_each_block(int64_t begin, int64_t end, int64_t block, const function_t& f) {
    for (int64_t v = begin; v < end; v += block) f(v, std::min(end, v + block));
  }

  // Returns (rows, columns) in a chunk's memory, which is large enough for a borrowed block or a chunk of classes too.
  Tensor in_chunk(OptionalTensor& memory, ScalarType dtype, int64_t rows, int64_t columns) const {
    if (!memory) {
      const int64_t dz = borrowed_ ? borrowed_->block_classes() : 0, z = recomputes_by_classes() ? chunk_classes() : 0;
      const int64_t block = target_.rows * std::max(dz, z);
      memory = device_t().empty_output(input_, {std::max(chunk_rows_ * classes_, block)}, dtype);
    }
    return torch::stable::view(rows_of(*memory, 0, rows * columns), std::array{rows, columns});
  }

  static Tensor row_of(const Tensor& t) { return torch::stable::unsqueeze(t, 0); }

  // Returns ones (1, rows): the bias is the weight of an input that is always 1.
  Tensor ones(int64_t rows, ScalarType dtype) const {
    Tensor t = empty(input_, {1, rows}, dtype);
    torch::stable::fill_(t, 1.0);
    return t;
  }

  // Returns the number of rows of size `width` in a block, of the weight, a product or the input.
  int64_t block_rows() const { return std::max<int64_t>(256, Plan::kBlockBytes / (4 * std::max<int64_t>(1, width_))); }

  HeadSizes sizes(int64_t ample_bytes) const {
    const int64_t size = size_in_bytes(work_), row = classes_ * (size + (wide() ? size_in_bytes(logits_dtype_) : 0));
    const int64_t copied = !rows_of_input_.all() || input_.scalar_type() != work_ ? 2 * width_ * size : 0;
    return {rows(), classes_, width_, size_in_bytes(input_.scalar_type()), row, copied, may_borrow_, ample_bytes};
  }
  static constexpr int64_t kLeastClasses = 256;

  // Returns the input rows for a GEMM. Ignored rows are set to 0 if they are not removed.
  Tensor work_input(int64_t begin, int64_t end) {
    const OptionalTensor inputs = rows_of_input_.in_place(input_, begin, end);
    const bool clear = device_t().may_ignore(target_);
    if (inputs && !clear && inputs->scalar_type() == work_) return *inputs;
    const int64_t most = one_product() ? rows() : std::max(chunk_rows_, end - begin);
    if (!input_rows_ || input_rows_->size(0) < most) input_rows_ = empty(input_, {most, width_}, work_);
    Tensor x = rows_of(*input_rows_, 0, end - begin);
    inputs ? void(torch::stable::copy_(x, *inputs)) : rows_of_input_.gather(input_, x, begin);
    if (!clear) return x;
    ClearRowsArgs args{};
    args.rows = x.mutable_data_ptr();
    args.row_bytes = width_ * size_in_bytes(work_);
    args.target = target_.slice(begin, end);
    device_t().clear_ignored_rows(args, x);
    return x;
  }

  // Returns the weights of the classes [begin, end) in the work dtype. The next call may overwrite them.
  Tensor work_weight(int64_t begin, int64_t end) {
    if (!Plan::kConvertsBlocks && weight_.scalar_type() != work_) weight_ = torch::stable::to(weight_, work_);
    const Tensor inputs = rows_of(weight_, begin, end);
    if (inputs.scalar_type() == work_) return inputs;
    Tensor w = block_buffer(end - begin, work_);
    torch::stable::copy_(w, inputs);
    return w;
  }

  // Returns memory for a block of converted weights or of a product. The two are never needed at the same time.
  Tensor block_buffer(int64_t rows, ScalarType dtype) {
    OptionalTensor& buffer = dtype == work_ ? work_block_ : product_block_;
    if (!buffer) buffer = device_t().empty_output(input_, {std::min(classes_, block_rows()), width_}, dtype);
    return rows_of(*buffer, 0, rows);
  }

  void write_input_gradient(int64_t begin, int64_t end_row, const Tensor& dz) {
    const int64_t rows = end_row - begin;
    OptionalTensor out = rows_of_input_.in_place(*grad_input, begin, end_row);
    const bool summed_apart = !out || grad_input->scalar_type() != work_;
    if (summed_apart && !input_sums_) input_sums_ = empty(input_, {chunk_rows_, width_}, work_);
    const Tensor total = summed_apart ? rows_of(*input_sums_, 0, rows) : *out;
    const bool split = !products_.plain(total.scalar_type()) && block_ < classes_;
    if (split && !input_low_) input_low_ = empty(input_, {chunk_rows_, width_}, ScalarType::Byte);
    for (int64_t v = 0; v < classes_; v += block_) {
      const int64_t end = std::min(classes_, v + block_);
      const Tensor part = columns_of(dz, v, end), w = work_weight(v, end);
      if (split && !input_product_) input_product_ = empty(input_, {chunk_rows_, width_}, products_.dtype());
      products_.add(total, input_low_, part, w, v == 0, end == classes_,
                    [&] { return rows_of(*input_product_, 0, rows); });
    }
    if (!out) rows_of_input_.scatter(total, *grad_input, begin);
    if (out && summed_apart) torch::stable::copy_(*out, total);
  }

  // Accumulates the contribution of the classes from `begin` on to the input gradient of all rows, in 24 bits.
  void add_input_gradient(int64_t begin, const Tensor& dz) {
    const bool last = begin + dz.size(1) == classes_;
    OptionalTensor out = rows_of_input_.in_place(*grad_input, 0, rows());
    if (!out && !input_sums_) input_sums_ = empty(input_, {rows(), width_}, grad_input->scalar_type());
    const Tensor total = out ? *out : *input_sums_;
    if (!input_low_) input_low_ = empty(input_, {rows(), width_}, ScalarType::Byte);
    for_each_block(begin, begin + dz.size(1), block_, [&](int64_t v, int64_t end) {
      const Tensor w = work_weight(v, end), part = columns_of(dz, v - begin, end - begin);
      for_each_block(0, rows(), block_rows(), [&](int64_t r, int64_t end_row) {
        if (!input_product_) input_product_ = empty(input_, {block_rows(), width_}, products_.dtype());
        products_.add(rows_of(total, r, end_row), rows_of(*input_low_, r, end_row), rows_of(part, r, end_row), w,
                      v == 0, end == classes_, [&] { return rows_of(*input_product_, 0, end_row - r); });
      });
    });
    if (last && !out) rows_of_input_.scatter(total, *grad_input, 0);
  }

  // Returns true if dz is stored for all rows until it is complete, in the memory of the weight gradient and beyond it.
  // The weight gradient's dtype must have the range of the products. `chunked` means that `chunk_rows` is set. The
  // gradients of wider logits are accumulated in the weight gradient itself.
  bool may_borrow(ScalarType weight, bool chunked) const {
    const bool fits = size_in_bytes(weight) == 2
                          ? weight == work_ || (weight == ScalarType::BFloat16 && work_ == ScalarType::Float)
                          : weight != work_ && products_.holds(weight);
    return fits && (rows() <= width_ * size_in_bytes(weight) / 2 ||
                    (!saves_memory_ && rows() <= Plan::stored_rows(width_, chunked)));
  }

  // Returns true if the GEMMs that read borrowed memory need no other memory.
  bool one_product() const { return borrowed_ && products_.direct(grad_weight->scalar_type()); }

  // Returns the classes in a block of dz: as many as fit into a chunk, or as the device needs for an efficient GEMM.
  int64_t stored_block_classes(ScalarType weight) const {
    if (!products_.direct(weight)) return std::min(classes_, block_rows());
    if (Plan::kStoredBlockBytes == 0) return chunk_classes();
    const int64_t most = std::min(classes_ / 8, Plan::kStoredBlockBytes / (2 * width_));
    return rounded_up(std::max<int64_t>(1, most), Plan::kRowsTogether);
  }

  void borrow() {
    const ScalarType dtype = grad_weight->scalar_type();
    const int64_t block = stored_block_classes(dtype);
    borrowed_.emplace(rows_of(*grad_weight, 0, classes_), size_in_bytes(dtype) == 2 ? dtype : work_, rows(), block,
                      Plan::kStoredBlockBytes > 0 ? block : 0);
  }

  // Computes the weight gradient from the borrowed memory, one block of classes at a time.
  void write_weight_gradient() {
    const int64_t step = one_product() ? rows() : chunk_rows_;
    if (one_product()) chunk_input_ = work_input(0, rows());  // once for all blocks, because it may be a copy
    borrowed_->for_each_block([&](int64_t v, int64_t end, Tensor dz) {
      if (!one_product() || borrowed_->overwrites(v, end)) {
        Tensor copied = in_chunk(wide() ? work_gradient_ : chunks_, work_, rows(), end - v);
        torch::stable::copy_(copied, dz);
        dz = copied;
      }
      Tensor out = rows_of(*grad_weight, v, end);
      const Tensor total = one_product() ? out : block_buffer(end - v, work_);
      for (int64_t begin = 0; begin < rows(); begin += step) {
        const int64_t end_row = std::min(rows(), begin + step);
        const Tensor x = one_product() ? chunk_input_ : work_input(begin, end_row);
        products_.add(total, std::nullopt, transposed(rows_of(dz, begin, end_row)), x, begin == 0, end_row == rows(),
                      [&] { return total; });
      }
      if (!one_product()) torch::stable::copy_(out, total);
    });
  }

  void add_weight_gradient(const Tensor& dz) {
    const ScalarType dtype = grad_weight->scalar_type();
    const bool whole = products_.plain(dtype) || (first_ && (last_ ? products_.direct(dtype) : products_.holds(dtype)));
    const int64_t block = whole ? classes_ : block_rows();
    if (!whole && !(first_ && last_) && !weight_low_ && size_in_bytes(dtype) == 2)
      weight_low_ = device_t().empty_output(input_, {classes_, width_}, ScalarType::Byte);
    for (int64_t v = 0; v < classes_; v += block) {
      const int64_t end = std::min(classes_, v + block);
      OptionalTensor low;
      if (weight_low_) low = rows_of(*weight_low_, v, end);
      products_.add(rows_of(*grad_weight, v, end), low, transposed(columns_of(dz, v, end)), chunk_input_, first_, last_,
                    [&] { return block_buffer(end - v, products_.dtype()); });
    }
  }

  void add_bias_gradient(const Tensor& dz) {
    const Tensor total = row_of(rows_of(*grad_bias, 0, classes_));
    if (!(first_ && last_) && !bias_low_) bias_low_ = empty(input_, {1, classes_}, ScalarType::Byte);
    products_.add(total, bias_low_, ones(dz.size(0), work_), dz, first_, last_,
                  [&] { return empty(input_, {1, classes_}, products_.dtype()); });
  }

  ScalarType work_;
  LinearProducts<device_t> products_;
  ScalarType logits_dtype_;
  Tensor input_, weight_;
  TargetView target_;
  LinearRows<device_t> rows_of_input_;
  OptionalTensor bias_;
  int64_t classes_, width_, block_;
  bool saves_memory_;  // chunk_rows requests it
  bool may_borrow_;
  int64_t chunk_rows_;
  bool first_ = false, last_ = false;
  std::optional<BorrowedMemory> borrowed_;
  OptionalTensor chunks_;  // (chunk_rows, classes)
  OptionalTensor work_gradient_;  // the same, for the gradient of wide logits
  Tensor chunk_input_;  // the rows of the current logits
  OptionalTensor input_rows_, work_block_, product_block_, input_sums_, input_product_, input_low_, weight_low_;
  OptionalTensor bias_low_;
};

}  // namespace sparse_ce
