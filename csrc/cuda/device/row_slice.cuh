// row_slice.cuh - Processes a group's part of a row between the loss and the gradient.
#pragma once

#include "many_entries.cuh"
#include "row_storage.cuh"

namespace sparse_ce {
namespace cuda {

// Represents a group's part of a row. Its threads share the 16-byte packs, kStride columns apart. Columns that are no
// classes are -inf. Places are counted from the slice's first pack, in 32 bits to save registers.
template <typename scalar, int kThreadsOfRow, typename storage_t>
struct RowSlice {
  using scalar_t = scalar;
  using acc_t = acc_type<scalar_t>;
  static constexpr int kWidth = kThreadsOfRow, kSize = Pack<scalar_t>::kSize, kStride = kWidth * kSize;
  static constexpr int kUnroll = storage_t::kUnroll;
  static constexpr bool kInRegisters = storage_t::kAll;
  static constexpr int blocks(bool plain) { return storage_t::blocks(plain); }
  using Group = RowGroup<kWidth>;

  // Creates slice `part` of a row, with at most `packs` packs per thread.
  __device__ RowSlice(const scalar_t* row, int64_t classes, int part, int packs) : storage_(packs) {
    const int columns = storage_.count() * kStride;
    origin_ = int64_t(part) * columns - misalignment(row);
    lead_ = part == 0 ? misalignment(row) : 0;
    const int64_t count = classes - origin_;
    count_ = count < 0 ? 0 : count < columns ? static_cast<int>(count) : columns;
  }

  __device__ static int misalignment(const scalar_t* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(scalar_t));
  }

  // These give all threads of the group access to its logits, after share. A place is the position of a column from the
  // slice's first pack on.
  __device__ void share() const { storage_.share(); }
  __device__ int64_t origin() const { return origin_; }
  __device__ int place_of(int64_t column) const { return static_cast<int>(column - origin_); }
  __device__ int places() const { return count_; }
  __device__ acc_t logit(int place) const {
    return to_acc(reinterpret_cast<const scalar_t*>(storage_.shared())[place]);
  }
  // Returns marks of the group's places, which follow the packs of all groups in shared memory.
  __device__ EntryMarks<kWidth> marks() const {
    SCE_DYNAMIC_SHARED(uint4, shared);
    const int places = storage_.count() * kStride;
    auto* words = reinterpret_cast<uint32_t*>(shared + storage_.count() * kThreads);
    return {words + threadIdx.x / kWidth * (places / 16), places};
  }

  // These bound the classes [begin, end) of the group.
  __device__ int64_t begin() const { return origin_ + lead_; }
  __device__ int64_t end() const { return origin_ + count_; }
  __device__ bool holds(int64_t column) const { return begin() <= column && column < end(); }

  // Starts to load the logits, which are available after wait. `negated` means that the smallest number is needed
  // instead of the largest.
  __device__ __forceinline__ void load(const scalar_t* row, bool negated) {
    const acc_t nothing = negated ? acc_t(INFINITY) : -acc_t(INFINITY);
    const scalar_t* mine = row + first();
    for_whole_packs([&](int u) { storage_.load(u, mine + u * kStride); });
    for_broken_packs([&](int u) {
      Pack<scalar_t> pack;
#pragma unroll
      for (int e = 0; e < kSize; ++e) from_acc(nothing, pack.at[e]);
      for_edge(u, [&](int e) { pack.at[e] = mine[u * kStride + e]; });
      uint4 words;
      std::memcpy(&words, pack.at, sizeof(words));
      storage_.set(u, words);
    });
  }
  __device__ __forceinline__ void wait() { storage_.wait(); }

