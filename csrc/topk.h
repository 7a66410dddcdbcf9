// topk.h - which of a row's classes are its k largest where several tie for the last place: the lowest.
#pragma once

#include "dtype.h"

namespace sparse_ce {

struct TopkArgs {
  const void* logits;     // (rows, columns): unit column stride, any row stride
  DType dtype;
  int64_t rows, columns, row_stride, k;
  const void* last;       // (rows,) arithmetic dtype: the k-th largest
  const int64_t* above;   // (rows,) how many are above it
  bool largest;           // false: the k smallest, and "above" is below
  int64_t* ids;  // (rows, k): those above by ascending id, then those that tie; left as it is where last is NaN
  int64_t max_blocks;  // 0: no limit

  template <typename scalar_t>
  SCE_HD const scalar_t* row(int64_t r) const {
    return static_cast<const scalar_t*>(logits) + r * row_stride;
  }
};

// Where the ids of a row go, in the order in which they are found.
template <typename acc_t>
struct TopkRow {
  acc_t last;
  bool largest;
  int64_t k, above, found_above = 0, found_equal = 0;
  int64_t* ids;

  SCE_HD TopkRow(const TopkArgs& args, int64_t r)
      : last(static_cast<const acc_t*>(args.last)[r]), largest(args.largest), k(args.k), above(args.above[r]),
        ids(args.ids + r * args.k) {}

  SCE_HD bool without() const { return last != last; }
  SCE_HD bool full() const { return found_above >= above && found_equal >= k - above; }
  SCE_HD bool is_above(acc_t z) const { return largest ? z > last : z < last; }
  SCE_HD bool is_equal(acc_t z) const { return z == last; }
  // Class `id`, the so many-th of those above or of those that tie.
  SCE_HD void put_above(int64_t at, int64_t id) const {
    if (at < above) ids[at] = id;
  }
  SCE_HD void put_equal(int64_t at, int64_t id) const {
    if (at < k - above) ids[above + at] = id;
  }
};

namespace cpu {
void topk_ids(const TopkArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
