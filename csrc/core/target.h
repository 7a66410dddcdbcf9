// target.h - the one layout that every form of target becomes before a kernel sees it. Host and device.
#pragma once

#include "dtype.h"

#include <cmath>

namespace sparse_ce {

// Entry i gives class column the weight value. column is -1 when there is no logit to read: with value 0 the entry is
// padding, with value NaN its index is out of range, and the NaN reaches the row's loss and gradient.
template <typename acc_t>
struct Entry {
  int64_t column;
  acc_t value;
};

// The entries [begin, end) of a row. `valid` is false when the offsets lead outside the entries.
struct EntryRange {
  int64_t begin, end;
  bool valid;
};

struct TargetView {
  const void* indices;      // (rows,), (rows, width) or (entries,): class of each entry
  const void* values;       // shape of indices, or null: every weight is 1
  const void* offsets;      // (rows + 1,) or (rows, 2), or null: width entries a row
  const bool* row_mask;     // (rows,), or null: true where the row counts
  const void* weight;       // (num_classes,) class weights in the arithmetic dtype, or null
  DType indices_dtype, values_dtype, offsets_dtype;
  int64_t rows, entries, width, num_classes, ignore_index;
  int64_t offsets_step;     // 1: row r ends where r + 1 begins; 2: each row has its own [begin, end)
  bool labels;              // one class a row, without values or offsets
  bool logprobs;            // values are logarithms of the weights; false where there are none

  // What is stored of an entry's class.
  SCE_HD int64_t index(int64_t i) const { return load_int(indices, indices_dtype, i); }

  SCE_HD EntryRange row(int64_t r) const {
    if (!offsets) return {r * width, (r + 1) * width, true};
    const int64_t begin = load_int(offsets, offsets_dtype, r * offsets_step);
    const int64_t end = load_int(offsets, offsets_dtype, r * offsets_step + 1);
    const bool valid = 0 <= begin && begin <= end && end <= entries;
    return valid ? EntryRange{begin, end, true} : EntryRange{0, 0, false};
  }

  // The rows [begin, end) alone; what the offsets lead to stays where it is.
  TargetView slice(int64_t begin, int64_t end) const {
    TargetView rows_of = *this;
    rows_of.rows = end - begin;
    if (row_mask) rows_of.row_mask = row_mask + begin;
    if (offsets) {
      rows_of.offsets = advance(offsets, offsets_dtype, begin * offsets_step);
      return rows_of;
    }
    rows_of.indices = advance(indices, indices_dtype, begin * width);
    if (values) rows_of.values = advance(values, values_dtype, begin * width);
    rows_of.entries = rows_of.rows * width;
    return rows_of;
  }

  // An ignored row is never read and never counted. A row without entries is not ignored: it is a target of mass 0.
  SCE_HD bool ignored(int64_t r) const {
    if (row_mask && !row_mask[r]) return true;
    return has_width() && ignored_from(r, 0);
  }
  // Whether each row has a first entry, and whether none from entry k on counts: `ignored` in parts.
  SCE_HD bool has_width() const { return !offsets && width > 0; }
  SCE_HD bool ignored_from(int64_t r, int64_t k) const {
    for (int64_t i = r * width + k; i < (r + 1) * width; ++i)
      if (index(i) != ignore_index) return false;
    return true;
  }

  // What a row that is not ignored counts for in a mean: its class weight where the target is class labels.
  template <typename acc_t>
  SCE_HD acc_t count(int64_t r) const {
    return weight && labels ? class_weight<acc_t>(entry<acc_t>(r).column) : acc_t(1);
  }

  // Padding is recognised by its stored value or by ignore_index before its index is used for anything else. An index
  // out of range is a mistake even where its log-probability underflows to a weight of 0, which adds nothing to a row.
  template <typename acc_t>
  SCE_HD bool is_padding(int64_t column, acc_t value) const {
    return value == (logprobs ? -acc_t(INFINITY) : acc_t(0)) || column == ignore_index;
  }
  template <typename acc_t>
  SCE_HD Entry<acc_t> entry_of(int64_t column, acc_t value) const {
    if (is_padding(column, value)) return {-1, acc_t(0)};
    if (column < 0 || column >= num_classes) return {-1, Limits<acc_t>::kNaN};
    if (!logprobs) return {column, value};
    // The library's: `exponential` stops at -88, but weights go on, as subnormals, to exp(-103).
    const acc_t weight = std::exp(value);
    return {weight == acc_t(0) ? -1 : column, weight};
  }
  template <typename acc_t>
  SCE_HD Entry<acc_t> entry(int64_t i) const {
    return entry_of(index(i), values ? load_float<acc_t>(values, values_dtype, i) : acc_t(1));
  }

  // The class of an entry, whatever its weight, or why it has none.
  static constexpr int64_t kPadding = -1, kOutside = -2;
  template <typename acc_t>
  SCE_HD int64_t column(int64_t i) const {
    const int64_t column = index(i);
    if (is_padding(column, values ? load_float<acc_t>(values, values_dtype, i) : acc_t(1))) return kPadding;
    return column < 0 || column >= num_classes ? kOutside : column;
  }

  // The same as an entry, of its weight, which may underflow to 0. NaN where there is no class.
  template <typename acc_t>
  SCE_HD Entry<acc_t> chosen(int64_t i) const {
    const int64_t class_of = column<acc_t>(i);
    if (class_of < 0) return {-1, class_of == kOutside ? Limits<acc_t>::kNaN : acc_t(0)};
    return {class_of, entry<acc_t>(i).value};
  }

  // d weight / d value.
  template <typename acc_t>
  SCE_HD acc_t value_slope(const Entry<acc_t>& entry) const {
    return logprobs ? entry.value : acc_t(1);
  }

  template <typename acc_t>
  SCE_HD acc_t class_weight(int64_t column) const {
    return weight && column >= 0 ? static_cast<const acc_t*>(weight)[column] : acc_t(1);
  }

  // w~, what an entry adds to the weight of its class.
  template <typename acc_t>
  SCE_HD acc_t share(const Entry<acc_t>& entry) const {
    return entry.value * class_weight<acc_t>(entry.column);
  }
};

}  // namespace sparse_ce
