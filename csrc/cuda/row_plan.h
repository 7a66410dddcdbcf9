// row_plan.h - how the kernels of the loss and of select share out their work.
#pragma once

#include "../ops/cross_entropy.h"

namespace sparse_ce {
namespace cuda {

// How the rows go to threads, decided on the host from the shape.
struct Plan {
  int width;         // threads that share a row: 32 or kThreads
  int64_t splits;    // blocks that share a row
  int64_t blocks;
};
Plan plan_of(const CrossEntropyArgs& args, int multiprocessors);
// Whether each goes to a thread instead, as one whose classes lie apart does.
bool few_classes(const CrossEntropyArgs& args);

// Who holds a row from its loss to its gradient, with so many packs of 16 bytes a thread: a warp in registers, or
// `cluster` blocks in shared memory. Nobody (width 0) where these do not hold it, in float64, or as `reads` has it.
struct OnePass {
  int width = 0, packs = 0, cluster = 0;
  explicit operator bool() const { return width > 0; }
};
// What that depends on.
struct Device {
  bool clusters = false;
  int64_t shared_bytes = 0;  // that a block may have
};
Device current_device();
OnePass one_pass_of(const CrossEntropyArgs& args, const Device& device);
inline OnePass one_pass_of(const CrossEntropyArgs& args) { return one_pass_of(args, current_device()); }
// Whether the current device has clusters of blocks, and the kernels are compiled for them.
bool device_has_clusters();

}  // namespace cuda
}  // namespace sparse_ce
