// linear/aliased_grad.h - the gradient dz of all logits in the memory of the weight's gradient, which needs it only
// once dz is complete: then it is one product over all rows, rounded once.
//
// dz lies in blocks of classes, (rows, classes of the block) each: those of the first `held` classes in the gradient's
// memory, the last of them at its end, the others in memory of their own. A product is written from the beginning on,
// block by block. No product overwrites what a later one reads: the gradient up to class v ends before the block that
// begins with v, since v width <= classes width - (held - v) rows, where held is at most all classes if rows <= width,
// and at most classes width / rows otherwise. But perhaps what it reads itself, unless `spare` classes' memory was left
// before the first block, a block or more.
#pragma once

#include "../gemm.h"

#include <algorithm>

namespace sparse_ce {

class BorrowedMemory {
 public:
  // `gradient` (classes, width), contiguous; dz is of `dtype`.
  BorrowedMemory(const Tensor& gradient, ScalarType dtype, int64_t rows, int64_t block_classes, int64_t spare)
      : memory_(flat(gradient, dtype)), rows_(rows), classes_(gradient.size(0)),
        width_(memory_.size(0) / std::max<int64_t>(1, classes_)), block_(block_classes), held_(classes_) {
    if (spare == 0 && rows <= width_) return;
    const int64_t most = std::max<int64_t>(0, classes_ - spare);
    held_ = (rows <= width_ ? most : most * width_ / rows) / block_ * block_;
  }

  int64_t block_classes() const { return block_; }

  // dz (n, classes) of the rows from `begin` on, by copy(to, from).
  template <typename copy_t>
  void keep(int64_t begin, const Tensor& dz, const copy_t& copy) {
    if (!beside_ && held_ < classes_) beside_ = empty(memory_, {(classes_ - held_) * rows_}, memory_.scalar_type());
    for_each_block([&](int64_t v, int64_t end, const Tensor& block) {
      copy(rows_of(block, begin, begin + dz.size(0)), columns_of(dz, v, end));
    });
  }

  // f(v, end, dz (rows, end - v)) for the classes [v, end) of each block, in the order in which it may be overwritten.
  template <typename function_t>
  void for_each_block(const function_t& f) const {
    for (int64_t v = 0; v < classes_; v += block_) {
      const int64_t end = std::min(classes_, v + block_);
      const Tensor block = v < held_ ? rows_of(memory_, place(v), place(end))
                                     : rows_of(*beside_, (v - held_) * rows_, (end - held_) * rows_);
      f(v, end, torch::stable::view(block, std::array{rows_, end - v}));
    }
  }

  // Whether the weight's gradient of the classes [v, end) lies where their block does.
  bool overwrites(int64_t v, int64_t end) const { return v < held_ && end * width_ > place(v); }

 private:
  int64_t place(int64_t v) const { return classes_ * width_ - (held_ - v) * rows_; }

  // The memory of `gradient` as elements of `dtype`.
  static Tensor flat(const Tensor& gradient, ScalarType dtype) {
    const int64_t count = gradient.numel() * size_in_bytes(gradient.scalar_type()) / size_in_bytes(dtype);
    if (gradient.scalar_type() == dtype) return torch::stable::view(gradient, std::array{count});
    return torch::stable::from_blob(gradient.mutable_data_ptr(), std::array{count}, std::array{int64_t(1)},
                                    gradient.device(), dtype);
  }

  Tensor memory_;
  int64_t rows_, classes_;
  int64_t width_;  // elements of dz's dtype
  int64_t block_, held_;
  OptionalTensor beside_;
};

}  // namespace sparse_ce
