// linear_chunks.h - Chooses how many rows of the linear head's input form a chunk. This header does not depend on
// torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sparse_ce {

struct HeadSizes {
  int64_t rows, classes, width;
  int64_t input_bytes;   // of an element of the input
  int64_t row_bytes;     // of a row's logits, summed over all dtypes that are stored
  int64_t copied_bytes;  // of a row of the input and of its gradient if these are copied, else 0
  bool borrows;          // true if dz is stored in the weight gradient's memory
  int64_t ample_bytes;   // the logits of a chunk may take these bytes, even if the device's budget is smaller
};

inline int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Returns the largest chunk that fits the device's budget, reduced so that all chunks have about the same size. Copied
// rows of the input and of its gradient share the budget. If dz is stored and not all rows fit into one chunk, larger
// chunks are not faster.
template <typename plan_t>
int64_t default_chunk_rows(const HeadSizes& head) {
  constexpr int64_t kLeastCopies = int64_t(16) << 20;
  const int64_t rows = head.rows, logits = rows * head.row_bytes;
  const bool whole = logits <= std::max(plan_t::whole_bytes(head.borrows), head.ample_bytes);
  if (whole && rows * head.copied_bytes <= std::max(logits / 4, kLeastCopies)) return std::max<int64_t>(1, rows);
  const int64_t several = std::max(plan_t::chunk_bytes(head), head.borrows ? 0 : head.ample_bytes);
  const int64_t budget = whole ? logits : several;
  const int64_t row = head.row_bytes + head.copied_bytes;
  const int64_t most = std::max<int64_t>(1, std::max(budget, kLeastCopies) / row);
  const int64_t count = (rows + most - 1) / most;
  const int64_t even = (rows + count - 1) / count;
  return std::max<int64_t>(1, std::min(most, rounded_up(even, plan_t::kRowsTogether)));
}

}  // namespace sparse_ce
