// Assigns a row to a warp, to a block, or to a cluster of blocks. Each logit is read once and its gradient is written
// once. A group processes its columns in windows. Bits in shared memory mark the classes of a window that have entries:
// the dense pass leaves them out, and leaves their logits in place if the gradient overwrites them. Then each of these
// classes is evaluated once, with the sum of its entries.
#include "device/many_entries.cuh"

#include "../ops/binary_cross_entropy.h"
#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

// A block processes rows that are longer than kWarpRowBytes, or than kLongWarpRowBytes if there are many.
constexpr int64_t kWarpRowBytes = 8192, kLongWarpRowBytes = 24560, kManyRows = 2048;
// Rows are divided among the blocks of a cluster, of at least kPartBytes each, if there are too few to fill a device.
constexpr int64_t kPartBytes = 32768, kBlocksPerMultiprocessor = 4;

// Holds sums over the classes of a row: of the loss, of slopes times logits, and of slopes.
template <typename acc_t>
struct BinarySums {
  acc_t loss = 0, scale = 0, shift = 0;

  SCE_HD void merge(const BinarySums& other) { loss += other.loss, scale += other.scale, shift += other.shift; }
};

// Returns log(1 + product_less_1). In float32 the argument may exceed 1. In float64 a pack has one class, so it is at
// most 1.
SCE_HD float log_1_plus(float product_less_1) { return log1pf(product_less_1); }
SCE_HD double log_1_plus(double product_less_1) { return log_of_1_plus_small(product_less_1); }

// Sums the loss of negative classes. The logarithms of 1 + u become one, of the product. The product less 1 keeps the
// digits of small u.
template <typename acc_t>
struct SoftplusSum {
  acc_t linear = 0, product_less_1 = 0;

  // Adds a class and returns its slope, sigmoid(z).
  __device__ __forceinline__ acc_t add(acc_t z) {
    const acc_t u = small_exponential(-std::fabs(z)), larger_one = reciprocal(acc_t(1) + u);
    linear += larger(z, acc_t(0));
    product_less_1 = multiply_add(product_less_1, u, product_less_1 + u);
    return z < acc_t(0) ? u * larger_one : larger_one;
  }
  __device__ __forceinline__ acc_t total() const { return linear + log_1_plus(product_less_1); }
};

// Processes the columns [begin, end) of row r, for one thread of a group. `kAlike` means that classes without entries
// have the factors 1 and 0.
template <typename scalar_t, int kWidth, BinaryKind kind, bool kAlike>
class BinaryRow {
  using acc_t = acc_type<scalar_t>;
  using pack_t = Pack<scalar_t>;
  using Group = RowGroup<kWidth>;
  using Marks = EntryMarks<kWidth>;
  static constexpr int kSize = pack_t::kSize;
  static constexpr int kWords = 2048 / Group::kPerBlock, kPlaces = kWords / 2 * 32;  // of a window, with 2 bits each

 public:
  // `factor` multiplies the slopes. The gradient is stored if `stores` is true.
  __device__ BinaryRow(const BinaryArgs& args, const BinaryLoss<kind, acc_t>& of_class, int64_t r, int64_t begin,
                       int64_t end, acc_t factor, bool stores)
      : args_(args), of_class_(of_class), row_(args.template row<scalar_t>(r)),
        gradient_(stores ? args.template gradient_row<scalar_t>(r) : nullptr), begin_(begin), end_(end),
        scale_(args.template scale<acc_t>()), shift_(args.template shift<acc_t>()), factor_(factor), stores_(stores) {}

  // Evaluates all classes. All threads of the group must call this function.
  __device__ __forceinline__ void evaluate(EntryRange range, bool has_entries) {
    // Places count from a 16-byte boundary, so that the bits of a pack are in one word.
    const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row_ + begin_) % 16 / sizeof(scalar_t));
    const Marks marks = marks_of_group();
