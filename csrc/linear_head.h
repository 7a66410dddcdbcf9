// linear_head.h - the linear head, a chunk of rows at a time: no device code.
//   z = input W^T + bias      dinput = dz W      dW += dz^T input      dbias += sum over the rows of dz
//
// The products are made in the `work` dtype: the input's, or float32 on a CPU that does not multiply 16-bit numbers
// (its own GEMM for them takes three times as long as one of float32). Weights of another dtype are converted a block
// of classes at a time. `device_t` has besides what ops.h asks for: work_dtype, product_dtype, kWholeBytes (logits of
// no more make one chunk), chunk_bytes, kBlockBytes (of converted weights, of a product), may_ignore, add_product,
// accumulate and clear_ignored_rows.
#pragma once

#include "gemm.h"
#include "linear.h"
#include "ops.h"

#include <algorithm>

namespace sparse_ce {

// The gradients that are asked for.
struct Wanted {
  bool input, weight, bias, values;
  bool any() const { return input || weight || bias || values; }
};

template <typename device_t>
class LinearHead {
 public:
  // input (rows, width), weight (vocab, width), bias (vocab,); only the first `classes` of the vocabulary exist.
  LinearHead(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t classes,
             std::optional<int64_t> chunk_rows)
      : work_(device_t::work_dtype(input.scalar_type())),
        input_(input.dim() == 2 && input.stride(1) == 1 ? input : packed(input)),
        weight_(rows_of(weight, 0, classes)),
        classes_(classes),
        width_(input.size(1)),
        block_(weight.scalar_type() == work_ ? classes : block_classes()) {
    if (bias) bias_ = torch::stable::to(rows_of(*bias, 0, classes), work_);
    chunk_rows_ = std::min(rows(), chunk_rows.value_or(default_chunk_rows()));
    chunks_ = device_t::empty_output(input, {chunk_rows_, classes}, work_);
  }

  int64_t rows() const { return input_.size(0); }
  int64_t chunk_rows() const { return chunk_rows_; }
  ScalarType work() const { return work_; }

  // Makes room for the gradients: of the dtypes and shapes of input, weight and bias.
  void begin_gradients(const Wanted& wanted, const Tensor& weight, const OptionalTensor& bias) {
    const int64_t vocab = weight.size(0);
    if (wanted.input) grad_input = device_t::empty_output(input_, {rows(), width_}, input_.scalar_type());
    if (wanted.weight) {
      grad_weight = device_t::empty_output(input_, {vocab, width_}, weight.scalar_type());
      clear_rows(grad_weight, rows() > 0 ? classes_ : 0, vocab);
    }
    if (wanted.bias && bias) {
      grad_bias = empty(input_, {vocab}, bias->scalar_type());
      clear_rows(grad_bias, rows() > 0 ? classes_ : 0, vocab);
    }
  }

  // Logits (n, classes) of the rows of `target`, the first of which is `begin`, in the one chunk that there is.
  Tensor logits(int64_t begin, const TargetView& target) {
    chunk_input_ = work_input(begin, target);
    const Tensor z = rows_of(chunks_, 0, target.rows);
    for (int64_t v = 0; v < classes_; v += block_) {
      const int64_t end = std::min(classes_, v + block_);
      const Tensor w = transposed(work_weight(v, end));
      Tensor part = columns_of(z, v, end);
      if (bias_) {
        torch::stable::copy_(part, rows_of(*bias_, v, end));
        device_t::add_product(part, chunk_input_, w);
      } else {
        multiply(part, chunk_input_, w);
      }
    }
    return z;
  }

  // Adds what the gradient dz (n, classes) of `logits` contributes. Chunks come in order, each after its logits.
  void add_gradients(int64_t begin, const Tensor& dz) {
    const int64_t end = begin + dz.size(0);
    first_ = begin == 0, last_ = end == rows();
    if (grad_input) write_input_gradient(rows_of(*grad_input, begin, end), dz);
    if (grad_weight) add_weight_gradient(dz);
    if (grad_bias) add_bias_gradient(dz);
  }

  OptionalTensor grad_input, grad_weight, grad_bias;

 private:
  // Classes whose weights are converted together, or whose products are summed together.
  int64_t block_classes() const {
    return std::max<int64_t>(256, device_t::kBlockBytes / (4 * std::max<int64_t>(1, width_)));
  }

  // The largest chunk that fits the device's budget; all of about one size, so that none is too short to be fast.
  int64_t default_chunk_rows() const {
    const int64_t row = classes_ * size_in_bytes(work_);
    if (rows() * row <= device_t::kWholeBytes) return std::max<int64_t>(1, rows());
    const int64_t budget =
        device_t::chunk_bytes(rows() * classes_, size_in_bytes(input_.scalar_type()), classes_ * width_);
    const int64_t most = std::max<int64_t>(1, budget / row);
    const int64_t count = (rows() + most - 1) / most;
    const int64_t even = (rows() + count - 1) / count;
    const int64_t rounded = (even + kRowsTogether - 1) / kRowsTogether * kRowsTogether;
    return std::max<int64_t>(1, std::min(most, rounded));
  }
  static constexpr int64_t kRowsTogether = 16;

  static void clear_rows(const OptionalTensor& t, int64_t begin, int64_t end) {
    if (begin == end) return;
    Tensor rest = rows_of(*t, begin, end);
    torch::stable::zero_(rest);
  }

