// classes_of_row.cuh - which of a row's entries are of the same class.
#pragma once

#include "../target.h"
#include "row_group.cuh"

namespace sparse_ce {
namespace cuda {

constexpr int64_t kClassSlots = 2;  // for each entry of a row

// Of the entries among all classes, those below the group's columns and those in them.
template <typename T>
struct ColumnCounts {
  T below = 0, own = 0;

  SCE_HD void merge(const ColumnCounts& other) {
    below += other.below;
    own += other.own;
  }
};

// Tells of an entry whether it is the first of its class in its row, and what all of them weigh. Few entries are read
// one by one for each; of a sorted row, as a coalesced COO or a CSR tensor has it, its neighbours; in any other a hash
// table says where a class is first and whether it is alone, else the entries behind are read: one that is there again
// is rare, and sums keep the order of the entries. The order in which threads meet makes no difference.
template <int kWidth, bool of_select, typename acc_t>
class ClassesOfRow {
  using Group = RowGroup<kWidth>;
  static constexpr int64_t kFew = kWidth == 1 ? 2 : kWarp;  // what a thread reads one by one rather than in order
  static constexpr int kAllShared = 4096;                   // slots of a block
  static constexpr int kShared = kAllShared / Group::kPerBlock;
  static constexpr int64_t kMost = int64_t(1) << 30;  // entries of a table: no device has memory for a row of more

 public:
  // Of the entries among the columns [begin, end). All threads of the group, each of which may ask for some then.
  // `slots`: kClassSlots for each of the target's entries.
  __device__ ClassesOfRow(const TargetView& target, EntryRange range, int64_t begin, int64_t end, uint32_t* slots)
      : target_(target), range_(range) {
    const int64_t entries = range.end - range.begin;
    if (entries <= kFew) return;
    sorted_ = sorted();
    if (sorted_ || entries <= kWarp || entries > kMost) return;
    table(begin, end, slots);
  }

  // Whether entry i is the first of its class, `column`; then no other is at `last` or behind it.
  __device__ bool first(int64_t i, int64_t column, int64_t& last) const {
    last = range_.end;
    uint32_t slot = home(column);
    for (uint32_t tries = 0; tries < size_; ++tries, slot = after(slot)) {
      const uint32_t found = slots_[slot];
      if (!is_of(found, column)) continue;
      if (found % 2 == 1) last = i + 1;
      return found / 2 - 1 == i - range_.begin;
    }
    for (int64_t k = i; k-- > range_.begin;) {
      if (index(k) == column) {
        if (column_of(k) >= 0) return false;
      } else if (sorted_) {
        break;
      }
    }
    return true;
  }

  // The same; then `sum` is that of weight(k, entry) over all of them, in their order.
  template <typename weight_t>
  __device__ bool sum(int64_t i, int64_t column, const weight_t& weight, acc_t& sum) const {
    int64_t last;
    if (!first(i, column, last)) return false;
    sum = 0;
    for (int64_t k = i; k < last; ++k) {
      if (index(k) == column) {
        const auto entry = of_select ? target_.template chosen<acc_t>(k) : target_.template entry<acc_t>(k);
        if (entry.column >= 0) sum += weight(k, entry);
      } else if (sorted_) {
        break;
      }
    }
    return true;
  }

 private:
  __device__ int64_t index(int64_t k) const { return load_int(target_.indices, target_.indices_dtype, k); }
  __device__ int64_t column_of(int64_t k) const {
    return of_select ? target_.template column<acc_t>(k) : target_.template entry<acc_t>(k).column;
  }

  // Whether equal classes stand side by side.
  __device__ bool sorted() const {
    bool ascends = true;
    for (int64_t i = range_.begin + Group::rank(); i + 1 < range_.end; i += kWidth)
      ascends = ascends && index(i) <= index(i + 1);
    return Group::all(ascends);
  }

  // A slot is 0 or, of one class, twice the position of its first entry, counted from 1, and 1 where no other has come.
  // Half of them stay 0; nobody waits for one, so that rows of wrong offsets, which overlap, end all the same.
  __device__ void table(int64_t begin, int64_t end, uint32_t* slots) {
    const int64_t entries = range_.end - range_.begin;
    const auto for_own = [&](const auto& f) {
      for (int64_t i = range_.begin + Group::rank(); i < range_.end; i += kWidth) f(i, column_of(i));
    };
    if (kWidth >= kWarp && kClassSlots * entries <= kShared) {
      SCE_SHARED(uint32_t, shared, [kAllShared]);
      slots_ = shared + threadIdx.x / kWidth * kShared;
      size_ = static_cast<uint32_t>(kClassSlots * entries);
    } else {
      ColumnCounts<int64_t> counts;
      for_own([&](int64_t, int64_t column) {
        counts.below += 0 <= column && column < begin;
        counts.own += begin <= column && column < end;
      });
      counts = Group::broadcast(Group::reduce(counts));
      slots_ = slots + kClassSlots * (range_.begin + counts.below);
      size_ = static_cast<uint32_t>(kClassSlots * counts.own);
    }
    Group::sync();  // the last row's may still be read
    for (uint32_t s = Group::rank(); s < size_; s += kWidth) slots_[s] = 0;
    Group::sync();
    for_own([&](int64_t i, int64_t column) {
      if (column < begin || column >= end) return;
      const auto mine = static_cast<uint32_t>(2 * (i - range_.begin + 1));
      uint32_t slot = home(column);
      for (uint32_t tries = 0; tries < size_; ++tries, slot = after(slot)) {
        const uint32_t found = atomicCAS(slots_ + slot, 0u, mine + 1);
        if (found == 0) return;
        if (!is_of(found, column)) continue;
        atomicMin(slots_ + slot, mine);
        atomicAnd(slots_ + slot, ~1u);
        return;
      }
    });
    Group::sync();
  }
  __device__ bool is_of(uint32_t slot, int64_t column) const {
    const int64_t k = range_.begin + slot / 2 - 1;
    return slot != 0 && k < range_.end && index(k) == column;
  }
  __device__ uint32_t home(int64_t column) const {
    const uint64_t mixed = static_cast<uint64_t>(column) * 0x9e3779b97f4a7c15u >> 32;
    return static_cast<uint32_t>(mixed * size_ >> 32);
  }
  __device__ uint32_t after(uint32_t slot) const { return slot + 1 < size_ ? slot + 1 : 0; }

  const TargetView& target_;
  const EntryRange range_;
  bool sorted_ = false;
  uint32_t* slots_ = nullptr;
  uint32_t size_ = 0;
};

}  // namespace cuda
}  // namespace sparse_ce
