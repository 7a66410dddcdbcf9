// row_plan.h - Plans how the kernels of the loss and of select distribute their work.
#pragma once

#include "../ops/cross_entropy.h"

namespace sparse_ce {
namespace cuda {

// Assigns rows to threads. The host computes it from the shape.
struct Plan {
  int width;         // threads per row: 32 or kThreads
  int64_t splits;    // blocks per row
  int64_t blocks;
};
Plan plan_of(const CrossEntropyArgs& args, int multiprocessors);
// Returns true if each row is processed by a single thread, like a strided row.
bool few_classes(const CrossEntropyArgs& args);

// Describes how a row is held from its loss to its gradient, with `packs` packs of 16 bytes per thread: in the
// registers of a warp, or in the shared memory of `cluster` blocks. width is 0 if the row does not fit, for float64, or
// if `reads` disables it. `persistent` means that a block processes several rows; otherwise one. Benchmarks compare
// both.
struct OnePass {
  int width = 0, packs = 0, cluster = 0;
  bool persistent = false;
  explicit operator bool() const { return width > 0; }
};
// Holds the properties of a device that determine this.
struct Device {
  bool clusters = false;
  int64_t shared_bytes = 0;  // maximum per block
};
Device current_device();
OnePass one_pass_of(const CrossEntropyArgs& args, const Device& device);
inline OnePass one_pass_of(const CrossEntropyArgs& args) { return one_pass_of(args, current_device()); }
// Returns how many packs per thread fit into the shared memory of a block.
int64_t packs_in_shared_memory(int width, const Device& device);

}  // namespace cuda
}  // namespace sparse_ce
