// sparse_softmax.h - what the bindings hand to a device: softmax over the entries of each row of a sparse matrix.
#pragma once

#include "math.h"

namespace sparse_ce {

// Row r has the entries [offsets[r], offsets[r + 1]), in the order of `order`. Each of `width` positions, the dense
// dimensions of a hybrid tensor, is a matrix of its own.
struct SparseSoftmaxArgs {
  const void* offsets;   // (rows + 1,), ascending from 0 to entries
  const int64_t* order;  // (entries,), a permutation, or null: rows lie one after the other
  DType offsets_dtype, dtype;
  int64_t rows, entries, width;
  bool log;
  const void* values;    // (entries, width); forward only
  const void* grad;      // (entries, width); backward only
  const void* output;    // (entries, width), what forward made; backward only
  void* result;          // (entries, width)
  int64_t max_blocks;    // 0: no limit. Tests lower it, so that blocks take several rows

  // Held within the entries, whatever the offsets and the order are.
  SCE_HD int64_t row_begin(int64_t r) const {
    const int64_t begin = load_int(offsets, offsets_dtype, r);
    return begin < 0 ? 0 : begin > entries ? entries : begin;
  }
  SCE_HD int64_t at(int64_t i) const {
    if (!order) return i;
    return static_cast<uint64_t>(order[i]) < static_cast<uint64_t>(entries) ? order[i] : i;
  }
};

namespace cpu {
void sparse_softmax(const SparseSoftmaxArgs& args);
void sparse_softmax_backward(const SparseSoftmaxArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
