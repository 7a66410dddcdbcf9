// linear/weight_gradient.h - Computes the weight gradient dW = dz^T x, which is a sum over all rows.
//
// dz has the size of the logits, so that only a chunk of it exists at a time. There are three ways to sum dW:
//   kRows     Adds the product of each chunk of rows to dW. If dW has 16 bits, 8 more bits of each sum are kept apart
//             until the last chunk, which rounds it. If it has more, the GEMM itself adds.
//   kStored   Stores dz of all chunks in the memory of dW. Then a GEMM over all rows computes dW, and rounds it once.
//   kClasses  Computes the logits again, in chunks of classes. A GEMM over all rows computes dW of each chunk's
//             classes, and rounds it once. The sum over chunks is then the input gradient.
#pragma once

#include "aliased_grad.h"
#include "operands.h"

namespace sparse_ce {

enum class WeightSum { kRows, kStored, kClasses };

// Describes what the choice depends on.
struct WeightSumSizes {
  int64_t rows, classes, width;
  int64_t weight_bytes;  // of an element of dW
  bool exact;  // dW's dtype can hold dz without another rounding, and the GEMM does not add to dW
  bool low_exceeds_chunk;  // the low bits of dW are larger than the chunk that the caller's `chunk_rows` requests
  int64_t stored_rows;  // the most rows whose dz may have memory beside that of dW

  // Returns true if dz may be stored.
  bool storable() const {
    const bool fits = rows <= width * weight_bytes / 2;  // dz into the memory of dW
    return exact && (fits || (!low_exceeds_chunk && rows <= stored_rows));
  }

  // Returns the first way whose condition holds.
  //   way       condition                               reason
  //   kRows     All rows form one chunk.                There is nothing to sum.
  //   kClasses  The caller may recompute the logits     The low bits of dW, or the part of dz beside it, would take
  //             and has fewer rows than classes; dW     more memory than the low bits of the input gradient.
  //             has 16 bits; dz would not fit into it.
  //   kStored   dz is storable.                         dW is neither read nor rounded once per chunk.
  //   kRows     Always.                                 The other ways would need more memory or lose digits.
  WeightSum choose(int64_t chunk_rows, bool may_recompute) const {
    if (chunk_rows >= rows) return WeightSum::kRows;
    if (may_recompute && weight_bytes == 2 && rows < classes && !(storable() && rows <= width))
      return WeightSum::kClasses;
    return storable() ? WeightSum::kStored : WeightSum::kRows;
  }
};

template <typename device_t>
class WeightGradient {
  using Plan = typename device_t::Plan;

 public:
  // `gradient` is (classes, width). `chunk_classes` of all rows take the memory of a chunk. See LinearProducts::add for
  // `low`.
  WeightGradient(LinearOperands<device_t>& head, const Tensor& gradient, WeightSum way, int64_t chunk_rows,
                 int64_t chunk_classes, const OptionalTensor& low = std::nullopt)
      : head_(head), gradient_(gradient), dtype_(gradient.scalar_type()), chunk_rows_(chunk_rows), low_(low) {
    if (way == WeightSum::kClasses) head.reserve(head.rows * chunk_classes, head.rows);
    if (way == WeightSum::kStored) store(chunk_classes);
  }

  // Adds the contribution of dz: of the rows from `row` on and all classes, or of all rows and the classes from
  // `first_class` on. x has the input of these rows. `first` and `last` refer to the chunks of rows.
  void add(int64_t row, int64_t first_class, const Tensor& dz, const Tensor& x, bool first, bool last) {
    if (!stored_) return add_product(first_class, dz, x, first, last);
    stored_->keep(row, dz, device_t());
    if (last) multiply_stored();
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

  // Blocks of stored dz have as many classes as fit into a chunk, or as the device needs for an efficient GEMM.
  void store(int64_t chunk_classes) {
    int64_t block = std::min(head_.classes, head_.block_rows());
    if (one_product()) {
      const int64_t most = std::min(head_.classes / 8, Plan::kStoredBlockBytes / (2 * head_.width));
      block =
          Plan::kStoredBlockBytes == 0 ? chunk_classes : rounded_up(std::max<int64_t>(1, most), Plan::kRowsTogether);
    }
    head_.reserve(head_.rows * block, one_product() ? head_.rows : 0);
    stored_.emplace(gradient_, size_in_bytes(dtype_) == 2 ? dtype_ : head_.work, head_.rows, block,
                    Plan::kStoredBlockBytes > 0 ? block : 0);
  }

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

  LinearOperands<device_t>& head_;
  Tensor gradient_;
  ScalarType dtype_;
  int64_t chunk_rows_;
  OptionalTensor low_;
  std::optional<BorrowedMemory> stored_;
};

}  // namespace sparse_ce
