// classes_of_row.cuh - which of a row's entries are of the same class.
#pragma once

#include "../../core/target.h"
#include "row_group.cuh"

namespace sparse_ce {
namespace cuda {

// For each entry of a row: to find the first of its class, and to sum them, too.
constexpr int64_t kClassSlots = 2, kSumSlots = 4;

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
// table says where a class is first and whether it is alone. Those that are not are sorted by their class and then by
// their place, so that no class reads the row again and sums keep the order of the entries. The order in which threads
// meet makes no difference. `sums`: whether they are asked for.
template <int kWidth, bool of_select, bool sums, typename acc_t, typename target_t = TargetView>
class ClassesOfRow {
  using Group = RowGroup<kWidth>;
  static constexpr int64_t kFew = kWidth == 1 ? 2 : kWarp;  // what a thread reads one by one rather than in order
  static constexpr int kAllShared = 2048;                   // slots of a block, beside which others find room
  static constexpr int kShared = kAllShared / Group::kPerBlock;
  static constexpr int64_t kSlots = sums ? kSumSlots : kClassSlots;
  static constexpr int64_t kMost = int64_t(1) << 30;  // entries of a table: no device has memory for a row of more

 public:
  // Of the entries among the columns [begin, end). All threads of the group, each of which may ask for some then.
  // `slots`: kClassSlots or kSumSlots for each of the target's entries.
  __device__ ClassesOfRow(const target_t& target, EntryRange range, int64_t begin, int64_t end, uint32_t* slots)
      : target_(target), range_(range) {
    const int64_t entries = range.end - range.begin;
    if (entries <= kFew) return;
    sorted_ = sorted();
    if (sorted_ || entries <= kWarp || entries > kMost) return;
    table(begin, end, slots);
  }

  // Whether entry i is the first of its class, `column`.
  __device__ bool first(int64_t i, int64_t column) const { return first(i, column, found(column)); }

  // The same; then `sum` is that of weight(k, entry) over all of them, in their order.
  template <typename weight_t>
  __device__ bool sum(int64_t i, int64_t column, const weight_t& weight, acc_t& sum) const {
    static_assert(sums, "else they are not sorted");
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

  // Whether equal classes stand side by side.
  __device__ bool sorted() const {
    bool ascends = true;
    for (int64_t i = range_.begin + Group::rank(); i + 1 < range_.end; i += kWidth)
      ascends = ascends && target_.index(i) <= target_.index(i + 1);
    return Group::all(ascends);
  }

  // A slot is 0 or, of one class, twice the position of its first entry, counted from 1, and 1 where no other has come.
  // Half of them stay 0; nobody waits for one, so that rows of wrong offsets, which overlap, end all the same.
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
    Group::sync();  // the last row's may still be read
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

  // The keys of the entries whose classes are there more than once: the first of the class, and the entry. In shared
  // memory, since they are rare: registers are not.
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
    sort(first, keys().count);
  }

  // A bitonic sort whose pairs all ascend, so that what is not there counts as higher than all.
  __device__ static void sort(uint64_t* first, uint32_t count) {
#pragma unroll 1
    for (uint32_t sorted = 1; sorted < count; sorted *= 2) {
#pragma unroll 1
      for (uint32_t half = sorted, apart = 2 * sorted - 1; half > 0; half /= 2, apart = half) {
#pragma unroll 1
        for (uint32_t pair = Group::rank();; pair += kWidth) {
          const uint32_t low = 2 * pair - (pair & (half - 1)), high = low ^ apart;
          if (low >= count) break;
          if (high >= count) continue;
          const uint64_t a = first[low], b = first[high];
          if (a > b) first[low] = b, first[high] = a;
        }
        Group::sync();
      }
    }
  }

  // f(k) for the entries of the class that i is the first of, by what the table has of it.
  template <typename function_t>
  __device__ void for_listed(uint32_t known, int64_t i, const function_t& f) const {
    const uint64_t wanted = key(i - range_.begin, i - range_.begin);
    const uint32_t end = known % 2 == 0 ? keys().count : 0;
    const uint64_t* first = end > 0 ? keys().first : nullptr;
    uint32_t at = 0;
    for (uint32_t to = end; at < to;) {  // where its keys begin
      const uint32_t middle = (at + to) / 2;
      if (first[middle] < wanted)
        at = middle + 1;
      else
        to = middle;
    }
#pragma unroll 1
    for (int64_t k = i; k < range_.end; k = range_.begin + static_cast<uint32_t>(first[at])) {
      f(k);
      if (++at >= end || first[at] >> 32 != wanted >> 32) break;
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

  // What the table has of a class, or 0.
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
