// linear/rows.h - Selects the active rows of the linear head's input and of its gradient, in place or as a copy.
#pragma once

#include "../device.h"

namespace sparse_ce {

// Sets the rows [begin, end) of `t` to 0.
inline void clear_rows(const Tensor& t, int64_t begin, int64_t end) {
  if (begin == end) return;
  Tensor slice = rows_of(t, begin, end);
  torch::stable::zero_(slice);
}

template <typename device_t>
class LinearRows {
 public:
  explicit LinearRows(const ActiveRows* active) : active_(active) {}

  bool all() const { return !active_; }

  // Returns a view of the active rows [begin, end) of `t` (rows of the input, width), or nothing if not adjacent.
  OptionalTensor in_place(const Tensor& t, int64_t begin, int64_t end) const {
    if (!active_) return rows_of(t, begin, end);
    if (!active_->adjacent(begin, end)) return std::nullopt;
    const int64_t first = active_->rows[static_cast<size_t>(begin)];
    return rows_of(t, first, first + end - begin);
  }

  // These copy the rows of `apart` from `begin` on, as many as `together` has.
  void gather(const Tensor& apart, const Tensor& together, int64_t begin) const {
    copy(apart, active_->rows.data() + begin, together, nullptr, together.size(0));
  }
  void scatter(const Tensor& together, const Tensor& apart, int64_t begin) const {
    copy(together, nullptr, apart, active_->rows.data() + begin, together.size(0));
  }

  // Sets the gradient of ignored rows to 0.
  void clear_others(const Tensor& gradient) const {
    if (!active_) return;
    int64_t from = 0;
    for (const int64_t r : active_->rows) {
      clear_rows(gradient, from, r);
      from = r + 1;
    }
    clear_rows(gradient, from, gradient.size(0));
  }

 private:
  static void copy(const Tensor& from, const int64_t* from_rows, const Tensor& to, const int64_t* to_rows,
                   int64_t count) {
    CopyRowsArgs args{};
    args.from = from.const_data_ptr();
    args.from_dtype = to_dtype(from, "input", /*integer=*/false);
    args.from_stride = from.stride(0);
    args.from_rows = from_rows;
    args.to = to.mutable_data_ptr();
    args.to_dtype = to_dtype(to, "input", /*integer=*/false);
    args.to_stride = to.stride(0);
    args.to_rows = to_rows;
    args.count = count;
    args.width = from.size(1);
    device_t().copy_rows(args);
  }

  const ActiveRows* active_;  // or null if all rows are active
};

}  // namespace sparse_ce