  // Returns the statistics of the slice to all threads of the group. Contains barriers.
  template <bool kPlain>
  __device__ __forceinline__ RowStats<acc_t> stats(const ForwardArgs& args, const LogitTransform<acc_t>& transform) {
    // Find the maximum of the stored numbers first, so that no sum has to be rescaled.
    const bool negated = !kPlain && transform.scale < acc_t(0);  // then the smallest logit has the largest z
    LargestOf<scalar_t> largest;
    const auto find = [&](uint32_t sign) {
      for_packs([&](int u) { largest.push(signed_pack(storage_.get(u), sign)); });
    };
    constexpr uint32_t kSigns = sizeof(scalar_t) == 2 ? 0x80008000u : 0x80000000u;
    if (negated)
      find(kSigns);
    else
      find(0);
    const acc_t mine = largest.number();
    const acc_t most = Group::broadcast(Group::template reduce<true>(Largest<acc_t>{mine})).max;
    const int place = mine == most ? place_of_number(most, negated ? kSigns : 0) : -1;
    if constexpr (kPlain) {
      const Folded<acc_t> below(most);
      acc_t sums[2] = {};
      put(place, -acc_t(INFINITY));
      for_packs([&](int u) {
        acc_t z[kSize];
        numbers(u, z);
#pragma unroll
        for (int e = 0; e < kSize; ++e) sums[e % 2] += below.power(z[e]);
      });
      put(place, most);
      const OtherSums<acc_t> mine_of = {sums[0] + sums[1], place < 0 ? acc_t(0) : acc_t(1)};
      const acc_t rest = Group::broadcast(Group::template reduce<true>(mine_of)).rest(below.power(most));
      return {most, rest, acc_t(0), acc_t(0)};
    }
    return stats_below(args, transform, negated ? -most : most, place);
  }

  // Writes the gradient as if no class had an entry.
  template <bool kPlain>
  __device__ __forceinline__ void write(const BackwardArgs& args, const GradientCoefficients<acc_t>& c,
                                        const LogitTransform<acc_t>& transform, const scalar_t* row,
                                        scalar_t* gradient) {
    const acc_t* weight = weights_of(args);
    const int width = common_width(row, gradient);
    scalar_t* mine = gradient + first();
    const auto write_by = [&](int u, const auto& to_gradient) {
      acc_t x[kSize];
      numbers(u, x);
      to_gradient(x);
      Pack<scalar_t> pack;
      from_numbers(x, pack);
      if (whole(u))
        pack.store(mine + u * kStride, width);
      else
        for_edge(u, [&](int e) { mine[u * kStride + e] = pack.at[e]; });
    };
    if constexpr (kPlain) {
      const FoldedGradient<acc_t> plain(c);
      const auto gradient_of = [&](int u) {
        acc_t x[kSize];
        numbers(u, x);
#pragma unroll
        for (acc_t& of_one : x) of_one = plain.at(of_one);
        Pack<scalar_t> pack;
        from_numbers(x, pack);
        return pack;
      };
      if (width == 16)  // Each loop has no branch, so the width is tested here once.
        for_whole_packs([&](int u) { gradient_of(u).store(mine + u * kStride, 16); });
      else
        for_whole_packs([&](int u) { gradient_of(u).store(mine + u * kStride, width); });
      for_broken_packs([&](int u) {
        const Pack<scalar_t> pack = gradient_of(u);
        for_edge(u, [&](int e) { mine[u * kStride + e] = pack.at[e]; });
      });
      return;
    }
    by_case(transform, weight, [&](const LogitTransform<acc_t>& of_logit, auto weighted) {
      const DenseGradient<acc_t> dense(c, of_logit);
      for_packs<kGeneralUnroll>([&](int u) {
        acc_t o[kSize];
        if (weighted) weights(u, weight, o);
        write_by(u, [&](acc_t(&x)[kSize]) {
          to_bases(of_logit, x);
#pragma unroll
          for (int e = 0; e < kSize; ++e) x[e] = dense.at(x[e], weighted ? o[e] : acc_t(1));
        });
      });
    });
  }

  __device__ __forceinline__ void unknow(uint32_t zero) { storage_.unknow(zero); }

