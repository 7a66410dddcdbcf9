// entries_of_part.cuh - Keeps the entries of a row whose logits a group holds, from the loss to the gradient.
#pragma once

#include "row_passes.cuh"

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

// Handles the entries of a row in the columns [begin, end) of a group. If there are few, each thread holds one in
// registers, reads it while the logits are loaded and writes its gradient. Otherwise entries are read each time.
template <typename slice_t>
class EntriesOfPart {
  using scalar_t = typename slice_t::scalar_t;
  using acc_t = typename slice_t::acc_t;
  static constexpr int kWidth = slice_t::kWidth;
  using Group = RowGroup<kWidth>;
  using Warp = RowGroup<kWarp>;
  static constexpr int64_t kFew = kWidth == kWarp ? kWarp : 4 * kWarp;

 public:
  __device__ EntriesOfPart(const TargetView& target, EntryRange range, const scalar_t* row, int64_t begin, int64_t end)
      : target_(target), range_(range), begin_(begin), end_(end) {
    if (!few()) return;
    const int64_t i = range.begin + rank();
    if (i < range.end) mine_ = target.template entry<acc_t>(i);
    if (own(mine_.column)) logit_ = to_acc(row[mine_.column]);
  }

  // All threads of the group must call this function. The mass is bitwise equal to that of mass_of_row. The first part
  // also includes the entries that are out of range. Contains barriers if a warp has too few lanes for the entries.
  __device__ EntrySums<acc_t> sums(const LogitTransform<acc_t>& transform, const scalar_t* row, int part,
                                   acc_t max) const {
    TargetSums<LongSum<acc_t>> sums;
    LongSum<acc_t> mass;
    if (!range_.valid) sums.mass.sum = mass.sum = Limits<acc_t>::kNaN;
    const auto add = [&](const Entry<acc_t>& entry, const auto& logit) {
      const acc_t share = target_.share(entry);
      mass.add(share);
      if (entry.column < 0 ? part == 0 : own(entry.column))
        sums.add(share, max, [&] { return entry.column < 0 ? max : transform(logit()); });
    };
    if (few()) {
      if (range_.begin + rank() < range_.end) add(mine_, [&] { return logit_; });
    } else {
      for (int64_t i = range_.begin + Group::rank(); i < range_.end; i += kWidth) {
        const auto entry = target_.template entry<acc_t>(i);
        add(entry, [&] { return to_acc(row[entry.column]); });
      }
    }
    const EntrySums<acc_t> of_thread = {sums.template stats<acc_t>(), mass.sum};
    if (kWidth > kWarp && !alike()) return Group::template reduce<true>(of_thread);
    return Warp::broadcast(Warp::reduce(of_thread));
  }

  // Computes the gradients at the entries, before the dense gradients are written; `write` stores them afterwards. Both
  // contain barriers. See make_entry_gradients for `workspace`.
  __device__ void make(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                       const LogitTransform<acc_t>& transform, const scalar_t* row, EntryGradient<acc_t>* workspace) {
    if (!few()) {
      const auto same = classes_of_row<kWidth>(target_, range_, begin_, end_, workspace);
      make_entry_gradients<kWidth>(args, c, transform, same, range_, row, begin_, end_, workspace);
      return Group::sync();  // all logits at the entries have been read
    }
    const int me = Group::rank();
    const auto count = static_cast<int>(range_.end - range_.begin);
    const bool mine = me < count && own(mine_.column);
    SCE_SHARED(int4, all, [kThreads / 4]);  // columns of the entries relative to the part
    const int place = mine ? static_cast<int>(mine_.column - begin_) : -1;
    if (count > 1 || kWidth == kWarp) {  // a block has synchronized since its logits were read
      reinterpret_cast<int*>(all)[threadIdx.x] = place;
      Group::sync();
    }
    if (!mine) {
      mine_.column = -1;
      return;
    }
    int alike = count > 1 ? 0 : 1;
    const int4* quads = all + (threadIdx.x - me) / 4;
#pragma unroll 4
    for (int k = 0; 4 * k < count && count > 1; ++k) {
      const int4 four = quads[k];
      alike += (four.x == place) + (four.y == place) + (four.z == place) + (four.w == place);
    }
    const acc_t o = target_.template class_weight<acc_t>(mine_.column);
    const auto [z, of_cap] = transform.with_slope(logit_);
    acc_t sum = mine_.value;
    bool first = true;
    if (alike > 1) {
      const int* places = reinterpret_cast<const int*>(quads);
      for (int k = 0; k < count; ++k) {
        if (k == me || places[k] != place) continue;
        first = first && k > me;
        sum += target_.template entry<acc_t>(range_.begin + k).value;
      }
    }
    mine_.value = c.at(z, o, sum * o) * (transform.scale * of_cap);
    if (!first) mine_.column = -1;
  }

  __device__ void write(const EntryGradient<acc_t>* workspace, scalar_t* gradient) const {
    Group::sync();  // the dense gradient has been written
    if (!few()) return write_entry_gradients<kWidth>(target_, range_, begin_, end_, workspace, gradient);
    if (mine_.column >= 0) from_acc(mine_.value, gradient[mine_.column]);
  }

 private:
  __device__ bool few() const { return range_.end - range_.begin <= kFew; }
  // Returns true if all warps of a block hold the same entries.
  __device__ bool alike() const { return range_.end - range_.begin <= kWarp; }
  __device__ int rank() const { return alike() ? Warp::rank() : Group::rank(); }
  __device__ bool own(int64_t column) const { return column >= begin_ && column < end_; }

  const TargetView& target_;
  const EntryRange range_;
  const int64_t begin_, end_;
  Entry<acc_t> mine_ = {-1, acc_t(0)};
  acc_t logit_ = 0;
};

}  // namespace cuda
}  // namespace sparse_ce
