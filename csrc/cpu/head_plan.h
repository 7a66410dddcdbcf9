// head_plan.h - Plans the chunks of the linear head on a CPU. This header does not depend on torch.
#pragma once

#include "../ops/linear_chunks.h"

namespace sparse_ce {
namespace cpu {

// cuda/head_plan.h defines the same members for a GPU, and describes them.
struct HeadPlan {
  // A chunk takes 1/40 of the logits, but at least the size that keeps GEMMs fast: 256 rows of a large vocabulary in
  // float32. Chunks of 16-bit logits are smaller, because part of the weight gradient is stored next to them. This does
  // not apply if one chunk holds all rows. If memory is borrowed, only two of the three GEMMs run per chunk, and 1/16
  // is enough. A few rows of a large vocabulary stay in one chunk, because each chunk reads the weight twice.
  static int64_t whole_bytes(bool borrows) { return (borrows ? int64_t(64) : int64_t(128)) << 20; }
  static int64_t chunk_bytes(const HeadSizes& head) {
    const int64_t logits = head.rows * head.classes, logit_bytes = head.input_bytes;
    int64_t least = logit_bytes > 2 ? whole_bytes(false) : int64_t(48) << 20;
    if (head.borrows) least = std::clamp(logits / 16 * logit_bytes, int64_t(16) << 20, least);
    return std::max(logits / 40 * logit_bytes, least);
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
