// row_entries.h - Collects and prepares the entries of one row.
#pragma once

#include "../../ops/cross_entropy.h"
#include "../simd/tile.h"

#include <algorithm>
#include <vector>

namespace sparse_ce {
namespace cpu {

struct WideSum {
  double sum = 0;
  void add(double x) { sum += x; }
};

// Holds the entries of a row as arrays without padding, so that each step is a loop of independent iterations.
template <typename acc_t>
class RowEntries {
 public:
  std::vector<int64_t> columns;
  std::vector<acc_t> class_weights;  // o; empty without class weights
  std::vector<acc_t> weights;        // w~
  std::vector<acc_t> logits;         // as stored; later the gradient in backward
  std::vector<int64_t> positions;    // positions in the target; only for select
  double elsewhere = 0;              // sum of the weights that have no local logit, after `arrange`

  size_t size() const { return columns.size(); }

  void clear() { resize(0); }

  // Collects the entries of a row. For select it also stores positions, and keeps entries whose weights underflow to 0.
  template <bool of_select = false>
  void collect(const TargetView& target, int64_t r) {
    const EntryRange range = target.row(r);
    const size_t most = static_cast<size_t>(range.end - range.begin);
    columns.resize(most);
    weights.resize(most);
    elsewhere = 0;
    if (of_select) {
      positions.resize(most);
      collect_chosen(target, range);
      return weigh(target);
    }
    with_index(target.indices_dtype, [&](auto index) {
      const auto* indices = static_cast<const decltype(index)*>(target.indices) + range.begin;
      if (!target.values) return collect_from(target, indices, [](size_t) { return acc_t(1); });
      with_storage(target.values_dtype, [&](auto storage) {
        const auto* values = static_cast<const decltype(storage)*>(target.values) + range.begin;
        collect_from(target, indices, [=](size_t k) { return static_cast<acc_t>(to_acc(values[k])); });
      });
    });
    weigh(target);
  }

  // Adds an entry of weight 0, before `arrange`.
  void add(int64_t column, const TargetView& target) {
    columns.push_back(column);
    weights.push_back(acc_t(0));
    if (target.weight) class_weights.push_back(target.template class_weight<acc_t>(column));
  }

  // Adds up the weights of equal columns, in the order of the entries, so that sums are reproducible. Keeps the first
  // logit of each column if logits are present. Returns true if columns ascend.
  bool merge_repeated() {
    uint64_t descents = 0;  // in the sign bit, which vectors of any instruction set can compute and combine
    SCE_SIMD(reduction(| : descents))
    for (size_t k = 1; k < size(); ++k) descents |= static_cast<uint64_t>(columns[k] - columns[k - 1] - 1);
    const bool ascending = descents >> 63 == 0;
    if (!ascending && may_repeat()) merge_duplicates();
    return ascending;
  }

  // Merges equal columns, removes entries without a local logit, and orders the others by spans of columns. Ascending
  // columns, as in COO and CSR, are already ordered. `gathered` means that the logits of all classes are present;
  // otherwise they must be gathered afterwards.
  void arrange(const CrossEntropyArgs& args, size_t spans, bool gathered = false) {
    first_class_ = args.first_class;
    if (args.first_class > 0 || args.vocab < args.target.num_classes) keep_local(args);
    logits.resize(size());
    const bool ascending = merge_repeated();
    span_begin_.assign(spans + 1, 0);
    if (spans > 1) {
      for (const int64_t column : columns) ++span_begin_[span_of(column) + 1];
      for (size_t t = 1; t < spans; ++t) span_begin_[t] += span_begin_[t - 1];
      if (!ascending) order_by_span(gathered);
    }
    span_begin_[spans] = size();
    logits.resize(size());
  }

