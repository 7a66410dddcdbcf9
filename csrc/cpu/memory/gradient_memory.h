// gradient_memory.h - Caches memory for large gradients on the CPU.
//
// A gradient of the logits exists only briefly in each step, and the C allocator maps new memory for it every time. The
// kernel then zeroes its pages at first touch, which takes longer than computing the gradient (256 x 128256 float32, 2
// threads of a Xeon at 2.5 GHz, 2026-11: 43 ms instead of 16). Therefore up to kBlocks freed blocks stay mapped, in
// huge pages if the system supports them. They are marked MADV_FREE, so the system can reclaim their memory at any
// time.
//
// Torch's own storages, which can be resized and are counted by its profiler, cannot be cached this way. The cache
// would have to know when a storage has no other owner. Only a private function counts owners, and it does not count
// those that hold only the storage (torch 2.13). The next gradient would overwrite their memory. Also, a cached storage
// would never be freed.
#pragma once

#include <cstddef>

namespace sparse_ce {
namespace cpu {

// Smaller gradients use torch's allocator, which reuses blocks of this size itself.
constexpr size_t kLeastCachedBytes = size_t(4) << 20;

// Returns at least `bytes` of uninitialized memory, or nullptr if the system cannot provide it.
void* acquire_gradient_memory(size_t bytes);

// Returns a block from acquire_gradient_memory to the cache.
void release_gradient_memory(void* block);

}  // namespace cpu
}  // namespace sparse_ce
