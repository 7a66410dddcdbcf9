// active_rows.h - Selects the active (not ignored) rows of a target that the host can read. The linear head runs its
// GEMMs on these rows only. This header does not depend on torch.
#pragma once

#include "../core/target.h"

#include <optional>
#include <vector>

namespace sparse_ce {

struct ActiveRows {
  std::vector<int64_t> rows;    // ascending
  std::vector<int64_t> ranges;  // (rows, 2): the entries [begin, end) of each row

  // Returns nothing if all rows are active.
  static std::optional<ActiveRows> of(const TargetView& target) {
    ActiveRows active;
    for (int64_t r = 0; r < target.rows; ++r) {
      if (target.ignored(r)) continue;
      const EntryRange range = target.row(r);
      active.rows.push_back(r);
      active.ranges.insert(active.ranges.end(), {range.begin, range.end});
    }
    if (active.count() == target.rows) return std::nullopt;
    return active;
  }

  int64_t count() const { return static_cast<int64_t>(rows.size()); }

  // Returns the target of the active rows. Entries keep their positions.
  TargetView view(const TargetView& target) const {
    TargetView of_active = target;
    of_active.rows = count();
    of_active.row_mask = nullptr;
    of_active.offsets = ranges.data();
    of_active.offsets_dtype = DType::kInt64;
    of_active.offsets_step = 2;
    return of_active;
  }

  // Returns true if the active rows [begin, end) are adjacent in the target.
  bool adjacent(int64_t begin, int64_t end) const {
    return rows[static_cast<size_t>(end - 1)] - rows[static_cast<size_t>(begin)] == end - 1 - begin;
  }
};

// Copies to[to_rows[i]] = from[from_rows[i]] for rows of `width` elements. A null array stands for i itself.
struct CopyRowsArgs {
  const void* from;
  void* to;
  DType from_dtype, to_dtype;
  int64_t from_stride, to_stride;
  const int64_t *from_rows, *to_rows;
  int64_t count, width;
};

namespace cpu {
void copy_rows(const CopyRowsArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
