// linear/plan.h - Plans a linear head: how many rows form a chunk, and how the weight gradient is summed over chunks.
//
// dz has the size of the logits, so that only a chunk of it exists at a time. There are three ways to sum dW = dz^T x:
//   kRows     Adds the product of each chunk of rows to dW. If dW has 16 bits, 8 more bits of each sum are kept apart
//             until the last chunk, which rounds it. If it has more, the GEMM itself adds.
//   kStored   Stores dz of all chunks in the memory of dW. Then a GEMM over all rows computes dW, and rounds it once.
//   kClasses  Computes the logits again, in chunks of classes. A GEMM over all rows computes dW of each chunk's
//             classes, and rounds it once. The sum over chunks is then the input gradient.
#pragma once

#include "../../ops/linear_chunks.h"
#include "products.h"

#include <algorithm>
#include <optional>

namespace sparse_ce {

enum class WeightSum { kRows, kStored, kClasses };

// Describes a head whose `rows` are multiplied.
struct HeadShape {
  ScalarType input, weight;  // their dtypes
  int64_t rows, classes, width;
  bool float32_logits;  // the logits must not be rounded to 16 bits
  bool copies_rows = false;  // the caller copies rows of the input and of its gradient
};

template <typename device_t>
class LinearPlan {
  using Device = typename device_t::Plan;

 public:
  // The logits of a chunk may take `ample_bytes` unless `chunk_rows` is given.
  LinearPlan(const HeadShape& head, std::optional<int64_t> chunk_rows, int64_t ample_bytes)
      : work(device_t().work_dtype(head.input, head.float32_logits)), products(work),
        logits(head.float32_logits ? products.dtype() : work), head_(head) {
    const int64_t given = chunk_rows.value_or(head.rows);
    low_exceeds_chunk = chunk_rows && std::min(head.rows, given) * size_in_bytes(work) < head.width;
    stored_rows_ = Device::stored_rows(head.width, chunk_rows.has_value());
    this->chunk_rows = std::min(head.rows, chunk_rows ? given : default_chunk_rows<Device>(sizes(ample_bytes)));
  }

  // Returns the way to sum dW: the first one whose condition holds. The caller may recompute the logits if `recomputes`
  // is given, and does it in any case if that is true. Otherwise it does if `chunk_rows` requests less memory than a
  // sum of dW takes, in forward and in backward, so that the gradients of both have the same bits.
  //   way       condition                               reason
  //   kRows     All rows form one chunk.                There is nothing to sum.
  //   kClasses  The caller may recompute the logits     The low bits of dW, or the part of dz beside it, would take
  //             and has fewer rows than classes; dW     more memory than the low bits of the input gradient.
  //             has 16 bits; dz would not fit into it.
  //   kStored   dz is storable.                         dW is neither read nor rounded once per chunk.
  //   kRows     Always.                                 The other ways would need more memory or lose digits.
  WeightSum weight_sum(std::optional<bool> recomputes) const {
    const bool may_recompute = recomputes && (*recomputes || low_exceeds_chunk);
    if (chunk_rows >= head_.rows) return WeightSum::kRows;
    if (may_recompute && size_in_bytes(head_.weight) == 2 && head_.rows < head_.classes &&
        !(storable() && head_.rows <= head_.width))
      return WeightSum::kClasses;
    return storable() ? WeightSum::kStored : WeightSum::kRows;
  }

  // Returns how many classes of all rows fit into a chunk's memory.
  int64_t chunk_classes() const {
    constexpr int64_t kLeastClasses = 256;
    const int64_t rows = std::max<int64_t>(1, head_.rows);
    return std::min(head_.classes, std::max(kLeastClasses, chunk_rows * head_.classes / rows));
  }

  // Returns the number of rows of size `width` in a block, of the weight, a product or the input.
  static int64_t block_rows(int64_t width) {
    return std::max<int64_t>(256, Device::kBlockBytes / (4 * std::max<int64_t>(1, width)));
  }

  // Returns the classes of a block of stored dz: as many as fit into a chunk, or as the device needs for an efficient
  // GEMM.
  int64_t stored_classes() const {
    if (!products.direct(head_.weight)) return std::min(head_.classes, block_rows(head_.width));
    if (Device::kStoredBlockBytes == 0) return chunk_classes();
    const int64_t most = std::min(head_.classes / 8, Device::kStoredBlockBytes / (2 * head_.width));
    return rounded_up(std::max<int64_t>(1, most), Device::kRowsTogether);
  }

  // Returns the dtype of stored dz.
  ScalarType stored() const { return size_in_bytes(head_.weight) == 2 ? head_.weight : work; }

  const ScalarType work;  // of the GEMMs' operands
  const LinearProducts<device_t> products;
  const ScalarType logits;  // the dtype of the logits
  int64_t chunk_rows;
  bool low_exceeds_chunk;  // the low bits of dW are larger than the chunk that the caller's `chunk_rows` requests

 private:
  // Returns true if dz may be stored. dW's dtype can then hold dz without another rounding, and the GEMM does not add
  // to dW. The range of dW's dtype must be that of the products to hold dz. The GEMM adds to a dW with the dtype of its
  // operands, and more than 16 bits.
  bool storable() const {
    const ScalarType weight = head_.weight;
    const int64_t bytes = size_in_bytes(weight);
    const bool exact = bytes == 2 ? weight == work || (weight == ScalarType::BFloat16 && work == ScalarType::Float)
                                  : weight != work && products.holds(weight);
    const bool fits = head_.rows <= head_.width * bytes / 2;  // dz into the memory of dW
    return exact && (fits || (!low_exceeds_chunk && head_.rows <= stored_rows_));
  }

  HeadSizes sizes(int64_t ample_bytes) const {
    const int64_t size = size_in_bytes(work);
    const int64_t row = head_.classes * (size + (logits != work ? size_in_bytes(logits) : 0));
    const int64_t copied = head_.copies_rows || head_.input != work ? 2 * head_.width * size : 0;
    return {head_.rows, head_.classes, head_.width, size_in_bytes(head_.input), row, copied, storable(), ample_bytes};
  }

  HeadShape head_;
  int64_t stored_rows_;  // the most rows whose dz may have memory beside that of dW
};

}  // namespace sparse_ce
