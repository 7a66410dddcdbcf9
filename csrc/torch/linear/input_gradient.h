// linear/input_gradient.h - Computes the input gradient dx = dz W, which is a sum over blocks of classes.
#pragma once

#include "operands.h"

namespace sparse_ce {

template <typename device_t>
class InputGradient {
 public:
  // `gradient` has all rows of the input. The classes of the head may be some of those that `sums` describes.
  InputGradient(LinearOperands<device_t>& head, const Tensor& gradient, int64_t chunk_rows, const Sums& sums)
      : head_(head), gradient_(gradient), chunk_rows_(chunk_rows), first_(sums.first_classes), last_(sums.last_classes),
        low_(sums.input_low) {}

  // Computes dx of the rows from `begin` on, from dz of all classes. It is accumulated in the work dtype.
  void add_rows(int64_t begin, const Tensor& dz) {
    const int64_t rows = dz.size(0), classes = head_.classes, block = head_.weight_block();
    OptionalTensor out = head_.active_rows.in_place(gradient_, begin, begin + rows);
    const bool summed_apart = !out || gradient_.scalar_type() != head_.work;
    if (summed_apart && !sums_) sums_ = empty(gradient_, {chunk_rows_, head_.width}, head_.work);
    const Tensor total = summed_apart ? rows_of(*sums_, 0, rows) : *out;
    const bool split = !head_.products.plain(total.scalar_type()) && block < classes;
    if (split && !low_) low_ = empty(gradient_, {chunk_rows_, head_.width}, ScalarType::Byte);
    for_each_block(0, classes, block, [&](int64_t v, int64_t end) {
      const Tensor part = columns_of(dz, v, end), w = head_.weight_of(v, end);
      head_.products.add(total, low_, part, w, v == 0, end == classes, [&] { return product(chunk_rows_, rows); });
    });
    if (!out) head_.active_rows.scatter(total, gradient_, begin);
    if (out && summed_apart) torch::stable::copy_(*out, total);
  }

  // Adds the contribution of the classes from `begin` on to dx of all rows, in 24 bits.
  void add_classes(int64_t begin, const Tensor& dz) {
    const int64_t rows = head_.rows, classes = head_.classes;
    OptionalTensor out = head_.active_rows.in_place(gradient_, 0, rows);
    if (!out && !sums_) sums_ = empty(gradient_, {rows, head_.width}, gradient_.scalar_type());
    const Tensor total = out ? *out : *sums_;
    if (!low_ && size_in_bytes(total.scalar_type()) == 2)
      low_ = empty(gradient_, {rows, head_.width}, ScalarType::Byte);
    for_each_block(begin, begin + dz.size(1), head_.weight_block(), [&](int64_t v, int64_t end) {
      const Tensor w = head_.weight_of(v, end), part = columns_of(dz, v - begin, end - begin);
      for_each_block(0, rows, head_.block_rows(), [&](int64_t r, int64_t end_row) {
        OptionalTensor low;
        if (low_) low = rows_of(*low_, r, end_row);
        head_.products.add(rows_of(total, r, end_row), low, rows_of(part, r, end_row), w, first_ && v == 0,
                           last_ && end == classes,
                           [&] { return product(std::min(rows, head_.block_rows()), end_row - r); });
      });
    });
    if (begin + dz.size(1) == classes && !out) head_.active_rows.scatter(total, gradient_, 0);
  }

 private:
  // Returns memory for a product of `rows` rows, of at most `most`.
  Tensor product(int64_t most, int64_t rows) {
    if (!product_) product_ = empty(gradient_, {most, head_.width}, head_.products.dtype());
    return rows_of(*product_, 0, rows);
  }

  LinearOperands<device_t>& head_;
  Tensor gradient_;
  int64_t chunk_rows_;
  bool first_, last_;
  OptionalTensor low_, sums_, product_;
};

}  // namespace sparse_ce
