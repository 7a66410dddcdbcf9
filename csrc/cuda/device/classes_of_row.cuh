// classes_of_row.cuh - Finds the entries of a row that have the same class.
#pragma once

#include "../../core/target.h"
#include "row_group.cuh"

namespace sparse_ce {
namespace cuda {

// Slots per entry of a row: to find the first entry of each class, and to sum the entries as well.
constexpr int64_t kClassSlots = 2, kSumSlots = 4;

// Counts entries by column, over all classes: those below the group's columns and those in them.
template <typename T>
struct ColumnCounts {
  T below = 0, own = 0;

  SCE_HD void merge(const ColumnCounts& other) {
    below += other.below;
    own += other.own;
  }
};

// Sorts keys in memory that the group shares. Runs a bitonic sort whose pairs are all ascending, so that missing keys
// count as the largest ones. All threads of the group must call this function. Contains barriers.
template <int kWidth>
__device__ void sort_keys(uint64_t* first, uint32_t count) {
#pragma unroll 1
  for (uint32_t sorted = 1; sorted < count; sorted *= 2) {
#pragma unroll 1
    for (uint32_t half = sorted, apart = 2 * sorted - 1; half > 0; half /= 2, apart = half) {
#pragma unroll 1
      for (uint32_t pair = RowGroup<kWidth>::rank();; pair += kWidth) {
        const uint32_t low = 2 * pair - (pair & (half - 1)), high = low ^ apart;
        if (low >= count) break;
        if (high >= count) continue;
        const uint64_t a = first[low], b = first[high];
        if (a > b) first[low] = b, first[high] = a;
      }
      RowGroup<kWidth>::sync();
    }
  }
}

// Determines whether an entry is the first of its class in its row, and the sum of the weights of its class.
//
// A few entries are compared one by one. In a sorted row, as in a coalesced COO or a CSR tensor, neighbors are
// compared. For any other row a hash table stores the first entry of each class and whether it is the only one. Entries
// of repeated classes are sorted by class and position, so that no class reads the row again and sums keep the order of
// the entries. The result does not depend on the order of the threads. `sums` is true if sums are requested.
template <int kWidth, bool of_select, bool sums, typename acc_t, typename target_t = TargetView>
class ClassesOfRow {
  using Group = RowGroup<kWidth>;
  static constexpr int64_t kFew = kWidth == 1 ? 2 : kWarp;  // a thread compares up to this many entries one by one
  static constexpr int kAllShared = 2048;                   // slots per block; leaves shared memory for other data
  static constexpr int kShared = kAllShared / Group::kPerBlock;
  static constexpr int64_t kSlots = sums ? kSumSlots : kClassSlots;
  static constexpr int64_t kMost = int64_t(1) << 30;  // entries in a table; longer rows exceed any device's memory

 public:
  // Handles the entries in the columns [begin, end). All threads of the group must call the constructor; then each
  // thread may query entries. `slots` has kClassSlots or kSumSlots for each entry of the target.
  __device__ ClassesOfRow(const target_t& target, EntryRange range, int64_t begin, int64_t end, uint32_t* slots)
      : target_(target), range_(range) {
    const int64_t entries = range.end - range.begin;
    if (entries <= kFew) return;
    sorted_ = sorted();
    if (sorted_ || entries <= kWarp || entries > kMost) return;
    table(begin, end, slots);
  }

  // Returns true if entry i is the first of its class, `column`.
  __device__ bool first(int64_t i, int64_t column) const { return first(i, column, found(column)); }

  // Returns the same, and sets `sum` to the sum of weight(k, entry) over the class, in the order of the entries.
  template <typename weight_t>
  __device__ bool sum(int64_t i, int64_t column, const weight_t& weight, acc_t& sum) const {
    static_assert(sums, "entries are sorted only for sums");
    const uint32_t known = found(column);
    if (!first(i, column, known)) return false;
    sum = 0;
    const auto add = [&](int64_t k) {
      const auto entry = of_select ? target_.template chosen<acc_t>(k) : target_.template entry<acc_t>(k);
      if (entry.column >= 0) sum += weight(k, entry);
    };
    if (known != 0) {
      for_listed(known, i, add);
      return true;
    }
    for (int64_t k = i; k < range_.end; ++k) {
      if (target_.index(k) == column)
        add(k);
      else if (sorted_)
        break;
    }
    return true;
  }

 private:
  __device__ int64_t column_of(int64_t k) const {
    return of_select ? target_.template column<acc_t>(k) : target_.template entry<acc_t>(k).column;
  }

  // Returns true if equal classes are adjacent.
  __device__ bool sorted() const {
    bool ascends = true;
    for (int64_t i = range_.begin + Group::rank(); i + 1 < range_.end; i += kWidth)
      ascends = ascends && target_.index(i) <= target_.index(i + 1);
    return Group::all(ascends);
  }

