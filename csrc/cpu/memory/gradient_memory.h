// gradient_memory.h - memory for large fresh gradients on the CPU.
//
// A gradient of the logits lives for a moment of every step, and the C allocator maps such a block anew each time: the
// kernel zeroes its pages at first touch, which costs more than computing the gradient (256 x 128256 float32, 2 threads
// of a Xeon at 2.5 GHz, 2026-11: 43 ms instead of 16). So up to kBlocks freed blocks stay mapped, in huge pages where
// the system has them, and are marked MADV_FREE: their memory goes back to the system the moment anybody needs it.
//
// Why the blocks are not torch's, whose storages could be resized and are counted by its profiler: a cache beside them
// would have to be told when nobody else holds one. Only a private function counts holders, and not one that holds the
// storage alone (torch 2.13), whose memory the next gradient would overwrite; and what is held is never given back.
#pragma once

#include <cstddef>

namespace sparse_ce {
namespace cpu {

// Smaller gradients are left to torch's allocator, which reuses blocks of this size by itself.
constexpr size_t kLeastCachedBytes = size_t(4) << 20;

// At least `bytes` of uninitialised memory, or nullptr where the system offers no such memory.
void* take_gradient_memory(size_t bytes);

// Gives back what take_gradient_memory returned.
void give_gradient_memory(void* block);

}  // namespace cpu
}  // namespace sparse_ce
