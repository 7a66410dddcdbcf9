// linear/aliased_grad.h - Stores the gradient dz of all logits in the memory of the weight gradient. That memory is
// needed only once dz is complete; then one GEMM over all rows computes the weight gradient and rounds it once.
//
// dz is stored in blocks of classes with shape (rows, classes of the block). The blocks of the first `aliased` classes
// lie in the weight gradient's memory, the last of them at its end; the others have their own memory. GEMMs write the
// weight gradient from its beginning, block by block.
//
// No GEMM overwrites a block that a later one reads. The gradient up to class v ends before the block that begins with
// v, since v width <= classes width - (aliased - v) rows. This is true for aliased <= classes if rows <= width, and for
// aliased <= classes width / rows otherwise. A GEMM may overwrite the block that it reads itself, unless the memory of
// `spare` classes (at least one block) is left free before the first block.
#pragma once

#include "../device.h"

#include <algorithm>

namespace sparse_ce {

class BorrowedMemory {
 public:
  // `gradient` is (classes, width) and contiguous. dz has the given `dtype`. `beside` is memory for the rest of dz,
  // which is allocated unless given.
  BorrowedMemory(const Tensor& gradient, ScalarType dtype, int64_t rows, int64_t block_classes, int64_t spare,
                 const OptionalTensor& beside = std::nullopt)
      : memory_(flat(gradient, dtype)), rows_(rows), classes_(gradient.size(0)),
        width_(memory_.size(0) / std::max<int64_t>(1, classes_)), block_(block_classes), aliased_(classes_),
        beside_(beside) {
    if (spare == 0 && rows <= width_) return;
    const int64_t most = std::max<int64_t>(0, classes_ - spare);
    aliased_ = (rows <= width_ ? most : most * width_ / rows) / block_ * block_;
  }

  // Returns the number of elements of dz beside the gradient.
  int64_t beside() const { return (classes_ - aliased_) * rows_; }

  // Stores dz (n, classes) of the rows from `begin` on.
  void keep(int64_t begin, const Tensor& dz, const Device& device) {
    if (!beside_ && aliased_ < classes_) beside_ = empty(memory_, {beside()}, memory_.scalar_type());
    for_each_block([&](int64_t v, int64_t end, const Tensor& block) {
      Tensor to = rows_of(block, begin, begin + dz.size(0));
      const Tensor part = columns_of(dz, v, end);
      if (to.scalar_type() == dz.scalar_type()) return device.copy_matrix(to, part);
      torch::stable::copy_(to, part);
    });
  }

  // Calls f(v, end, dz (rows, end - v)) for the classes [v, end) of each block, in the order in which they may be
  // overwritten.
  template <typename function_t>
  void for_each_block(const function_t& f) const {
    for (int64_t v = 0; v < classes_; v += block_) {
      const int64_t end = std::min(classes_, v + block_);
      const Tensor block = v < aliased_ ? rows_of(memory_, place(v), place(end))
                                        : rows_of(*beside_, (v - aliased_) * rows_, (end - aliased_) * rows_);
      f(v, end, torch::stable::view(block, std::array{rows_, end - v}));
    }
  }

  // Returns true if the weight gradient of the classes [v, end) overlaps their block.
  bool overwrites(int64_t v, int64_t end) const { return v < aliased_ && end * width_ > place(v); }

 private:
  int64_t place(int64_t v) const { return classes_ * width_ - (aliased_ - v) * rows_; }

  // Returns the memory of `gradient` as elements of `dtype`.
  static Tensor flat(const Tensor& gradient, ScalarType dtype) {
    const int64_t count = gradient.numel() * size_in_bytes(gradient.scalar_type()) / size_in_bytes(dtype);
    if (gradient.scalar_type() == dtype) return torch::stable::view(gradient, std::array{count});
    return torch::stable::from_blob(gradient.mutable_data_ptr(), std::array{count}, std::array{int64_t(1)},
                                    gradient.device(), dtype);
  }

  Tensor memory_;
  int64_t rows_, classes_;
  int64_t width_;  // in elements of dz's dtype
  int64_t block_, aliased_;
  OptionalTensor beside_;
};

}  // namespace sparse_ce
