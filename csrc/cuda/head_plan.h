// head_plan.h - Plans the chunks of the linear head on a GPU. This header depends on neither torch nor CUDA.
#pragma once

#include "../ops/linear_chunks.h"

namespace sparse_ce {
namespace cuda {

struct HeadPlan {
  // A 16-bit weight gradient that is accumulated over chunks is read and written once per chunk. This takes as long as
  // 750 rows of its GEMM (predicted for an H100). Chunks of 4096 rows hide it, if they need no more memory than the
  // weight or 1 GiB. If the logits' gradient is stored instead, 1024 rows are enough for fast GEMMs.
  static int64_t whole_bytes(bool) { return int64_t(256) << 20; }  // logits up to this size form one chunk
  static int64_t chunk_bytes(const HeadSizes& head) {
    if (head.borrows) return std::max<int64_t>(1024, head.rows / 8) * head.row_bytes;
    const int64_t most = std::max(int64_t(1) << 30, 2 * head.classes * head.width);
    return std::max(std::min(4096 * head.row_bytes, most), head.rows / 16 * head.row_bytes);
  }
  // Returns 1/32 of the device's memory: 2.5 GiB of an H100. More than 2^31 logits would be untested in GEMMs.
  static int64_t ample_bytes_of(int64_t memory) { return std::min(memory / 32, (int64_t(4) << 30) - 2); }
  static constexpr int64_t kRowsTogether = 128;  // the size of a GEMM tile
  // The size of a block of a product, which fits into the L2 cache and occupies every multiprocessor.
  static constexpr int64_t kBlockBytes = int64_t(32) << 20;
  static constexpr bool kConvertsBlocks = false;  // a weight of another dtype is converted at once

  // Returns the number of rows whose logit gradient may be stored. The part beyond the weight gradient's memory takes
  // at most as much memory again, or half of that (the cost of accumulating over chunks) if `chunk_rows` is given. Up
  // to 1024 features, one chunk takes no more.
  static int64_t stored_rows(int64_t width, bool chunked) {
    return chunked ? width + width / 2 : width > 1024 ? 2 * width : 0;
  }
  static constexpr int64_t kStoredBlockBytes = int64_t(32) << 20;  // at least two tiles per multiprocessor
};

}  // namespace cuda
}  // namespace sparse_ce
