// Assigns a row to a warp, to a block, or to a cluster of blocks. Each logit is read once and its gradient is written
// once. A group processes its columns in windows. Bits in shared memory mark the classes of a window that have entries:
// the dense pass leaves them out, and leaves their logits in place if the gradient overwrites them. Then each of these
// classes is evaluated once, with the sum of its entries.
#include "device/binary_row.cuh"

#include "launchers.h"

namespace sparse_ce {
namespace cuda {
namespace {

// A block processes rows that are longer than kWarpRowBytes, or than kLongWarpRowBytes if there are many.
constexpr int64_t kWarpRowBytes = 8192, kLongWarpRowBytes = 24560, kManyRows = 2048;
// Rows are divided among the blocks of a cluster, of at least kPartBytes each, if there are too few to fill a device.
constexpr int64_t kPartBytes = 32768, kBlocksPerMultiprocessor = 4;

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
