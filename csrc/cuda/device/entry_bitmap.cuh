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

  // Represents a window that starts at column `begin`.
  __device__ explicit Marked(int64_t begin) : begin_(begin) {}

  // Marks the entries of a row in the columns [begin, end), which must fit into a window, and `also` if it is one of
  // these columns.
  template <typename acc_t>
  __device__ void mark(const TargetView& target, EntryRange range, int64_t end, int64_t also) {
    Group::sync();  // the previous window may still be in use
    for (int w = Group::rank(); w < kWords; w += kWidth) words()[w] = 0;
    Group::sync();
    const auto mark_one = [&](int64_t column) {
      if (begin_ <= column && column < end) atomicOr(words() + (column - begin_) / 32, 1u << ((column - begin_) % 32));
    };
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth)
      mark_one(target.template chosen<acc_t>(i).column);
    if (Group::rank() == 0) mark_one(also);
    Group::sync();
  }

  // Returns the bits of up to 32 columns, with `column` in the lowest bit.
  __device__ unsigned from(int64_t column) const {
    const int64_t bit = column - begin_;
    const uint64_t both = static_cast<uint64_t>(words()[bit / 32 + 1]) << 32 | words()[bit / 32];
    return static_cast<unsigned>(both >> (bit % 32));
  }

 private:
  // Computes the address each time, which saves a register.
  __device__ static unsigned* words() {
    SCE_SHARED(unsigned, words, [kAllWords]);
    return words + threadIdx.x / kWidth * kWords;
  }

  int64_t begin_;
};

// Calls f(begin, end, bits) for the columns [begin, end) of a row, one window at a time; see Marked for bits(column)
// and `also`. Without `marked` there is one window, whose bits are 0. f is instantiated once, because it may be most of
// a kernel.
template <int kWidth, typename acc_t, typename range_t, typename function_t>
__device__ void for_windows(bool marked, const TargetView& target, const range_t& range, int64_t begin, int64_t end,
                            int64_t also, const function_t& f) {
  int64_t to;
#pragma unroll 1
  for (int64_t from = begin; from < end; from = to) {
    to = marked && end - from > Marked<kWidth>::kWindow ? from + Marked<kWidth>::kWindow : end;
    Marked<kWidth> classes(from);
    if (marked) classes.template mark<acc_t>(target, range(), to, also);
    f(from, to, [&](int64_t column) { return marked ? classes.from(column) : 0u; });
  }
}

}  // namespace cuda
}  // namespace sparse_ce
