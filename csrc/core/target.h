// target.h - Defines the common layout to which every target format is converted before a kernel reads it, on host and
// device.
#pragma once

#include "dtype.h"

#include <cmath>

namespace sparse_ce {

// Represents an entry, which gives class `column` the weight `value`. `column` is -1 if there is no logit to read. The
// entry is then padding if its value is 0. A value of NaN means that the index is out of range; NaN reaches the loss
// and the gradient of the row.
template <typename acc_t>
struct Entry {
  int64_t column;
  acc_t value;
};

// Represents the entries [begin, end) of a row. `valid` is false if the offsets lie outside the entries.
struct EntryRange {
  int64_t begin, end;
  bool valid;
};

struct TargetView {
  const void* indices;      // (rows,), (rows, width) or (entries,): class of each entry
  const void* values;       // shape of indices; null means that every weight is 1
  const void* offsets;      // (rows + 1,) or (rows, 2); null means `width` entries per row
  const bool* row_mask;     // (rows,), true for active rows; or null
  const void* weight;       // (num_classes,) class weights in the arithmetic dtype, or null
  DType indices_dtype, values_dtype, offsets_dtype;
  int64_t rows, entries, width, num_classes, ignore_index;
  int64_t offsets_step;     // 1: row r ends where row r + 1 begins; 2: each row has its own [begin, end)
  bool labels;              // one class per row, without values or offsets
  bool logprobs;            // values are log-weights; false if there are no values

  // Returns the stored class of an entry.
  SCE_HD int64_t index(int64_t i) const { return load_int(indices, indices_dtype, i); }

  SCE_HD EntryRange row(int64_t r) const {
    if (!offsets) return {r * width, (r + 1) * width, true};
    const int64_t begin = load_int(offsets, offsets_dtype, r * offsets_step);
    const int64_t end = load_int(offsets, offsets_dtype, r * offsets_step + 1);
    const bool valid = 0 <= begin && begin <= end && end <= entries;
    return valid ? EntryRange{begin, end, true} : EntryRange{0, 0, false};
  }

  // Returns the rows [begin, end). The entries that offsets refer to keep their positions.
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

  // Returns true if a row is ignored, which means that it is neither read nor counted. A row without entries is not
  // ignored; it is a target of mass 0.
  SCE_HD bool ignored(int64_t r) const {
    if (row_mask && !row_mask[r]) return true;
    return has_width() && ignored_from(r, 0);
  }
  // These evaluate `ignored` in parts: whether each row has a first entry, and whether all entries from k on are
  // ignored.
  SCE_HD bool has_width() const { return !offsets && width > 0; }
  SCE_HD bool ignored_from(int64_t r, int64_t k) const {
    for (int64_t i = r * width + k; i < (r + 1) * width; ++i)
      if (index(i) != ignore_index) return false;
    return true;
  }

  // Returns the weight of an active row in a mean: the label's class weight for class labels, otherwise 1.
  template <typename acc_t>
  SCE_HD acc_t count(int64_t r) const {
    return weight && labels ? class_weight<acc_t>(entry<acc_t>(r).column) : acc_t(1);
  }

  // Detects padding by the stored value or ignore_index, before the index is used. An out-of-range index is an error
  // even if its log-probability underflows to a weight of 0, which contributes nothing.
  template <typename acc_t>
  SCE_HD bool is_padding(int64_t column, acc_t value) const {
    return value == (logprobs ? -acc_t(INFINITY) : acc_t(0)) || column == ignore_index;
  }
  template <typename acc_t>
  SCE_HD Entry<acc_t> entry_of(int64_t column, acc_t value) const {
    if (is_padding(column, value)) return {-1, acc_t(0)};
    if (column < 0 || column >= num_classes) return {-1, Limits<acc_t>::kNaN};
    if (!logprobs) return {column, value};
    // Uses std::exp, because `exponential` is 0 below -88 while subnormal weights extend to exp(-103).
    const acc_t weight = std::exp(value);
    return {weight == acc_t(0) ? -1 : column, weight};
  }
  template <typename acc_t>
  SCE_HD Entry<acc_t> entry(int64_t i) const {
    return entry_of(index(i), values ? load_float<acc_t>(values, values_dtype, i) : acc_t(1));
  }

  // Returns the class of an entry regardless of its weight, or the reason why it has none.
  static constexpr int64_t kPadding = -1, kOutside = -2;
  template <typename acc_t>
  SCE_HD int64_t column(int64_t i) const {
    const int64_t column = index(i);
    if (is_padding(column, values ? load_float<acc_t>(values, values_dtype, i) : acc_t(1))) return kPadding;
    return column < 0 || column >= num_classes ? kOutside : column;
  }

  // Returns the entry even if its weight underflows to 0. The value is NaN if its class is out of range.
  template <typename acc_t>
  SCE_HD Entry<acc_t> chosen(int64_t i) const {
    const int64_t class_of = column<acc_t>(i);
    if (class_of < 0) return {-1, class_of == kOutside ? Limits<acc_t>::kNaN : acc_t(0)};
    return {class_of, entry<acc_t>(i).value};
  }

  // Returns d weight / d value.
  template <typename acc_t>
  SCE_HD acc_t value_slope(const Entry<acc_t>& entry) const {
    return logprobs ? entry.value : acc_t(1);
  }

  template <typename acc_t>
  SCE_HD acc_t class_weight(int64_t column) const {
    return weight && column >= 0 ? static_cast<const acc_t*>(weight)[column] : acc_t(1);
  }

  // Returns w~, the entry's contribution to the weight of its class.
  template <typename acc_t>
  SCE_HD acc_t share(const Entry<acc_t>& entry) const {
    return entry.value * class_weight<acc_t>(entry.column);
  }
};

}  // namespace sparse_ce
