// many_entries.cuh - Processes the entries of a row's part in shared memory, if there are more than threads keep.
#pragma once

#include "row_passes.cuh"

namespace sparse_ce {
namespace cuda {

// Holds two bits for each place of a group's part of a row: whether its class has an entry, and whether it has several.
template <int kWidth>
class EntryMarks {
  using Group = RowGroup<kWidth>;

 public:
  // `words` has room for both bits of `places` places.
  __device__ EntryMarks(uint32_t* words, int places)
      : any_(words), several_(words + places / 32), words_(static_cast<uint32_t>(places) / 32) {}

  // All threads of the group must call this function, and synchronize before the first mark.
  __device__ void clear() const {
    for (uint32_t w = Group::rank(); w < 2 * words_; w += kWidth) any_[w] = 0;
  }
  // Marks the class of an entry.
  __device__ void mark(int place) const {
    const uint32_t bit = 1u << (place % 32);
    if (atomicOr(any_ + place / 32, bit) & bit) atomicOr(several_ + place / 32, bit);
  }
  // Returns the first bits of `count` places from `place` on, which must be in one word. `count` is less than 32.
  __device__ unsigned any(int place, int count) const {
    const auto at = static_cast<unsigned>(place);
    return any_[at / 32] >> (at % 32) & ((1u << count) - 1u);
  }
  __device__ bool several(int place) const { return (several_[place / 32] >> (place % 32) & 1u) != 0; }
  // Returns true if this thread finds a class with several entries; the threads of the group share the places.
  __device__ bool any_several() const {
    uint32_t found = 0;
    for (uint32_t w = Group::rank(); w < words_; w += kWidth) found |= several_[w];
    return found != 0;
  }

  // Returns memory for `room` keys, which overwrite the first bit of each place.
  __device__ uint64_t* keys() const { return reinterpret_cast<uint64_t*>(any_); }
  __device__ uint32_t room() const { return words_ / 2; }

 private:
  uint32_t *any_, *several_;
  uint32_t words_;
};

// Finds the sum of the entries of each class that has several. The entries of a class are added in their order, as
// ClassesOfRow does, so the sum does not depend on the order of the threads.
template <int kWidth, typename acc_t>
class RepeatedEntries {
  using Group = RowGroup<kWidth>;

 public:
  // `origin` is the column of the first place.
  __device__ RepeatedEntries(const TargetView& target, EntryRange range, int64_t origin, EntryMarks<kWidth> marks)
      : target_(target), range_(range), origin_(origin), marks_(marks) {}

  // Calls f(place, sum) for each place below `end` whose class has several entries. Processes as many classes at once
  // as have entries for which there is memory. All threads of the group must call this function.
  template <typename function_t>
  __device__ void for_each_class(int end, const function_t& f) const {
    int width = end;
#pragma unroll 1
    for (int from = 0; from < end;) {
      const int to = width < end - from ? from + width : end;
      const uint32_t found = collect(from, to);
      if (found > marks_.room() && to - from > 1) {
        width = (to - from) / 2;
        continue;
      }
      if (found <= marks_.room())
        sum_collected(found, f);
      else if (Group::rank() == 0)
        f(from, sum_of(from));
      width = to - from < end / 2 ? 2 * (to - from) : end;
      from = to;
    }
  }

 private:
  // Returns how many entries of the places [begin, end) have a class with several, and stores them if there is room.
  __device__ uint32_t collect(int begin, int end) const {
    SCE_SHARED(uint32_t, counts, [Group::kPerBlock]);
    uint32_t& count = counts[threadIdx.x / kWidth];
    Group::sync();  // the previous keys may still be in use
    if (Group::rank() == 0) count = 0;
    Group::sync();
    for (int64_t i = range_.begin + Group::rank(); i < range_.end; i += kWidth) {
      const int64_t place = target_.template entry<acc_t>(i).column - origin_;
      if (place < begin || place >= end || !marks_.several(static_cast<int>(place))) continue;
      const uint32_t at = atomicAdd(&count, 1u);
      if (at < marks_.room())
        marks_.keys()[at] = static_cast<uint64_t>(place) << 32 | static_cast<uint64_t>(i - range_.begin);
    }
    Group::sync();
    return count;
  }

  template <typename function_t>
  __device__ void sum_collected(uint32_t found, const function_t& f) const {
    const uint64_t* keys = marks_.keys();
    sort_keys<kWidth>(marks_.keys(), found);
    for (uint32_t first = Group::rank(); first < found; first += kWidth) {
      const uint64_t place = keys[first] >> 32;
      if (first > 0 && keys[first - 1] >> 32 == place) continue;
      acc_t sum = 0;
#pragma unroll 1
      for (uint32_t at = first; at < found && keys[at] >> 32 == place; ++at)
        sum += target_.template entry<acc_t>(range_.begin + static_cast<uint32_t>(keys[at])).value;
      f(static_cast<int>(place), sum);
    }
  }

  // Returns the sum of one class with more entries than there is memory for.
  __device__ acc_t sum_of(int place) const {
    acc_t sum = 0;
#pragma unroll 1
    for (int64_t i = range_.begin; i < range_.end; ++i) {
      const auto entry = target_.template entry<acc_t>(i);
      if (entry.column - origin_ == place) sum += entry.value;
    }
    return sum;
  }

  const TargetView& target_;
  const EntryRange range_;
  const int64_t origin_;
  const EntryMarks<kWidth> marks_;
};

}  // namespace cuda
}  // namespace sparse_ce
