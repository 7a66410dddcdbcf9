// row_loops.h - Distributes rows over threads, as whole rows or as spans of columns. The result is the same.
#pragma once

#include "../../torch_calls.h"
#include "../memory/nontemporal.h"

#include <algorithm>
#include <cstdint>

namespace sparse_ce {
namespace cpu {

// With fewer logits than this, waking a thread does not pay off.
constexpr int64_t kGrain = 16384;

// Whole rows are distributed if there are enough of them; otherwise long rows are split into spans.
inline bool split_rows(int64_t rows, int64_t spans) {
  return rows < int64_t(torch::stable::get_num_threads()) && spans > 1;
}

template <typename function_t>
void parallel_rows(int64_t rows, int64_t columns, const function_t& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    f(begin, end);
    finish_stores();
  });
}

template <typename function_t>
void parallel_spans(int64_t rows, int64_t spans, const function_t& f) {
  torch::stable::parallel_for(0, rows * spans, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / spans, i % spans);
    finish_stores();
  });
}

}  // namespace cpu
}  // namespace sparse_ce