  // A slot is 0 or belongs to one class. It then holds twice the position of the class's first entry, counted from 1,
  // plus 1 if there is no other entry. Half of the slots stay 0. Threads never wait for a slot, so the loop ends even
  // for rows with invalid offsets, which overlap.
  __device__ void table(int64_t begin, int64_t end, uint32_t* slots) {
    const int64_t entries = range_.end - range_.begin;
    const bool shares = kWidth >= kWarp && kClassSlots * entries <= kShared;
    if (shares) {
      SCE_SHARED(uint32_t, shared, [kAllShared]);
      slots_ = shared + threadIdx.x / kWidth * kShared;
      size_ = static_cast<uint32_t>(kClassSlots * entries);
    } else {
      const auto counts = counts_of(begin, end);
      slots_ = slots + kSlots * (range_.begin + counts.below);
      size_ = static_cast<uint32_t>(kClassSlots * counts.own);
    }
    Group::sync();  // the table of the previous row may still be in use
    for (uint32_t s = Group::rank(); s < size_; s += kWidth) slots_[s] = 0;
    if (sums && Group::rank() == 0) keys() = {nullptr, 0};
    Group::sync();
    bool alone = true;
    for_each([&](int64_t i, int64_t column) {
      if (column < begin || column >= end) return;
      const auto mine = static_cast<uint32_t>(2 * (i - range_.begin + 1));
      uint32_t slot = home(column);
      for (uint32_t tries = 0; tries < size_; ++tries, slot = after(slot)) {
        const uint32_t found = atomicCAS(slots_ + slot, 0u, mine + 1);
        if (found == 0) return;
        if (!is_of(found, column)) continue;
        atomicMin(slots_ + slot, mine);
        atomicAnd(slots_ + slot, ~1u);
        alone = false;
        return;
      }
    });
    Group::sync();
    if (!sums || Group::all(alone)) return;
    list(begin, end, shares ? slots + kSlots * (range_.begin + counts_of(begin, end).below) : slots_ + size_);
  }

  // Holds the keys of entries with repeated classes: the first entry of the class, and the entry. They are rare, so the
  // struct is in shared memory rather than in registers.
  struct Keys {
    uint64_t* first;
    uint32_t count;
  };
  __device__ static Keys& keys() {
    SCE_SHARED(Keys, of_groups, [Group::kPerBlock]);
    return of_groups[threadIdx.x / kWidth];
  }
  __device__ static uint64_t key(int64_t first, int64_t position) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(position);
  }

  __device__ void list(int64_t begin, int64_t end, uint32_t* room) const {
    auto* first = reinterpret_cast<uint64_t*>(room);
    if (Group::rank() == 0) keys().first = first;
    for_each([&](int64_t i, int64_t column) {
      if (column < begin || column >= end) return;
      const uint32_t known = found(column);
      if (known % 2 == 0 && known != 0) first[atomicAdd(&keys().count, 1u)] = key(known / 2 - 1, i - range_.begin);
    });
    Group::sync();
    sort_keys<kWidth>(first, keys().count);
  }

  // Calls f(k) for the entries of the class whose first entry is i. `known` is the class's slot in the table.
  template <typename function_t>
  __device__ void for_listed(uint32_t known, int64_t i, const function_t& f) const {
    const uint64_t sought = key(i - range_.begin, i - range_.begin);
    const uint32_t end = known % 2 == 0 ? keys().count : 0;
    const uint64_t* first = end > 0 ? keys().first : nullptr;
    uint32_t at = 0;
    for (uint32_t to = end; at < to;) {  // finds the first key of the class
      const uint32_t middle = (at + to) / 2;
      if (first[middle] < sought)
        at = middle + 1;
      else
        to = middle;
    }
#pragma unroll 1
    for (int64_t k = i; k < range_.end; k = range_.begin + static_cast<uint32_t>(first[at])) {
      f(k);
      if (++at >= end || first[at] >> 32 != sought >> 32) break;
    }
  }

  template <typename function_t>
  __device__ void for_each(const function_t& f) const {
    for (int64_t i = range_.begin + Group::rank(); i < range_.end; i += kWidth) f(i, column_of(i));
  }

  __device__ ColumnCounts<int64_t> counts_of(int64_t begin, int64_t end) const {
    ColumnCounts<int64_t> counts;
    for_each([&](int64_t, int64_t column) {
      counts.below += 0 <= column && column < begin;
      counts.own += begin <= column && column < end;
    });
    return Group::broadcast(Group::reduce(counts));
  }

  // Returns the slot of a class in the table, or 0.
  __device__ uint32_t found(int64_t column) const {
    uint32_t slot = home(column);
    for (uint32_t tries = 0; tries < size_; ++tries, slot = after(slot)) {
      const uint32_t found = slots_[slot];
      if (is_of(found, column)) return found;
    }
    return 0;
  }
  __device__ bool first(int64_t i, int64_t column, uint32_t known) const {
    if (known != 0) return known / 2 - 1 == i - range_.begin;
    for (int64_t k = i; k-- > range_.begin;) {
      if (target_.index(k) == column) {
        if (column_of(k) >= 0) return false;
      } else if (sorted_) {
        break;
      }
    }
    return true;
  }
  __device__ bool is_of(uint32_t slot, int64_t column) const {
    const int64_t k = range_.begin + slot / 2 - 1;
    return slot != 0 && k < range_.end && target_.index(k) == column;
  }
  __device__ uint32_t home(int64_t column) const {
    const uint64_t mixed = static_cast<uint64_t>(column) * 0x9e3779b97f4a7c15u >> 32;
    return static_cast<uint32_t>(mixed * size_ >> 32);
  }
  __device__ uint32_t after(uint32_t slot) const { return slot + 1 < size_ ? slot + 1 : 0; }

  const target_t& target_;
  const EntryRange range_;
  bool sorted_ = false;
  uint32_t* slots_ = nullptr;
  uint32_t size_ = 0;
};

}  // namespace cuda
}  // namespace sparse_ce