#pragma unroll 1
    for (int64_t origin = begin_ - (kSize > 1 ? before : 0); origin < end_; origin += kPlaces) {
      const bool marked = has_entries && mark(marks, range, origin);
      dense(marks, origin, marked);
      if (!marked) continue;
      Group::sync();  // the dense gradient has been written
      entries(marks, range, origin);
    }
  }

  __device__ BinarySums<acc_t> sums() const { return {loss_.sum, of_scale_.sum, of_shift_.sum}; }

 private:
  __device__ static Marks marks_of_group() {
    SCE_SHARED(uint64_t, words, [2048 / 2]);
    const int first = Group::kPerBlock > 1 ? static_cast<int>(threadIdx.x) / kWidth * kWords : 0;
    return {reinterpret_cast<uint32_t*>(words) + first, kPlaces};
  }

  __device__ const scalar_t* logits() const { return static_cast<const scalar_t*>(args_.logits); }
  __device__ scalar_t* gradients() const { return static_cast<scalar_t*>(args_.grad_logits); }

  // Returns the place of a class in the window at `origin`, or -1 if this group has no such class in the window.
  __device__ int place_of(int64_t column, int64_t origin) const {
    const bool inside = begin_ <= column && column < end_ && origin <= column && column < origin + kPlaces;
    return inside ? static_cast<int>(column - origin) : -1;
  }

  // Marks the classes of a window that have entries, and returns true if there are any.
  __device__ bool mark(const Marks& marks, EntryRange range, int64_t origin) const {
    Group::sync();  // the marks of the previous window may still be in use
    marks.clear();
    Group::sync();
    bool none = true;
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int place = place_of(args_.target.template entry<acc_t>(i).column, origin);
      if (place < 0) continue;
      marks.mark(place);
      none = false;
    }
    Group::sync();
    return !Group::all(none);
  }

  // Evaluates the classes of a window that have no entries. The packs at the ends of the row may be incomplete.
  __device__ __forceinline__ void dense(const Marks& marks, int64_t origin, bool marked) {
    constexpr int kStep = kWidth * kSize;
    const int width = common_width(row_, gradient_);
    const int low = origin < begin_ ? static_cast<int>(begin_ - origin) : 0;
    const int high = end_ - origin < kPlaces ? static_cast<int>(end_ - origin) : kPlaces;
    int place = Group::rank() * kSize;
    // Positions in memory. The compiler must not compute them from the row in each step.
    int64_t position = row_ - logits() + (origin + place);
    int64_t gradient_position = gradient_ - gradients() + (origin + place);
    hide(position), hide(gradient_position);
#pragma unroll 1
    for (; place < high; place += kStep, position += kStep, gradient_position += kStep) {
      const scalar_t* from = logits() + position;
      const bool whole = kSize == 1 || (place >= low && place + kSize <= high);
      unsigned skipped = marked ? marks.any(place, kSize) : 0u;
      pack_t pack{};
      if (whole) {
        pack = pack_t::load(from);
      } else {
        skipped |= outside(place, low, high);
#pragma unroll
        for (int e = 0; e < kSize; ++e)
          if (low <= place + e && place + e < high) pack.at[e] = from[e];
      }
      acc_t x[kSize], slope[kSize];
      to_numbers(pack, x);
      if constexpr (kAlike)
        loss_.add(evaluate_alike(x, skipped, slope));
      else
        loss_.add(evaluate_weighted(origin + place, x, whole, skipped, slope));
      if (args_.grad_affine) add_slopes(x, slope);
      if (!stores_) continue;
#pragma unroll
      for (acc_t& of_one : slope) of_one *= factor_;
      pack_t out;
      from_numbers(slope, out);
      if (skipped != 0) {
#pragma unroll
        for (int e = 0; e < kSize; ++e)
          if (skipped >> e & 1u) out.at[e] = pack.at[e];
      }
      scalar_t* to = gradients() + gradient_position;
      if constexpr (kSize == 1) {
        out.store(to);
      } else if (whole) {
        out.store(to, width);
      } else {
#pragma unroll
        for (int e = 0; e < kSize; ++e)
          if (low <= place + e && place + e < high) to[e] = out.at[e];
      }
    }
  }

  // Returns bits for the elements of a pack that are not in the places [low, high).
  __device__ static unsigned outside(int place, int low, int high) {
    unsigned bits = 0;
#pragma unroll
    for (int e = 0; e < kSize; ++e) bits |= (place + e < low || place + e >= high ? 1u : 0u) << e;
    return bits;
  }

  // Returns the loss of classes with the factors 1 and 0 that are not skipped, and sets their slopes.
  __device__ __forceinline__ acc_t evaluate_alike(const acc_t (&x)[kSize], unsigned skipped,
                                                  acc_t (&slope)[kSize]) const {
    acc_t z[kSize];
#pragma unroll
    for (int e = 0; e < kSize; ++e) z[e] = multiply_add(scale_, x[e], shift_);
    if (skipped != 0) {
#pragma unroll
      for (int e = 0; e < kSize; ++e)
        if (skipped >> e & 1u) z[e] = -acc_t(INFINITY);  // has loss and slope 0
    }
    if constexpr (kind == BinaryKind::kPlain) {
      SoftplusSum<acc_t> sum;
#pragma unroll
      for (int e = 0; e < kSize; ++e) slope[e] = sum.add(z[e]);
      return sum.total();
    } else {
      acc_t loss = 0;
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const auto terms = of_class_.at(z[e]);
        loss += terms.negative, slope[e] = terms.negative_slope;
      }
      return loss;
    }
  }

  // Returns the loss of the classes from `column` on that are not skipped, and sets their slopes.
  __device__ __forceinline__ acc_t evaluate_weighted(int64_t column, const acc_t (&x)[kSize], bool whole,
                                                     unsigned skipped, acc_t (&slope)[kSize]) const {
    // The weights of positive classes are used only with label smoothing. Otherwise an infinite one would be multiplied
    // by 0.
    const auto* weight = static_cast<const acc_t*>(args_.target.weight);
    const auto* pos_weight = args_.binary.label_smoothing == 0 ? nullptr : static_cast<const acc_t*>(args_.pos_weight);
    const acc_t target = acc_t(0.5) * static_cast<acc_t>(args_.binary.label_smoothing);
    constexpr int kSome = kSize < 2 ? kSize : 2;  // more would need too many registers
    acc_t loss = 0;
#pragma unroll
    for (int first = 0; first < kSize; first += kSome) {
      acc_t w[kSome], p[kSome];
      load_some(weight, column + first, whole, w), load_some(pos_weight, column + first, whole, p);
#pragma unroll
      for (int e = 0; e < kSome; ++e) {
        const auto terms = of_class_.at(multiply_add(scale_, x[first + e], shift_));
        const BinaryCoefficients<acc_t> c(target, w[e], p[e]);
        const bool skips = (skipped >> (first + e) & 1u) != 0;
        loss += skips ? acc_t(0) : c.loss(terms), slope[first + e] = skips ? acc_t(0) : c.slope(terms);
      }
    }
    return loss;
  }

  // Loads the weights of some classes of a pack. They are 1 if `weight` is null, and beyond the group's columns.
  template <int n>
  __device__ __forceinline__ void load_some(const acc_t* weight, int64_t column, bool whole, acc_t (&o)[n]) const {
    using Weights = Pack<acc_t, n>;
#pragma unroll
    for (acc_t& of_one : o) of_one = acc_t(1);
    if (!weight) return;
    if (whole && Weights::aligned(weight + column)) {
      const Weights some = Weights::load(weight + column);
      std::memcpy(o, some.at, sizeof(some));
      return;
    }
#pragma unroll
    for (int e = 0; e < n; ++e)
      if (begin_ <= column + e && column + e < end_) o[e] = weight[column + e];
  }

  // Adds slopes to the sums for scale and shift. A logit of -inf has the slope 0 as a negative class.
  template <int n>
  __device__ __forceinline__ void add_slopes(const acc_t (&x)[n], const acc_t (&slope)[n]) {
    acc_t of_scale = 0, of_shift = 0;
#pragma unroll
    for (int e = 0; e < n; ++e) of_scale += expected(slope[e], x[e]), of_shift += slope[e];
    of_scale_.add(of_scale), of_shift_.add(of_shift);
  }

  // Evaluates the classes of a window that have entries.
  __device__ __forceinline__ void entries(const Marks& marks, EntryRange range, int64_t origin) {
    const auto add = [&](int place, acc_t sum) {
      const int64_t column = origin + place;
      const acc_t x[1] = {to_acc(row_[column])};
      const auto terms = of_class_.at(multiply_add(scale_, x[0], shift_));
      const auto c = args_.template coefficients<acc_t>(column, sum);
      const acc_t slope[1] = {c.slope(terms)};
      loss_.add(c.loss(terms));
      if (args_.grad_affine) add_slopes(x, slope);
      if (stores_) from_acc(factor_ * slope[0], gradient_[column]);
    };
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const auto entry = args_.target.template entry<acc_t>(i);
      const int place = place_of(entry.column, origin);
      if (place >= 0 && !marks.several(place)) add(place, entry.value);
    }
    if (range.end - range.begin == 1 || Group::all(!marks.any_several())) return;
    RepeatedEntries<kWidth, acc_t>(args_.target, range, origin, marks).for_each_class(kPlaces, add);
  }

  const BinaryArgs& args_;
  const BinaryLoss<kind, acc_t>& of_class_;
  const scalar_t* row_;
  scalar_t* gradient_;
  const int64_t begin_, end_;
  const acc_t scale_, shift_, factor_;
  const bool stores_;
  LongSum<acc_t> loss_, of_scale_, of_shift_;
};

