// entries_of_part.cuh - Keeps the entries of a row whose logits a group holds, from the loss to the gradient.
#pragma once

#include "many_entries.cuh"

namespace sparse_ce {
namespace cuda {

// Holds the sums over a row's entries: those of a part relative to a maximum, and the mass of all entries.
template <typename acc_t>
struct EntrySums {
  TargetStats<acc_t> part;
  acc_t mass = 0;

  SCE_HD void merge(const EntrySums& other) {
    part.merge(other.part);
    mass += other.mass;
  }
};

// Handles the entries of a row in the columns of a group's slice. If there are few, each thread holds one in registers,
// reads it while the logits are loaded and writes its gradient. Otherwise entries are read each time, and their logits
// from the slice; `kGradient` means that their gradients are needed.
template <typename slice_t, bool kGradient>
class EntriesOfPart {
  using scalar_t = typename slice_t::scalar_t;
  using acc_t = typename slice_t::acc_t;
  static constexpr int kWidth = slice_t::kWidth;
  using Group = RowGroup<kWidth>;
  using Warp = RowGroup<kWarp>;

 public:
  static constexpr int64_t kFew = kWidth == kWarp ? kWarp : 4 * kWarp;

  __device__ EntriesOfPart(const TargetView& target, EntryRange range, const scalar_t* row, const slice_t& slice)
      : target_(target), few_(range.end - range.begin <= kFew), alike_(range.end - range.begin <= kWarp) {
    if (!few()) {
      if (kGradient) slice.marks().clear();
      return;
    }
    const int64_t i = range.begin + rank();
    if (i < range.end) mine_ = target.template entry<acc_t>(i);
    if (slice.holds(mine_.column)) logit_ = to_acc(row[mine_.column]);
  }

  __device__ bool few() const { return few_; }

  // All threads of the group must call this function, after slice.share if there are many entries. The mass is bitwise
  // equal to that of mass_of_row. The first part also includes the entries that are out of range. Contains barriers if
  // a warp has too few lanes for the entries.
  __device__ EntrySums<acc_t> sums(const LogitTransform<acc_t>& transform, const slice_t& slice, EntryRange range,
                                   int part, acc_t max) const {
    TargetSums<LongSum<acc_t>> sums;
    LongSum<acc_t> mass;
    if (!range.valid) sums.mass.sum = mass.sum = Limits<acc_t>::kNaN;
    const auto add = [&](const Entry<acc_t>& entry, const auto& logit) {
      const acc_t share = target_.share(entry);
      mass.add(share);
      if (entry.column < 0 ? part == 0 : slice.holds(entry.column))
        sums.add(share, max, [&] { return entry.column < 0 ? max : transform(logit()); });
    };
    if (few()) {
      if (range.begin + rank() < range.end) add(mine_, [&] { return logit_; });
    } else {
      for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
        const auto entry = target_.template entry<acc_t>(i);
        add(entry, [&] { return slice.logit(slice.place_of(entry.column)); });
        if (!kGradient || !slice.holds(entry.column)) continue;
        slice.marks().mark(slice.place_of(entry.column));
      }
    }
    const EntrySums<acc_t> of_thread = {sums.template stats<acc_t>(), mass.sum};
    if (by_group()) return Group::template reduce<true>(of_thread);
    return Warp::broadcast(Warp::reduce(of_thread));
  }

  // Computes the gradients at the entries if there are few, before the dense gradient is written. Contains a barrier.
  __device__ void make(const GradientCoefficients<acc_t>& c, const LogitTransform<acc_t>& transform,
                       const slice_t& slice, EntryRange range) {
    if (!few()) return;
    const int me = Group::rank();
    const auto count = static_cast<int>(range.end - range.begin);
    const bool mine = me < count && slice.holds(mine_.column);
    const acc_t share = target_.share(mine_);
    SCE_SHARED(int4, all, [kThreads / 4]);  // places of the entries
    const int place = mine ? slice.place_of(mine_.column) : -1;
    if (count > 1 || kWidth == kWarp) {  // a block has synchronized since its logits were read
      reinterpret_cast<int*>(all)[threadIdx.x] = place;
      Group::sync();
    }
    bool most = false;
    if (mine) most = make_one(c, transform, range, count, all + (threadIdx.x - me) / 4, place);
    if (none(most)) return;
    const acc_t others = sum_of_threads(me < count && !most ? share : acc_t(0));
    if (!most) return;
    const auto [z, of_cap] = transform.with_slope(logit_);
    const acc_t of_z = c.at_most(z, target_.template class_weight<acc_t>(mine_.column), others);
    mine_.value = of_z * (transform.scale * of_cap);
  }

