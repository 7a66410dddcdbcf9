// entry_bitmap.cuh - Marks the columns of a row that have an entry in shared memory, one window of columns at a time.
#pragma once

#include "../../core/target.h"
#include "row_group.cuh"

namespace sparse_ce {
namespace cuda {

// Holds a bit for each column of a window. All threads of the group must call each function except `has`.
template <int kWidth>
class Marked {
  using Group = RowGroup<kWidth>;
  static constexpr int kAllWords = 2048;  // per block
  static constexpr int kWords = kAllWords / Group::kPerBlock;

 public:
  static constexpr int64_t kWindow = int64_t(kWords - 1) * 32;  // a pack may span two words

  // Marks the entries of a row in the columns [begin, end), which must fit into a window.
  template <typename acc_t>
  __device__ Marked(const TargetView& target, EntryRange range, int64_t begin, int64_t end, acc_t) : begin_(begin) {
    SCE_SHARED(unsigned, words, [kAllWords]);
    words_ = words + threadIdx.x / kWidth * kWords;
    Group::sync();  // the previous window may still be in use
    for (int w = Group::rank(); w < kWords; w += kWidth) words_[w] = 0;
    Group::sync();
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int64_t column = target.template chosen<acc_t>(i).column;
      if (column < begin || column >= end) continue;
      atomicOr(words_ + (column - begin) / 32, 1u << ((column - begin) % 32));
    }
    Group::sync();
  }

  // Returns the bits of up to 32 columns, with `column` in the lowest bit.
  __device__ unsigned from(int64_t column) const {
    const int64_t bit = column - begin_;
    const uint64_t both = static_cast<uint64_t>(words_[bit / 32 + 1]) << 32 | words_[bit / 32];
    return static_cast<unsigned>(both >> (bit % 32));
  }

 private:
  unsigned* words_;
  int64_t begin_;
};

// Calls f(begin, end, bits) for the columns [begin, end), one window at a time; see Marked for bits(column). Without
// `marked` there is one window and no bits.
template <int kWidth, typename acc_t, typename function_t>
__device__ void for_windows(bool marked, const TargetView& target, EntryRange range, int64_t begin, int64_t end,
                            const function_t& f) {
  if (!marked) return f(begin, end, [](int64_t) { return 0u; });
#pragma unroll 1
  for (int64_t from = begin; from < end; from += Marked<kWidth>::kWindow) {
    const int64_t to = from + Marked<kWidth>::kWindow < end ? from + Marked<kWidth>::kWindow : end;
    const Marked<kWidth> classes(target, range, from, to, acc_t(0));
    f(from, to, [&](int64_t column) { return classes.from(column); });
  }
}

}  // namespace cuda
}  // namespace sparse_ce
