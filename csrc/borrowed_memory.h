// borrowed_memory.h - the gradient dz of all logits in the memory of the weight's gradient, which needs it only once dz
// is complete: then it is one product over all rows, rounded once.
//
// dz lies in blocks of classes, (rows, classes of the block) each, the last at the end of the memory. Where rows <=
// width, the weight's gradient up to class v ends before the block that begins with v: v width <= vocab width -
// (vocab - v) rows. So in this order no product overwrites what a later one reads, but perhaps what it reads itself.
#pragma once

#include "gemm.h"

#include <algorithm>

namespace sparse_ce {

class BorrowedMemory {
 public:
  // `gradient` (vocab, width), contiguous; no more rows than width.
  BorrowedMemory(const Tensor& gradient, int64_t rows, int64_t block_classes)
      : memory_(torch::stable::view(gradient, std::array{gradient.numel()})), rows_(rows), classes_(gradient.size(0)),
        width_(gradient.size(1)), block_(block_classes) {}

  int64_t block_classes() const { return block_; }

  // dz (n, vocab) of the rows from `begin` on.
  void keep(int64_t begin, const Tensor& dz) const {
    for_each_block([&](int64_t v, int64_t end, const Tensor& block) {
      Tensor rows = rows_of(block, begin, begin + dz.size(0));
      torch::stable::copy_(rows, columns_of(dz, v, end));
    });
  }

  // f(v, end, dz (rows, end - v)) for the classes [v, end) of each block, in the order in which it may be overwritten.
  template <typename function_t>
  void for_each_block(const function_t& f) const {
    for (int64_t v = 0; v < classes_; v += block_) {
      const int64_t end = std::min(classes_, v + block_);
      f(v, end, torch::stable::view(rows_of(memory_, place(v), place(end)), std::array{rows_, end - v}));
    }
  }

  // Whether the weight's gradient of the classes [v, end) lies where their block does.
  bool overwrites(int64_t v, int64_t end) const { return end * width_ > place(v); }

 private:
  int64_t place(int64_t v) const { return classes_ * width_ - (classes_ - v) * rows_; }

  Tensor memory_;
  int64_t rows_, classes_, width_, block_;
};

}  // namespace sparse_ce
