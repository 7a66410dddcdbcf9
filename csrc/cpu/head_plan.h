// head_plan.h - Plans the chunks of the linear head on a CPU. This header does not depend on torch.
#pragma once

#include "../ops/linear_chunks.h"

namespace sparse_ce {
namespace cpu {

// cuda/head_plan.h defines the same members for a GPU, and describes them.
struct HeadPlan {
  // A chunk takes 1/40 of the logits, but at least 256 rows of a large vocabulary in float32, and more than 400 in 16
  // bits: these keep GEMMs fast, and sums of the weight gradient over chunks rare. This does not apply if one chunk
  // holds all rows. If memory is borrowed, only two of the three GEMMs run per chunk, nothing is summed, and 1/16 is
  // enough. A few rows of a large vocabulary stay in one chunk, because each chunk reads the weight twice.
  static int64_t whole_bytes(bool borrows) { return (borrows ? int64_t(64) : int64_t(128)) << 20; }
  static int64_t chunk_bytes(const HeadSizes& head) {
    constexpr int64_t kMiB = int64_t(1) << 20;
    const int64_t logits = head.rows * head.classes * head.input_bytes;
    if (head.borrows) return std::max(logits / 40, std::clamp(logits / 16, 16 * kMiB, 48 * kMiB));
    return std::max(logits / 40, (head.input_bytes > 2 ? 128 : 112) * kMiB);
  }
  static constexpr int64_t kRowsTogether = 16;
  static constexpr int64_t kBlockBytes = int64_t(4) << 20;  // fits into a cache
  static constexpr bool kConvertsBlocks = true;

  // Limits the stored rows to the memory of the weight gradient, in blocks of as many classes as fit into a chunk.
  static int64_t stored_rows(int64_t, bool) { return 0; }
  static constexpr int64_t kStoredBlockBytes = 0;
};

}  // namespace cpu
}  // namespace sparse_ce