 private:
  // Returns the statistics of a slice in a row whose maximum z is that of the logit `most`. Contains barriers.
  __device__ __forceinline__ RowStats<acc_t> stats_below(const ForwardArgs& args,
                                                         const LogitTransform<acc_t>& transform, acc_t most,
                                                         int place_of_most) const {
    const acc_t* weight = weights_of(args);
    // In a row of -inf, `most` is the lowest number, and its product with the scale may be -inf.
    const acc_t highest = larger(transform(most), Limits<acc_t>::kLowest);
    const Folded<acc_t> below(highest);
    const int pack_of_most = place_of_most < 0 ? -1 : pack_of(place_of_most);
    RowSums<acc_t> lanes[2];
    by_case(transform, weight, [&](const LogitTransform<acc_t>& of_logit, auto weighted) {
      const auto add = [&](int u, auto special) {
        acc_t v[kSize], o[kSize], exps[kSize];
        numbers(u, v);
        if (weighted) weights(u, weight, o);
        to_bases(of_logit, v);
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          v[e] = below.exponent(of_logit.factor() * v[e]);
          exps[e] = power_of_2(v[e]);
        }
        if (special) {
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            if (!there(u, e)) v[e] = 0;
            if (!there(u, e) || place(u) + e == place_of_most) exps[e] = 0;
          }
        }
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          RowSums<acc_t>& sums = lanes[e % 2];
          sums.others.sum += exps[e];
          if (!weighted) sums.weighted += v[e];
          // A class of weight 0 adds 0 even at -inf.
          if (weighted && o[e] != acc_t(0)) sums.weighted = multiply_add(o[e], v[e], sums.weighted);
          if (weighted) sums.weight += o[e];
        }
      };
      if constexpr (kInRegisters) {
        for_packs([&](int u) { add(u, !whole(u) || u == pack_of_most); });
      } else {
        for_whole_packs<kGeneralUnroll>([&](int u) {
          if (u != pack_of_most) add(u, std::false_type{});
        });
        // The pack of the maximum, and those that for_broken_packs calls.
        const int last = place(0) < count_ ? (count_ - place(0) - 1) / kStride : -1;
#pragma unroll 1
        for (int k = 0; k < 3; ++k) {
          const int u = k == 0 ? pack_of_most : k == 1 ? last : 0;
          const bool again = (k > 0 && u == pack_of_most) || (k == 2 && last == 0);
          if (0 <= u && u <= last && !again && (k == 0 || !whole(u))) add(u, std::true_type{});
        }
      }
    });
    lanes[0].merge(lanes[1]);
    lanes[0].others.left_out = place_of_most < 0 ? acc_t(0) : acc_t(1);
    const RowSums<acc_t> sums = Group::broadcast(Group::template reduce<true>(lanes[0]));
    const acc_t rest = sums.others.rest(below.power(highest));
    if (args.options.label_smoothing == 0) return {highest, rest, acc_t(0), acc_t(0)};
    const acc_t of_classes = weight ? sums.weight : static_cast<acc_t>(count_ - lead_);
    return {highest, rest, (sums.weighted - of_classes * below.exponent(highest)) / below.by, of_classes};
  }

  __device__ __forceinline__ static uint4 signed_pack(uint4 pack, uint32_t sign) {
    return {pack.x ^ sign, pack.y ^ sign, pack.z ^ sign, pack.w ^ sign};
  }
  // Returns the place of a stored number in this thread's packs, or -1. The signs of all numbers are reversed if `sign`
  // has the bits. An infinite number has no place, so that the sums become NaN.
  __device__ __forceinline__ int place_of_number(acc_t number, uint32_t sign) const {
    int found = -1;
    if (number == acc_t(INFINITY)) return found;
    const int end = place(0) < count_ ? (count_ - place(0) - 1) / kStride : -1;
#pragma unroll 1
    for (int u = 0; u <= end && found < 0; ++u) {
      const uint4 words = signed_pack(storage_.get_at(u), sign);
      LargestOf<scalar_t> largest;
      largest.push(words);
      if (largest.number() != number) continue;
      Pack<scalar_t> pack;
      std::memcpy(pack.at, &words, sizeof(words));
      acc_t x[kSize];
      to_numbers(pack, x);
#pragma unroll
      for (int e = 0; e < kSize; ++e)
        if (x[e] == number) found = place(u) + e;
    }
    return found;
  }
  // Overwrites the number at one of this thread's places, if it has one.
  __device__ __forceinline__ void put(int at, acc_t number) {
    if (at < 0) return;
    constexpr int kOfWord = sizeof(uint32_t) / sizeof(scalar_t);
    const int u = pack_of(at);
    scalar_t numbers[kOfWord];
#pragma unroll
    for (scalar_t& of_word : numbers) from_acc(number, of_word);
    uint32_t put;
    std::memcpy(&put, numbers, sizeof(put));
    const uint32_t bits = kOfWord == 1 ? 0xffffffffu : at % 2 == 0 ? 0xffffu : 0xffff0000u;
    const auto in_word = [&](uint32_t word, int k) {
      const uint32_t mask = at % kSize / kOfWord == k ? bits : 0;
      return (word & ~mask) | (put & mask);
    };
    const uint4 before = storage_.get_at(u);
    const uint4 words = {in_word(before.x, 0), in_word(before.y, 1), in_word(before.z, 2), in_word(before.w, 3)};
    storage_.set_at(u, words);
  }

  // Weights are used only with label smoothing; otherwise an infinite weight would be multiplied by 0.
  __device__ static const acc_t* weights_of(const CrossEntropyArgs& args) {
    return args.options.label_smoothing != 0 ? static_cast<const acc_t*>(args.target.weight) : nullptr;
  }

  // Returns which of this thread's packs has a place.
  __device__ static int pack_of(int place) { return (place / kSize - Group::rank()) / kWidth; }
  __device__ static int place(int u) { return (Group::rank() + u * kWidth) * kSize; }
  __device__ int64_t first() const { return origin_ + place(0); }  // the column of the first pack
  __device__ bool there(int u, int e) const { return lead_ <= place(u) + e && place(u) + e < count_; }
  __device__ bool whole(int u) const { return lead_ <= place(u) && place(u) + kSize <= count_; }
  template <typename function_t>
  __device__ __forceinline__ void for_edge(int u, const function_t& f) const {
#pragma unroll
    for (int e = 0; e < kSize; ++e)
      if (there(u, e)) f(e);
  }
  // Calls f(u) for the thread's packs that contain a class, because exponentials of other packs would waste time.
  template <int unroll = kUnroll, typename function_t>
  __device__ __forceinline__ void for_packs(const function_t& f) const {
    if constexpr (storage_t::kAll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (place(u) >= count_) break;
        f(u);
      }
    } else {
      const int mine = place(0) < count_ ? (count_ - place(0) - 1) / kStride + 1 : 0;
#pragma unroll unroll
      for (int u = 0; u < mine; ++u) f(u);
    }
  }

  // Calls f(u) for packs whose elements are all classes. The loop has no branch.
  template <int unroll = kUnroll, typename function_t>
  __device__ __forceinline__ void for_whole_packs(const function_t& f) const {
    if constexpr (storage_t::kAll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (whole(u)) f(u);
    } else {
      int u = lead_ > place(0) ? 1 : 0;
      const int end = count_ >= place(0) + kSize ? (count_ - place(0) - kSize) / kStride + 1 : 0;
#pragma unroll unroll
      for (; u < end; ++u) f(u);
    }
  }
  // Calls f(u) for the other packs: the first one of a misaligned row, and the last one of a row.
  template <typename function_t>
  __device__ __forceinline__ void for_broken_packs(const function_t& f) const {
    if constexpr (storage_t::kAll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (place(u) < count_ && !whole(u)) f(u);
    } else {
      const int last = place(0) < count_ ? (count_ - place(0) - 1) / kStride : -1;
#pragma unroll 1
      for (int u = 0; u <= last; u = u < last ? last : last + 1)
        if (!whole(u)) f(u);
    }
  }

  // Loads the weights of a pack. Elements that are no classes get 0.
  __device__ __forceinline__ void weights(int u, const acc_t* weight, acc_t (&o)[kSize]) const {
    const acc_t* mine = weight + first() + u * kStride;
    if (whole(u)) return load_weights(mine, o);
#pragma unroll
    for (int e = 0; e < kSize; ++e) o[e] = there(u, e) ? mine[e] : acc_t(0);
  }

  __device__ __forceinline__ void numbers(int u, acc_t (&x)[kSize]) const {
    const uint4 words = storage_.get(u);
    Pack<scalar_t> pack;
    std::memcpy(pack.at, &words, sizeof(words));
    to_numbers(pack, x);
  }

  int64_t origin_;  // the column of the slice's first pack, possibly before the row's first column
  int lead_, count_;  // the places [lead, count) are classes
  storage_t storage_;
};

}  // namespace cuda
}  // namespace sparse_ce
