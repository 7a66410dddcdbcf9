// linear/gradients.h - Computes the gradients of a linear head from dz, that of the logits of a chunk of rows or a
// block of classes:  dx = dz W   dW = dz^T x   dbias = sum over the rows of dz.   plan.h describes the ways to sum dW.
#pragma once

#include "aliased_grad.h"
#include "operands.h"

namespace sparse_ce {

// Holds the gradients to which a chunk adds its contribution, and the low bits of 16-bit sums. The chunk may be the
// first or last of the rows, and of the classes.
struct Sums {
  OptionalTensor input, input_low, weight, weight_low, bias, bias_low;
  bool first = true, last = true, first_classes = true, last_classes = true;

  bool all_classes() const { return first_classes && last_classes; }
};

// Returns the memory for the stored dz of `rows` rows in blocks of `classes`: in `gradient` and, if given, `beside`.
template <typename device_t>
BorrowedMemory stored_gradient(const Tensor& gradient, ScalarType dtype, int64_t rows, int64_t classes,
                               const OptionalTensor& beside = std::nullopt) {
  return {gradient, dtype, rows, classes, device_t::Plan::kStoredBlockBytes > 0 ? classes : 0, beside};
}

template <typename device_t>
class LinearGradients {
 public:
  explicit LinearGradients(LinearOperands<device_t>& head) : head_(head) {}

  // Adds the contributions of dz (rows, classes).
  void add(Tensor dz, const Sums& sums) {
    if (dz.scalar_type() != head_.work) dz = torch::stable::to(dz, head_.work);
    if (sums.input) sums.all_classes() ? write_input_gradient(dz, *sums.input) : add_input_gradient(dz, sums);
    if (sums.bias) add_bias_gradient(dz, sums);
    if (sums.weight) add_weight_gradient(dz, sums);
  }

  // Computes the weight gradient from dz of all rows. `memory`, if given, holds a block of them; `step` rows are
  // multiplied at a time if a product needs other memory than the gradient.
  void multiply_stored(const BorrowedMemory& stored, const Tensor& gradient, const OptionalTensor& memory,
                       int64_t step) {
    const int64_t rows = head_.rows;
    const bool one_product = head_.products.direct(gradient.scalar_type());
    if (one_product) step = rows;
    OptionalTensor all, copy;
    if (one_product) all = head_.input_of(0, rows);  // once for all blocks, because it may be a copy
    stored.for_each_block([&](int64_t v, int64_t end, Tensor dz) {
      if (!one_product || stored.overwrites(v, end)) {
        if (!copy) copy = memory ? *memory : device_t().empty_output(head_.input, {rows * (end - v)}, head_.work);
        Tensor copied = torch::stable::view(rows_of(*copy, 0, rows * (end - v)), std::array{rows, end - v});
        torch::stable::copy_(copied, dz);
        dz = copied;
      }
      Tensor out = rows_of(gradient, v, end);
      const Tensor total = one_product ? out : head_.block(head_.work, end - v);
      for_each_block(0, rows, step, [&](int64_t begin, int64_t end_row) {
        const Tensor x = all ? *all : head_.input_of(begin, end_row);
        head_.products.add(total, std::nullopt, transposed(rows_of(dz, begin, end_row)), x, begin == 0, end_row == rows,
                           [&] { return total; });
      });
      if (!one_product) torch::stable::copy_(out, total);
    });
  }

 private:
  // Writes dx from dz of all classes. It is accumulated in the work dtype.
  void write_input_gradient(const Tensor& dz, Tensor out) {
    const int64_t classes = head_.classes, block = head_.weight_block();
    const bool summed_apart = out.scalar_type() != head_.work;
    const Tensor total = summed_apart ? empty(out, {head_.rows, head_.width}, head_.work) : out;
    OptionalTensor low;
    if (!head_.products.plain(total.scalar_type()) && block < classes)
      low = empty(out, {head_.rows, head_.width}, ScalarType::Byte);
    for_each_block(0, classes, block, [&](int64_t v, int64_t end) {
      const Tensor part = columns_of(dz, v, end), w = head_.weight_of(v, end);
      head_.products.add(total, low, part, w, v == 0, end == classes, [&] { return product(head_.rows); });
    });
    if (summed_apart) torch::stable::copy_(out, total);
  }

  // Adds the contribution of these classes to dx, in 24 bits.
  void add_input_gradient(const Tensor& dz, const Sums& sums) {
    const int64_t rows = head_.rows, classes = head_.classes;
    for_each_block(0, classes, head_.weight_block(), [&](int64_t v, int64_t end) {
      const Tensor w = head_.weight_of(v, end), part = columns_of(dz, v, end);
      for_each_block(0, rows, head_.block_rows(), [&](int64_t r, int64_t end_row) {
        OptionalTensor low;
        if (sums.input_low) low = rows_of(*sums.input_low, r, end_row);
        head_.products.add(rows_of(*sums.input, r, end_row), low, rows_of(part, r, end_row), w,
                           sums.first_classes && v == 0, sums.last_classes && end == classes,
                           [&] { return rows_of(product(std::min(rows, head_.block_rows())), 0, end_row - r); });
      });
    });
  }

  void add_bias_gradient(const Tensor& dz, const Sums& sums) {
    const int64_t classes = dz.size(1);
    const Tensor total = torch::stable::unsqueeze(rows_of(*sums.bias, 0, classes), 0);
    head_.products.add(total, sums.bias_low, head_.ones(dz.size(0), head_.work), dz, sums.first, sums.last,
                       [&] { return empty(dz, {1, classes}, head_.products.dtype()); });
  }

  void add_weight_gradient(const Tensor& dz, const Sums& sums) {
    const Tensor x = head_.input_of(0, head_.rows);
    const bool in_place = head_.products.in_place(sums.weight->scalar_type(), sums.first, sums.last);
    for_each_block(0, dz.size(1), in_place ? head_.classes : head_.block_rows(), [&](int64_t v, int64_t end) {
      OptionalTensor low;
      if (sums.weight_low) low = rows_of(*sums.weight_low, v, end);
      head_.products.add(rows_of(*sums.weight, v, end), low, transposed(columns_of(dz, v, end)), x, sums.first,
                         sums.last, [&] { return head_.block(head_.products.dtype(), end - v); });
    });
  }

  // Returns memory for a product of dx.
  Tensor product(int64_t rows) {
    if (!product_) product_ = empty(head_.input, {rows, head_.width}, head_.products.dtype());
    return *product_;
  }

  LinearOperands<device_t>& head_;
  OptionalTensor product_;
};

}  // namespace sparse_ce