  // Returns the sums over the entries, computed in lanes of doubles because a row may have a hundred thousand entries.
  // A class of weight 0 adds 0 even if its logit is -inf.
  TargetStats<acc_t> sums(acc_t max, const LogitTransform<acc_t>& transform) {
    const acc_t* z = logits.data();
    if (!transform.identity()) {
      transformed_.resize(size());
      transform_all(transform, transformed_.data(), nullptr);
      z = transformed_.data();
    }
    const double dot = sum_in_lanes<double, kSums>(0, static_cast<int64_t>(size()), [&](int64_t k) {
      const acc_t term = weights[k] * (z[k] - max);
      return double(weights[k] == acc_t(0) ? acc_t(0) : term);
    });
    return {static_cast<acc_t>(dot), mass()};
  }
  acc_t mass() const {
    const auto count = static_cast<int64_t>(size());
    return static_cast<acc_t>(sum_in_lanes<double, kSums>(0, count, [&](int64_t k) { return double(weights[k]); }));
  }

  size_t span_begin(size_t t) const { return span_begin_[t]; }

  // Has one bit per column of a span, which is set if the column has no entry.
  struct Others {
    uint32_t bits[kSpan / 32];
  };
  Others without_entries(size_t t) const {
    Others others;
    std::fill_n(others.bits, kSpan / 32, ~0u);
    for (size_t k = span_begin_[t]; k < span_begin_[t + 1]; ++k)
      others.bits[in_span(columns[k]) / 32] &= ~(1u << in_span(columns[k]) % 32);
    return others;
  }

  template <typename row_t>
  void gather(const row_t& row, size_t begin, size_t end) {
    for (size_t k = begin; k < end; ++k) logits[k] = to_acc(row[columns[k]]);
  }
  // Computes z of the logits, possibly in place, and the slopes; see Tile::transform.
  void transform_all(const LogitTransform<acc_t>& transform, acc_t* z, acc_t* slopes) const {
    Tile<acc_t>::transform(logits.data(), static_cast<int64_t>(size()), transform, z, slopes);
  }

 private:
  static constexpr int64_t kSums = 8;  // a single sum would wait for each addition

  size_t span_of(int64_t column) const { return static_cast<uint64_t>(column - first_class_) / kSpan; }
  size_t in_span(int64_t column) const { return static_cast<uint64_t>(column - first_class_) % kSpan; }

  void keep_local(const CrossEntropyArgs& args) {
    size_t kept = 0;
    for (size_t k = 0; k < size(); ++k) {
      columns[kept] = columns[k];
      weights[kept] = weights[k];
      if (!class_weights.empty()) class_weights[kept] = class_weights[k];
      args.holds(columns[k]) ? void(++kept) : void(elsewhere += static_cast<double>(weights[k]));
    }
    resize(kept);
  }

  // Stores as many entries as there is room for, with index k and value(k) each.
  template <typename index_t, typename value_t>
  void collect_from(const TargetView& target, const index_t* indices, const value_t& value) {
    // In most rows all entries have a class. These are copied, and vectors verify the assumption: a negative number is
    // detected by its sign bit, which every instruction set can combine.
    const bool by_index = target.ignore_index < 0 || target.ignore_index >= target.num_classes;
    const size_t most = columns.size();
    uint64_t outside = 0;
    SCE_SIMD(reduction(| : outside))
    for (size_t k = 0; k < most; ++k) {
      const auto column = static_cast<int64_t>(indices[k]);
      columns[k] = column;
      outside |= static_cast<uint64_t>(column) | static_cast<uint64_t>(target.num_classes - 1 - column);
    }
    uint32_t nothing = 0;
    SCE_SIMD(reduction(| : nothing))
    for (size_t k = 0; k < most; ++k) {
      weights[k] = value(k);
      nothing |= weights[k] == acc_t(0);
    }
    if (by_index && !target.logprobs && outside >> 63 == 0 && nothing == 0) return;
    size_t kept = 0;
    for (size_t k = 0; k < most; ++k) {
      const Entry<acc_t> entry = target.entry_of(static_cast<int64_t>(indices[k]), value(k));
      columns[kept] = entry.column;
      weights[kept] = entry.value;
      kept += entry.column >= 0;  // out-of-range indices were rejected before
    }
    resize(kept);
  }