// Returns the blocks per multiprocessor for which no register is spilled.
template <typename scalar_t>
constexpr int blocks_for_registers(BinaryKind kind, bool alike) {
  return alike && kind == BinaryKind::kPlain && sizeof(scalar_t) < sizeof(double) ? 3 : 2;
}

template <typename scalar_t, int kWidth, BinaryKind kind, bool kAlike>
__global__ void __launch_bounds__(kThreads, blocks_for_registers<scalar_t>(kind, kAlike))
    binary_cross_entropy_kernel(BinaryArgs args, int cluster) {
  using Group = RowGroup<kWidth>;
  using acc_t = acc_type<scalar_t>;
  const int part = kWidth > kWarp ? static_cast<int>(blockIdx.x) % cluster : 0;
  const int64_t begin = args.first_class + split_begin(args.classes(), cluster, part);
  const int64_t end = args.first_class + split_begin(args.classes(), cluster, part + 1);
  const bool writes = part == 0 && Group::rank() == 0;
  const BinaryLoss<kind, acc_t> of_class(args.binary);
  if (kWidth > kWarp && cluster > 1) Cluster::sync();  // all blocks have started
  unsigned turn = 0;
  for (int64_t r = Group::number() / cluster; r < args.rows; r += Group::count() / cluster) {
    const bool ignored = args.target.ignored(r);
    acc_t g = ignored || !args.grad_loss ? acc_t(0) : args.template grad_output<acc_t>(r);
    if (args.grad_loss && part == cluster - 1)
      write_zeros<kWidth>(args.template gradient_row<scalar_t>(r), args.classes_end(), args.vocab);
    BinarySums<acc_t> sums;
    if (!ignored) {
      const EntryRange range = args.target.row(r);
      bool valid = range.valid, none = true;
      if (range.begin < range.end) {
        for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
          const auto entry = args.target.template entry<acc_t>(i);
          valid = valid && !(entry.column < 0 && entry.value != entry.value);
          none = none && !(begin <= entry.column && entry.column < end);
        }
        valid = Group::all(valid), none = Group::all(none);
      }
      if (!valid && g != acc_t(0)) g = Limits<acc_t>::kNaN;
      BinaryRow<scalar_t, kWidth, kind, kAlike> row(args, of_class, r, begin, end, g * args.template scale<acc_t>(),
                                                    g != acc_t(0));
      row.evaluate(range, !none);
      sums = Group::broadcast(Group::reduce(row.sums()));
      if constexpr (kWidth > kWarp)
        if (cluster > 1) sums = merge_of_cluster(sums, cluster, part, turn++);
      if (!valid) sums.loss = Limits<acc_t>::kNaN;
    }
    if (args.grad_loss && g == acc_t(0)) {
      Group::sync();  // all logits have been read
      write_zeros<kWidth>(args.template gradient_row<scalar_t>(r), begin, end);
    }
    if (!writes) continue;
    static_cast<acc_t*>(args.loss)[r] = sums.loss;
    if (!args.grad_affine) continue;
    acc_t* of_affine = static_cast<acc_t*>(args.grad_affine) + 2 * r;
    of_affine[0] = g == acc_t(0) ? acc_t(0) : g * sums.scale;
    of_affine[1] = g == acc_t(0) ? acc_t(0) : g * sums.shift;
  }
}

