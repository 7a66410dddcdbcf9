// Plans how rows are held from their loss to their gradient. device/one_pass_kernel.cuh has the kernel.
#include "device/row_slice.cuh"
#include "launchers.h"
#include "row_plan.h"
#include "storage_launchers.h"

namespace sparse_ce {
namespace cuda {

constexpr int64_t kOtherBytes = 4 << 10;  // shared memory of a block for other data

int64_t packs_in_shared_memory(int width, const Device& device) {
  return std::min<int64_t>(width == kWarp ? kWarpPacks : kSharedPacks,
                           (device.shared_bytes - kOtherBytes) / (kBytesOfPacks + kBytesOfMarks));
}

Device current_device() {
  Device found;
  found.shared_bytes = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(0);
  found.clusters = OnePassLauncher<float>::has_clusters(found);
  return found;
}

// Returns the plan with the fewest blocks that hold a row. docs/kernels.md has a table of measurements on an H100,
// forward and backward, in units of a copy of the logits (1 read + 1 write; two kernels take at least 1.5).
OnePass one_pass_of(const CrossEntropyArgs& args, const Device& device) {
  const bool never = args.reads == Reads::kApart || args.dtype == DType::kFloat64;
  if (never || args.strided.inner > 0 || args.rows == 0 || args.rows > INT32_MAX || few_classes(args)) return {};
  const int64_t size = size_of(args.dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 &&
                       (args.rows_to_plan() == 1 || args.row_stride * size % 16 == 0);
  const int64_t bytes = args.target.num_classes * size + (aligned ? 0 : 16 - size);
  const int width = plan_of(args, 1).width;  // as in backward, which would otherwise sum the entries in another order
  const int64_t room = packs_in_shared_memory(width, device);
  if (width == kWarp) {
    const int64_t packs = divide_up(bytes, 16 * kWarp);
    if (packs > std::max<int64_t>(kRegisterPacks, room)) return {};
    return {kWarp, static_cast<int>(packs), 1, packs > kRegisterPacks};
  }
  for (int cluster = 1; cluster <= (device.clusters ? kMostBlocks : 1); cluster *= 2) {
    const int64_t packs = divide_up(bytes, kBytesOfPacks * cluster);
    if (packs <= room) return {kThreads, static_cast<int>(packs), cluster, true};
  }
  return {};
}

cudaError_t cross_entropy_one_pass(const OnePass& form, const ForwardArgs& forward, const BackwardArgs* backward,
                                   cudaStream_t stream) {
  return with_storage(forward.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    if constexpr (sizeof(scalar_t) < sizeof(double))
      return OnePassLauncher<scalar_t>::launch(form, forward, backward, stream);
    return cudaErrorNotSupported;
  });
}

}  // namespace cuda
}  // namespace sparse_ce