  void collect_chosen(const TargetView& target, EntryRange range) {
    size_t kept = 0;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const Entry<acc_t> entry = target.chosen<acc_t>(i);
      columns[kept] = entry.column;
      weights[kept] = entry.value;
      positions[kept] = i;
      kept += entry.column >= 0;
    }
    resize(kept);
  }

  // Applies the class weights, if there are any.
  void weigh(const TargetView& target) {
    if (!target.weight) return;
    class_weights.resize(size());
    for (size_t k = 0; k < size(); ++k) {
      class_weights[k] = target.template class_weight<acc_t>(columns[k]);
      weights[k] = target.share(Entry<acc_t>{columns[k], weights[k]});
    }
  }

  void resize(size_t count) {
    columns.resize(count);
    weights.resize(count);
    if (!class_weights.empty()) class_weights.resize(count);
  }

  // Returns false if no column occurs twice, which is almost always the case. Uses one bit for each column modulo
  // 65536.
  bool may_repeat() {
    constexpr size_t kWords = 1024;
    marks_.resize(kWords);
    const auto word = [this](int64_t column) -> uint64_t& {
      return marks_[static_cast<uint64_t>(column) / 64 % kWords];
    };
    uint64_t repeated = 0;
    for (const int64_t column : columns) {
      const uint64_t bit = uint64_t(1) << (column & 63);
      repeated |= word(column) & bit;
      word(column) |= bit;
    }
    for (const int64_t column : columns) word(column) = 0;
    return repeated != 0;
  }

  // Merges duplicates with a hash table of columns, without sorting and without memory proportional to the vocabulary.
  void merge_duplicates() {
    const size_t count = size();
    size_t slots = 8;
    while (slots < 4 * count) slots *= 2;
    if (seen_.size() < slots) seen_.assign(slots, Seen{0, 0});
    const size_t mask = seen_.size() - 1;
    ++row_;
    size_t kept = 0;
    for (size_t k = 0; k < count; ++k) {
      size_t slot = (static_cast<uint64_t>(columns[k]) * 0x9e3779b97f4a7c15u >> 32) & mask;
      while (seen_[slot].row == row_ && columns[seen_[slot].position] != columns[k]) slot = (slot + 1) & mask;
      if (seen_[slot].row == row_) {
        weights[seen_[slot].position] += weights[k];
        continue;
      }
      seen_[slot] = {row_, kept};
      columns[kept] = columns[k];
      logits[kept] = logits[k];
      if (!class_weights.empty()) class_weights[kept] = class_weights[k];
      weights[kept++] = weights[k];
    }
    resize(kept);
  }

  // Orders the entries by spans with a counting sort.
  void order_by_span(bool gathered) {
    position_.resize(size());
    cursor_ = span_begin_;
    for (size_t k = 0; k < size(); ++k) position_[k] = cursor_[span_of(columns[k])]++;
    const auto move = [this](auto& array, auto& scratch) {
      scratch.resize(array.size());
      for (size_t k = 0; k < array.size(); ++k) scratch[position_[k]] = array[k];
      array.swap(scratch);
    };
    move(columns, moved_columns_);
    move(weights, moved_weights_);
    move(class_weights, moved_weights_);
    if (!gathered) return;
    logits.resize(size());  // only the first entry of each column is kept
    move(logits, moved_weights_);
  }

  struct Seen {
    size_t row;       // if it is another row, the slot is free
    size_t position;  // position in columns
  };
  std::vector<Seen> seen_;
  size_t row_ = 0;
  std::vector<uint64_t> marks_;  // all 0 between calls
  int64_t first_class_ = 0;
  std::vector<size_t> span_begin_, cursor_, position_;
  std::vector<int64_t> moved_columns_;
  std::vector<acc_t> moved_weights_, transformed_;
};

}  // namespace cpu
}  // namespace sparse_ce