bool device_runs_clusters() {  // the clipped kernel of float64 has the most registers
  return once_per_device(
      [] { return has_clusters(binary_cross_entropy_kernel<double, kThreads, BinaryKind::kClipped, false>); });
}

// Returns the blocks of a row, or 0 if a warp processes it.
int blocks_of_row(const BinaryArgs& args) {
  const int64_t bytes = args.classes() * size_of(args.dtype);
  const bool many = args.rows_to_plan() >= kManyRows;
  if (bytes <= (many ? kLongWarpRowBytes : kWarpRowBytes)) return 0;
  const int64_t enough = kBlocksPerMultiprocessor * multiprocessors();
  int cluster = 1;
  if (many || !device_runs_clusters()) return cluster;
  while (cluster < kMostBlocks && args.rows_to_plan() * cluster < enough && bytes > cluster * kPartBytes) cluster *= 2;
  return cluster;
}

}  // namespace

cudaError_t binary_cross_entropy(const BinaryArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const int of_row = blocks_of_row(args), cluster = of_row > 0 ? of_row : 1;
  const int64_t most = ((int64_t(1) << 31) - 1) / cluster;
  const int64_t blocks = cluster * blocks_for(args.rows, of_row > 0 ? 1 : kThreads / kWarp, args.max_blocks, most);
  return with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    const auto run = [&](auto kind, auto alike) {
      constexpr BinaryKind of = decltype(kind)::value;
      constexpr bool kAlike = decltype(alike)::value;
      const auto kernel = of_row > 0 ? binary_cross_entropy_kernel<scalar_t, kThreads, of, kAlike>
                                     : binary_cross_entropy_kernel<scalar_t, kWarp, of, kAlike>;
      return launch_clusters(stream, blocks, kThreads, cluster, kernel, args, cluster);
    };
    const auto by_alike = [&](auto kind) {
      return args.alike() ? run(kind, std::true_type()) : run(kind, std::false_type());
    };
    switch (binary_kind(args.binary)) {
      case BinaryKind::kClipped:
        return by_alike(std::integral_constant<BinaryKind, BinaryKind::kClipped>());
      case BinaryKind::kFocal:
        return by_alike(std::integral_constant<BinaryKind, BinaryKind::kFocal>());
      default:
        return by_alike(std::integral_constant<BinaryKind, BinaryKind::kPlain>());
    }
  });
}

}  // namespace cuda
}  // namespace sparse_ce
