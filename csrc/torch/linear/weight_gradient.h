// linear/weight_gradient.h - Computes the weight gradient dW = dz^T x, which is a sum over all rows. plan.h describes
// the ways to sum it.
#pragma once

#include "aliased_grad.h"
#include "operands.h"

namespace sparse_ce {

// Returns the memory for the stored dz of `rows` rows in blocks of `classes`: in `gradient` and, if given, `beside`.
template <typename device_t>
BorrowedMemory stored_gradient(const Tensor& gradient, ScalarType dtype, int64_t rows, int64_t classes,
                               const OptionalTensor& beside = std::nullopt) {
  return {gradient, dtype, rows, classes, device_t::Plan::kStoredBlockBytes > 0 ? classes : 0, beside};
}

template <typename device_t>
class WeightGradient {
 public:
  // `gradient` is (classes, width). See LinearProducts::add for `low`, and BorrowedMemory for `beside`.
  WeightGradient(LinearOperands<device_t>& head, const Tensor& gradient, WeightSum way,
                 const LinearPlan<device_t>& plan, const OptionalTensor& low = std::nullopt,
                 const OptionalTensor& beside = std::nullopt)
      : head_(head), gradient_(gradient), dtype_(gradient.scalar_type()), chunk_rows_(plan.chunk_rows), low_(low) {
    if (way == WeightSum::kClasses) head.reserve(head.rows * plan.chunk_classes(), head.rows);
    if (way != WeightSum::kStored) return;
    const int64_t block = plan.stored_classes();
    head.reserve(head.rows * block, one_product() ? head.rows : 0);
    stored_.emplace(stored_gradient<device_t>(gradient_, plan.stored(), head.rows, block, beside));
  }

  // Adds the contribution of dz: of the rows from `row` on and all classes, or of all rows and the classes from
  // `first_class` on. x has the input of these rows. `first` and `last` refer to the chunks of rows.
  void add(int64_t row, int64_t first_class, const Tensor& dz, const Tensor& x, bool first, bool last) {
    if (!stored_) return add_product(first_class, dz, x, first, last);
    stored_->keep(row, dz, device_t());
    if (last) multiply_stored();
  }

  // Computes the gradient from dz of all rows.
  void multiply_stored() {
    const int64_t rows = head_.rows, step = one_product() ? rows : chunk_rows_;
    OptionalTensor all;
    if (one_product()) all = head_.input_of(0, rows);  // once for all blocks, because it may be a copy
    stored_->for_each_block([&](int64_t v, int64_t end, Tensor dz) {
      if (!one_product() || stored_->overwrites(v, end)) {
        Tensor copied = head_.chunk(head_.work, rows, end - v);
        torch::stable::copy_(copied, dz);
        dz = copied;
      }
      Tensor out = rows_of(gradient_, v, end);
      const Tensor total = one_product() ? out : head_.block(head_.work, end - v);
      for_each_block(0, rows, step, [&](int64_t begin, int64_t end_row) {
        const Tensor x = all ? *all : head_.input_of(begin, end_row);
        head_.products.add(total, std::nullopt, transposed(rows_of(dz, begin, end_row)), x, begin == 0, end_row == rows,
                           [&] { return total; });
      });
      if (!one_product()) torch::stable::copy_(out, total);
    });
  }

 private:
  void add_product(int64_t first_class, const Tensor& dz, const Tensor& x, bool first, bool last) {
    const bool in_place = head_.products.in_place(dtype_, first, last);
    if (!in_place && !(first && last) && !low_ && size_in_bytes(dtype_) == 2)
      low_ = device_t().empty_output(gradient_, {head_.classes, head_.width}, ScalarType::Byte);
    for_each_block(0, dz.size(1), in_place ? head_.classes : head_.block_rows(), [&](int64_t v, int64_t end) {
      const int64_t c = first_class + v, end_class = first_class + end;
      OptionalTensor low;
      if (low_) low = rows_of(*low_, c, end_class);
      head_.products.add(rows_of(gradient_, c, end_class), low, transposed(columns_of(dz, v, end)), x, first, last,
                         [&] { return head_.block(head_.products.dtype(), end - v); });
    });
  }

  // Returns true if a single product over all rows needs no other memory than dW.
  bool one_product() const { return head_.products.direct(dtype_); }

  LinearOperands<device_t>& head_;
  Tensor gradient_;
  ScalarType dtype_;
  int64_t chunk_rows_;
  OptionalTensor low_;
  std::optional<BorrowedMemory> stored_;
};

}  // namespace sparse_ce