  // The input's rows as they are multiplied, those of ignored targets cleared.
  Tensor work_input(int64_t begin, const TargetView& target) {
    const Tensor given = rows_of(input_, begin, begin + target.rows);
    const bool clear = device_t::may_ignore(target);
    if (!clear && given.scalar_type() == work_) return given;
    if (!input_rows_) input_rows_ = empty(input_, {chunk_rows_, width_}, work_);
    Tensor x = rows_of(*input_rows_, 0, target.rows);
    torch::stable::copy_(x, given);
    if (clear) {
      ClearRowsArgs args{};
      args.rows = x.mutable_data_ptr();
      args.row_bytes = width_ * size_in_bytes(work_);
      args.target = target;
      device_t::clear_ignored_rows(args, x);
    }
    return x;
  }

  // The weights of the classes [begin, end) in the work dtype; the next call may overwrite them.
  Tensor work_weight(int64_t begin, int64_t end) {
    const Tensor given = rows_of(weight_, begin, end);
    if (given.scalar_type() == work_) return given;
    Tensor w = block_buffer(end - begin, work_);
    torch::stable::copy_(w, given);
    return w;
  }

  // A block of weights as they are multiplied, or a block of a product: never both at once.
  Tensor block_buffer(int64_t rows, ScalarType dtype) {
    OptionalTensor& buffer = dtype == work_ ? work_block_ : product_block_;
    if (!buffer) buffer = device_t::empty_output(input_, {std::min(classes_, block_classes()), width_}, dtype);
    return rows_of(*buffer, 0, rows);
  }

  // Whether a total of this dtype can stay in the GEMM's hands.
  bool plain(const Tensor& total) const { return total.scalar_type() == work_ && size_in_bytes(work_) > 2; }

  void write_input_gradient(Tensor out, const Tensor& dz) {
    const bool wide = size_in_bytes(work_) > 2 && out.scalar_type() != work_;
    if (wide && !input_sums_) input_sums_ = empty(input_, {chunk_rows_, width_}, work_);
    const bool split = !wide && !plain(out) && block_ < classes_;
    if (split && !input_low_) input_low_ = empty(input_, {chunk_rows_, width_}, ScalarType::Byte);
    const Tensor total = wide ? rows_of(*input_sums_, 0, out.size(0)) : out;
    for (int64_t v = 0; v < classes_; v += block_) {
      const int64_t end = std::min(classes_, v + block_);
      const Tensor part = columns_of(dz, v, end), w = work_weight(v, end);
      if (split && !input_product_)
        input_product_ = empty(input_, {chunk_rows_, width_}, device_t::product_dtype(work_));
      add(total, input_low_, part, w, v == 0, end == classes_,
          [&] { return rows_of(*input_product_, 0, out.size(0)); });
    }
    if (wide) torch::stable::copy_(out, total);
  }

  void add_weight_gradient(const Tensor& dz) {
    const bool whole = plain(*grad_weight) || (first_ && last_ && grad_weight->scalar_type() == work_);
    const int64_t block = whole ? classes_ : block_classes();
    if (!whole && !(first_ && last_) && !weight_low_ && size_in_bytes(grad_weight->scalar_type()) == 2)
      weight_low_ = device_t::empty_output(input_, {classes_, width_}, ScalarType::Byte);
    for (int64_t v = 0; v < classes_; v += block) {
      const int64_t end = std::min(classes_, v + block);
      OptionalTensor low;
      if (weight_low_) low = rows_of(*weight_low_, v, end);
      add(rows_of(*grad_weight, v, end), low, transposed(columns_of(dz, v, end)), chunk_input_, first_, last_,
          [&] { return block_buffer(end - v, device_t::product_dtype(work_)); });
    }
  }

  // The bias is the weight of an input that is always 1.
  void add_bias_gradient(const Tensor& dz) {
    if (!ones_) {
      ones_ = empty(input_, {1, chunk_rows_}, work_);
      torch::stable::fill_(*ones_, 1.0);
    }
    const Tensor total = torch::stable::unsqueeze(rows_of(*grad_bias, 0, classes_), 0);
    if (!(first_ && last_) && !bias_low_) bias_low_ = empty(input_, {1, classes_}, ScalarType::Byte);
    add(total, bias_low_, columns_of(*ones_, 0, dz.size(0)), dz, first_, last_,
        [&] { return empty(input_, {1, classes_}, device_t::product_dtype(work_)); });
  }

  // total += a b, or = a b for the first of several. `low` holds what a total of 16 bits has no room for until the
  // last.
  template <typename buffer_t>
  void add(const Tensor& total, const OptionalTensor& low, const Tensor& a, const Tensor& b, bool first, bool last,
           const buffer_t& buffer) {
    if (plain(total)) return first ? multiply(total, a, b) : device_t::add_product(total, a, b);
    if (first && last && total.scalar_type() == work_) return multiply(total, a, b);
    const Tensor product = buffer();
    product.scalar_type() == work_ ? multiply(product, a, b) : multiply_widening(product, a, b);
    AccumulateArgs args{};
    args.product = product.const_data_ptr();
    args.product_dtype = to_dtype(product, "product", /*integer=*/false);
    args.total = total.mutable_data_ptr();
    args.dtype = to_dtype(total, "total", /*integer=*/false);
    args.low = low ? static_cast<uint8_t*>(low->mutable_data_ptr()) : nullptr;
    args.count = total.numel();
    args.first = first;
    args.last = last;
    device_t::accumulate(args, total);
  }

  ScalarType work_;
  Tensor input_, weight_;
  OptionalTensor bias_;
  int64_t classes_, width_, block_, chunk_rows_;
  bool first_ = false, last_ = false;
  Tensor chunks_, chunk_input_;  // (chunk_rows, classes) and the rows that it comes from
  OptionalTensor input_rows_, work_block_, product_block_, input_sums_, input_product_, input_low_, weight_low_;
  OptionalTensor bias_low_, ones_;
};

}  // namespace sparse_ce