  // Stores these gradients.
  __device__ void write(const slice_t& slice, scalar_t* gradient) const {
    Group::sync();  // the dense gradient has been written
    if (place_ >= 0) from_acc(mine_.value, gradient[slice.origin() + place_]);
  }

  // Computes and stores the gradients at the entries if there are many, from the slice's logits. Contains barriers.
  __device__ void write_many(const GradientCoefficients<acc_t>& c, const LogitTransform<acc_t>& transform,
                             const slice_t& slice, EntryRange range, scalar_t* gradient) const {
    int most = -1;  // the place of this thread whose class holds most
    const auto write = [&](int place, acc_t sum) {
      const int64_t column = slice.origin() + place;
      const acc_t o = target_.template class_weight<acc_t>(column);
      const auto [z, of_cap] = transform.with_slope(slice.logit(place));
      if (c.holds_most(z)) most = place;
      from_acc((c.at(z, o) - c.d * (sum * o)) * (transform.scale * of_cap), gradient[column]);
    };
    Group::sync();  // the dense gradient has been written
    const auto marks = slice.marks();
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const auto entry = target_.template entry<acc_t>(i);
      if (!slice.holds(entry.column)) continue;
      const int place = slice.place_of(entry.column);
      if (!marks.several(place)) write(place, entry.value);
    }
    if (!Group::all(!marks.any_several()))
      RepeatedEntries<kWidth, acc_t>(target_, range, slice.origin(), marks).for_each_class(slice.places(), write);
    if (Group::all(most < 0)) return;
    const auto holds_most = [&](int64_t column) {
      return slice.holds(column) && c.holds_most(transform(slice.logit(slice.place_of(column))));
    };
    const acc_t others = mass_of_others<kWidth, acc_t>(target_, range, holds_most);
    if (most < 0) return;
    const int64_t column = slice.origin() + most;
    const auto [z, of_cap] = transform.with_slope(slice.logit(most));
    const acc_t of_z = c.at_most(z, target_.template class_weight<acc_t>(column), others);
    from_acc(of_z * (transform.scale * of_cap), gradient[column]);
  }

 private:
  __device__ int rank() const { return alike_ ? Warp::rank() : Group::rank(); }
  // Computes the gradient at this thread's entry. Returns true if its class holds most. `quads` are the places of all
  // `count` entries.
  __device__ bool make_one(const GradientCoefficients<acc_t>& c, const LogitTransform<acc_t>& transform,
                           EntryRange range, int count, const int4* quads, int place) {
    const int me = Group::rank();
    int alike = count > 1 ? 0 : 1;
#pragma unroll 4
    for (int k = 0; 4 * k < count && count > 1; ++k) {
      const int4 four = quads[k];
      alike += (four.x == place) + (four.y == place) + (four.z == place) + (four.w == place);
    }
    acc_t sum = mine_.value;
    bool first = true;
    if (alike > 1) {
      const int* places = reinterpret_cast<const int*>(quads);
      for (int k = 0; k < count; ++k) {
        if (k == me || places[k] != place) continue;
        first = first && k > me;
        sum += target_.template entry<acc_t>(range.begin + k).value;
      }
    }
    const acc_t o = target_.template class_weight<acc_t>(mine_.column);
    const auto [z, of_cap] = transform.with_slope(logit_);
    mine_.value = (c.at(z, o) - c.d * (sum * o)) * (transform.scale * of_cap);
    if (first) place_ = place;
    return c.holds_most(z);
  }

  // These are of the threads that hold the entries: a warp, or the group if there are more. `sum_of_threads` has the
  // bits of mass_of_others.
  __device__ bool by_group() const { return kWidth > kWarp && !alike_; }
  __device__ bool none(bool mine) const { return by_group() ? Group::all(!mine) : Warp::all(!mine); }
  __device__ acc_t sum_of_threads(acc_t mine) const {
    const Sum<acc_t> of_thread = {mine};
    return (by_group() ? Group::reduce(of_thread) : Warp::broadcast(Warp::reduce(of_thread))).sum;
  }

  const TargetView& target_;
  const bool few_, alike_;  // all warps of a block hold the same entries
  Entry<acc_t> mine_ = {-1, acc_t(0)};
  acc_t logit_ = 0;
  int place_ = -1;  // of the entry whose gradient this thread stores
};

}  // namespace cuda
}  // namespace sparse_ce
